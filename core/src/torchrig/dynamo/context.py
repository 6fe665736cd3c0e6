"""The contexts that compile: torchrig's own, which is watched, and what one of the user's asked for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from .conversion import Listener
from .watcher import Varies, Watcher

Context = Any  # torch._dynamo.eval_frame.OptimizeContext; its name moved before and is private


def _context(**kwargs: Any) -> Context:
    compiled: Any = torch.compile(nn.Identity(), **kwargs)
    return compiled.dynamo_ctx


def innermost_backend(callback: Any) -> Callable[..., Any]:
    """The backend at the end of a callback's chain."""
    while hasattr(callback, "_torchdynamo_orig_backend"):
        callback = callback._torchdynamo_orig_backend
    return callback  # type: ignore[no-any-return]


def configured_backend(kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """The callable that ``torch.compile(**kwargs)`` would call: mode, options and ``dynamic`` already in it."""
    options = kwargs.get("options")
    copied = {
        **kwargs,
        "options": None if options is None else dict(options),
    }  # torch.compile pops from the caller's dict
    return innermost_backend(_context(**copied).callback)


_ISOLATE = "isolate_recompiles" in inspect.signature(torch.compile).parameters


def watched_context(
    listener: Listener, *, guard_filter_fn: Any = None, varies: Varies = None, **compiling: Any
) -> Context:
    """A context that compiles under torchrig's flags, and tells ``listener`` of each conversion.

    Call it with a function to get the compiled function, with a module to get an ``OptimizedModule``.
    Where torch has it (2.13), the context counts its recompiles apart from others on the same code object: two kinds
    may share one ``forward`` by inheritance, and every class of ``torch.nn`` shares one through Dynamo's own wrapper.
    Tensors whose first dimension has a size for which ``varies`` is true are traced with that dimension dynamic.
    What else there is (``backend``, ``fullgraph``, ``dynamic``) is as for ``torch.compile``.
    """
    more: dict[str, Any] = {"isolate_recompiles": True} if _ISOLATE else {}
    if guard_filter_fn is not None:
        more["options"] = {"guard_filter_fn": guard_filter_fn}
    context = _context(**compiling, **more)
    context.callback = Watcher(context.callback, listener, varies)
    # A deep copy of a module that holds this context shares it; a context of its own would compile everything again.
    context.__deepcopy__ = lambda memo: context
    return context


@dataclass(frozen=True)
class Asked:
    """What one call of ``torch.compile`` asked for, read back from what it left behind.

    Args:
        backend: The backend, with mode and options already in it.
        name: Its name.
        extra: The mode and options in it: ``{"mode": ...}``, ``{"options": ...}``, or Inductor's own configuration,
            into which it turns a mode, as ``{"options": ...}``.
        fullgraph: As given.
        dynamic: As given.
    """

    backend: Callable[..., Any]
    name: str
    extra: Mapping[str, Any]
    fullgraph: bool
    dynamic: bool | None


def asked_of(module: nn.Module) -> Asked | None:
    """What ``torch.compile(module, ...)`` or ``module.compile(...)`` asked for; ``None`` if neither was called on it.

    The context of a compiled function is in its closure; ``module.compile()`` keeps nothing else of it (torch 2.9 and
    2.13).
    """
    context = module.__dict__.get("dynamo_ctx") or _context_in(module.__dict__.get("_compiled_call_impl"))
    if not isinstance(context, torch._dynamo.eval_frame.OptimizeContext):
        return None
    backend: Any = innermost_backend(context.callback)
    config = getattr(backend, "config", None)
    extra = {"options": dict(config)} if config else dict(getattr(backend, "kwargs", {}))
    name = str(getattr(backend, "compiler_name", None) or getattr(backend, "__name__", type(backend).__name__))
    return Asked(backend, name, extra, context.fullgraph, context._dynamic)


def _context_in(function: Any) -> Any:
    closure = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    return closure.get("self")


def mode_options(mode: str, dynamic: bool | None) -> dict[str, Any]:
    """The options that a mode of Inductor's stands for."""
    import torch._inductor

    return torch._inductor.list_mode_options(mode, dynamic)


class WrappedRegion(OptimizedModule):
    """An ``OptimizedModule`` whose ``_orig_mod`` does not show in ``state_dict`` keys.

    Made by changing the class of what a context returned, so that everything else about it is torch's own.
    """

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state of the wrapped module, under its own names."""
        return self._orig_mod.state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        # nn.Module.load_state_dict hands the children what this dict holds under their prefix: rename it in place.
        for key in [key for key in state_dict if key.startswith(prefix) and not key.startswith(f"{prefix}_orig_mod.")]:
            state_dict[f"{prefix}_orig_mod.{key.removeprefix(prefix)}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)


def wrap(context: Context, module: nn.Module) -> nn.Module:
    """``module`` in an ``OptimizedModule`` that keeps its ``state_dict`` keys."""
    before = set(module.__dict__)
    wrapped: nn.Module = context(module)
    for name in (
        set(module.__dict__) - before
    ):  # torch marks the wrapper, and the wrapper passes the mark on to the module
        del module.__dict__[name]
    wrapped.__class__ = WrappedRegion
    return wrapped
