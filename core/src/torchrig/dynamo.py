"""Every touch of PyTorch's private compile surface, in one place.

What is used and why; run on torch 2.13.0, and read in the sources of 2.9.0, where all of it has the same names:

``torch.compile(module).dynamo_ctx``
    The only way from the public call to the context that compiles. Made with an ``nn.Identity``, it lets one context
    compile a plain function (the class's ``forward``) with exactly what ``torch.compile`` would have set up.
``dynamo_ctx.callback``
    Called by the interpreter for each frame it has no compiled code for. Standing around it costs nothing on a step
    that compiles nothing, and it is the narrowest place to hold Dynamo's flags: they are read while a frame is traced.
``_torchdynamo_orig_backend``
    The chain from a callback to the backend; Dynamo matches cache entries by its end, so a wrapper must carry it.
``torch._dynamo.utils.get_compilation_metrics``
    Per frame: the guard that failed before a recompile, why a frame fell back, and at which line.
``GraphModule.compile_subgraph_reason``
    Why a graph ended, with the user's stack.
``OptimizedModule``
    What ``torch.compile(module)`` gives; ``Module._compiled_call_impl``, which ``module.compile()`` leaves behind, is
    touched in :mod:`torchrig.placement`.

``core/tests/test_dynamo.py`` fails when one of them goes away. Importing this module imports Dynamo (about two
seconds), so the rest of torchrig imports it only when something is to be compiled.
"""

from __future__ import annotations

import inspect
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.utils import get_compilation_metrics

Context = Any  # torch._dynamo.eval_frame.OptimizeContext; its name moved before and is private


@dataclass(frozen=True)
class Flag:
    """A Dynamo flag that prepared models are traced with, and why."""

    name: str
    value: Any
    reason: str


FLAGS: tuple[Flag, ...] = (
    Flag(
        "allow_unspec_int_on_nn_module",
        True,
        "a layer's own number read in forward would else cost one graph a layer, then run eager at the eighth",
    ),
    Flag(
        "skip_nnmodule_hook_guards",
        False,
        "a hook put on a block's child after the first call would else never fire (pytorch#117758)",
    ),
    Flag(
        "capture_scalar_outputs", True, "mixture-of-experts routing reads token counts; it would else break the graph"
    ),
    Flag(
        "skip_fwd_side_effects_in_bwd_under_checkpoint",
        True,
        "a side effect in a checkpointed block would else be refused (torch 2.10 and later have the flag)",
    ),
    Flag(
        "optimize_ddp",
        False,
        "DDPOptimizer would cut what runs compiled inside of DistributedDataParallel (a model compiled whole, a region "
        "larger than a bucket) into one graph a bucket; it refuses small buckets, and checkpoints (pytorch#104674)",
    ),
)


def flags() -> dict[str, Any]:
    """The flags of :data:`FLAGS` that this torch has."""
    return {flag.name: flag.value for flag in FLAGS if hasattr(torch._dynamo.config, flag.name)}


@dataclass(frozen=True)
class Break:
    """Where and why a graph ended early."""

    where: str
    reason: str


@dataclass
class Conversion:
    """One attempt of Dynamo's to compile one frame.

    Args:
        function: The frame's function name.
        where: ``file:line`` of its definition.
        mode: ``"train"`` or ``"eval"``, with ``", no_grad"`` where gradients are off.
        resumed: Whether the frame is what follows a graph break.
        graphs: How many graphs the backend was given.
        breaks: The breaks that ended those graphs.
        seconds: Wall time of the attempt, the backend's included.
        recompile_reason: The guard that failed, when the frame had been compiled before.
        skip_reason: Why the frame runs eager, when it does.
        limit_reached: Whether it runs eager because it was recompiled too often.
        restarts: Why tracing was started over; holds the reason of a break that no graph preceded.
    """

    function: str
    where: str
    mode: str
    resumed: bool = False
    graphs: int = 0
    breaks: list[Break] = field(default_factory=list)
    seconds: float = 0.0
    recompile_reason: str | None = None
    skip_reason: str | None = None
    limit_reached: bool = False
    restarts: tuple[str, ...] = ()


class Listener(Protocol):
    """Who is told about conversions."""

    def converted(self, conversion: Conversion) -> None:
        """Take note of a conversion that ended."""

    def failed(self, conversion: Conversion, error: Exception) -> bool:
        """Take note of a conversion that raised; ``True`` runs the frame eager instead of raising ``error``."""


_current = threading.local()


def current() -> tuple[Listener, Conversion] | None:
    """Who listens to the conversion that this thread is in, and the conversion; ``None`` outside of one."""
    return getattr(_current, "value", None)


@contextmanager
def attributed(listener: Listener, conversion: Conversion) -> Iterator[None]:
    """Have what this thread compiles counted for ``conversion``."""
    before = current()
    _current.value = (listener, conversion)
    try:
        yield
    finally:
        _current.value = before


class _Watcher:
    """Stands around a context's callback: sets the flags while a frame is traced, and tells what came of it."""

    def __init__(self, callback: Callable[..., Any], listener: Listener, flags: Mapping[str, Any]) -> None:
        self._torchdynamo_orig_backend = callback
        self._listener = listener
        self._flags = dict(flags)

    def __call__(self, frame: Any, cache_entry: Any, frame_state: Any) -> Any:
        if torch._dynamo.trace_rules.check(frame.f_code):  # a file Dynamo never compiles: nothing to tell
            return self._torchdynamo_orig_backend(frame, cache_entry, frame_state)
        conversion = _conversion_of(frame)
        before = _newest_metrics()
        started = time.perf_counter()
        try:
            with torch._dynamo.config.patch(self._flags), attributed(self._listener, conversion):
                result = self._torchdynamo_orig_backend(frame, cache_entry, frame_state)
        except Exception as error:
            conversion.seconds = time.perf_counter() - started
            _read_metrics(conversion, before)
            if self._listener.failed(conversion, error):
                return _run_eager()
            raise
        conversion.seconds = time.perf_counter() - started
        _read_metrics(conversion, before)
        if result.guarded_code is None and conversion.skip_reason is None:
            conversion.skip_reason = getattr(result, "skip_reason", None) or "Dynamo skipped the frame"
        self._listener.converted(conversion)
        return result


def _run_eager() -> Any:
    """The answer that runs this code, and what it calls, without compiling; what Dynamo itself gives at its limit."""
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy

    eager = _FrameExecStrategy(_FrameAction.RUN_ONLY, _FrameAction.RUN_ONLY)
    return torch._dynamo.types.ConvertFrameReturn(frame_exec_strategy=eager)


def _conversion_of(frame: Any) -> Conversion:
    code = frame.f_code
    first = frame.f_locals.get(code.co_varnames[0]) if code.co_varnames else None
    training = first.training if isinstance(first, nn.Module) else True
    mode = ("train" if training else "eval") + ("" if torch.is_grad_enabled() else ", no_grad")
    resumed = _RESUME.match(code.co_name)
    line = int(resumed["line"]) if resumed else code.co_firstlineno
    function = resumed["function"] if resumed else code.co_name
    return Conversion(function, f"{code.co_filename}:{line}", mode, resumed=resumed is not None)


def unwatched(function: str) -> Conversion:
    """A conversion of which no more is known than that it happens now."""
    return Conversion(function, "unknown", "train" if torch.is_grad_enabled() else "eval, no_grad")


_RESUME = re.compile(r"torch_dynamo_resume_in_(?P<function>.*)_at_(?P<line>\d+)$")


def _newest_metrics() -> Any:
    recent = get_compilation_metrics()
    return recent[-1] if recent else None


def _read_metrics(conversion: Conversion, before: Any) -> None:
    """Fill in what Dynamo wrote down about the newest conversion, if it wrote anything since ``before``."""
    newest = _newest_metrics()
    if newest is None or newest is before:
        return
    conversion.recompile_reason = newest.recompile_reason
    conversion.restarts = tuple(newest.restart_reasons or ())
    if newest.fail_type is None:
        return
    conversion.skip_reason = newest.fail_reason
    # An exception of its own up to torch 2.9, a text since.
    limit_types = ("RecompileLimitExceeded", "FailOnRecompileLimitHit")
    conversion.limit_reached = newest.fail_type in limit_types or "limit exceeded" in (newest.fail_reason or "")
    if newest.fail_user_frame_filename and not conversion.limit_reached:
        where = f"{newest.fail_user_frame_filename}:{newest.fail_user_frame_lineno}"
        conversion.breaks.append(Break(where, newest.fail_reason or newest.fail_type))


def break_of(graph: torch.fx.GraphModule) -> Break | None:
    """The graph break that ended ``graph``; ``None`` when it ended with the function."""
    reason = getattr(graph, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    stack = reason.user_stack or []
    where = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "unknown"
    return Break(where, reason.reason)


def family_of(error: Exception) -> str:
    """What kind of failure Dynamo reports: ``"backend"``, ``"limit"``, ``"break"`` or ``"other"``."""
    if isinstance(error, torch._dynamo.exc.BackendCompilerFailed):
        return "backend"
    if isinstance(error, torch._dynamo.exc.FailOnRecompileLimitHit):
        return "limit"
    if isinstance(error, torch._dynamo.exc.Unsupported):
        return "break"
    return "other"


def recompile_limit() -> int:
    """How often Dynamo recompiles one function before it runs it eager."""
    return torch._dynamo.config.recompile_limit


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
    listener: Listener,
    *,
    backend: Callable[..., Any],
    fullgraph: bool,
    dynamic: bool | None,
    guard_filter_fn: Any = None,
) -> Context:
    """A context that compiles with ``backend`` under torchrig's flags, and tells ``listener`` of each conversion.

    Call it with a function to get the compiled function, with a module to get an ``OptimizedModule``.
    Where torch has it (2.13), the context counts its recompiles apart from others on the same code object: two kinds
    may share one ``forward`` by inheritance, and every class of ``torch.nn`` shares one through Dynamo's own wrapper.
    """
    more: dict[str, Any] = {"isolate_recompiles": True} if _ISOLATE else {}
    if guard_filter_fn is not None:
        more["options"] = {"guard_filter_fn": guard_filter_fn}
    context = _context(backend=backend, fullgraph=fullgraph, dynamic=dynamic, **more)
    context.callback = _Watcher(context.callback, listener, flags())
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
