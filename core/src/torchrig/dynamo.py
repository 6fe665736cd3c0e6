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
``torch._dynamo.guards.get_guard_fail_reason_helper``
    Which of one graph's guards fails. Its arguments differ between 2.9 and 2.13.
``torch._functorch.config.force_non_lazy_backward_lowering``
    Has AOTAutograd compile the backward with the forward (2.13; 2.9 has no such flag).
``_dynamo_weak_dynamic_indices``
    What the public ``maybe_mark_dynamic`` leaves on a tensor; there is no public way to take it off again.
``GraphModule.compile_subgraph_reason``
    Why a graph ended, with the user's stack.
``OptimizedModule``
    What ``torch.compile(module)`` gives; ``Module._compiled_call_impl``, which ``module.compile()`` leaves behind, is
    touched in :mod:`torchrig.placement`.

``check_if_dynamo_supported``, ``torch._dynamo.config.disable`` and ``.suppress_errors``
    Whether this Python can compile at all, and what keeps code eager without a word: for ``torchrig doctor``. Run on
    torch 2.13.0.

``core/tests/test_dynamo.py`` fails when one of them goes away. Importing this module imports Dynamo (about two
seconds), so the rest of torchrig imports it only when something is to be compiled.
"""

from __future__ import annotations

import inspect
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch._dynamo
import torch._functorch.config
import torch.fx.experimental._config
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.guards import get_guard_fail_reason_helper
from torch._dynamo.utils import get_compilation_metrics
from torch.utils._pytree import tree_leaves

Varies = Callable[[int], bool] | None  # whether a dimension of that size varies from call to call
Context = Any  # torch._dynamo.eval_frame.OptimizeContext; its name moved before and is private


@dataclass(frozen=True)
class Flag:
    """A flag of PyTorch's compiler that prepared models are traced with, and why.

    Args:
        config: The configuration module it is in.
        name: Its name.
        value: Its value while a frame of a prepared model is traced.
        reason: What goes wrong without it.
        training: Whether it is set for modules in training mode only.
        daring: Whether tracing may fail because of it; what does is traced again without.
    """

    config: Any
    name: str
    value: Any
    reason: str
    training: bool = False
    daring: bool = False


FLAGS: tuple[Flag, ...] = (
    Flag(
        torch._dynamo.config,
        "allow_unspec_int_on_nn_module",
        True,
        "a layer's own number read in forward would else cost one graph a layer, then run eager at the eighth",
    ),
    Flag(
        torch._dynamo.config,
        "skip_nnmodule_hook_guards",
        False,
        "a hook put on a block's child after the first call would else never fire (pytorch#117758)",
    ),
    Flag(
        torch._dynamo.config,
        "capture_scalar_outputs",
        True,
        "mixture-of-experts routing reads token counts; it would else break the graph",
    ),
    Flag(
        torch._dynamo.config,
        "capture_dynamic_output_shape_ops",
        True,
        "an expert takes the tokens routed to it, however many; it would else break the graph at each expert",
        daring=True,
    ),
    Flag(
        torch._dynamo.config,
        "skip_fwd_side_effects_in_bwd_under_checkpoint",
        True,
        "a side effect in a checkpointed block would else be refused (torch 2.10 and later have the flag)",
    ),
    Flag(
        torch.fx.experimental._config,
        "use_duck_shape",
        False,
        "a sequence as long as the batch is large would else be taken for it, and need a graph of its own",
    ),
    Flag(
        torch._functorch.config,
        "force_non_lazy_backward_lowering",
        True,
        "a backend that fails on the backward would else raise in the middle of the loop, from loss.backward()",
        training=True,  # a forward that nothing is learnt from may never need its backward
    ),
    Flag(
        torch._dynamo.config,
        "optimize_ddp",
        False,
        "DDPOptimizer would cut what runs compiled inside of DistributedDataParallel (a model compiled whole, a region "
        "larger than a bucket) into one graph a bucket, and it refuses buckets of less than 1 MB",
    ),
)


@contextmanager
def flags(training: bool, daring: bool) -> Iterator[None]:
    """Hold the flags of :data:`FLAGS` that this torch has."""
    with ExitStack() as held:
        for flag in FLAGS:
            wanted = (training or not flag.training) and (daring or not flag.daring)
            if wanted and hasattr(flag.config, flag.name):
                held.enter_context(flag.config.patch(flag.name, flag.value))
        yield


def unsupported() -> str | None:
    """Why Dynamo cannot compile in this Python at all; ``None`` where it can."""
    try:
        torch._dynamo.eval_frame.check_if_dynamo_supported()
    except RuntimeError as error:
        return str(error)
    return None


def switches() -> dict[str, bool]:
    """Dynamo's flags that keep code eager without a word, and whether they are on.

    ``disable`` compiles nothing; ``suppress_errors`` runs eager what cannot be compiled.
    """
    return {name: bool(getattr(torch._dynamo.config, name, False)) for name in ("disable", "suppress_errors")}


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
        daring: Whether it is tried with the daring flags, and will be again without them.
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
    daring: bool = True


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

    def __init__(self, callback: Callable[..., Any], listener: Listener, varies: Varies) -> None:
        self._torchdynamo_orig_backend = callback
        self._listener = listener
        self._varies = varies
        self._guards: dict[tuple[Any, str], Any] = {}

    def __call__(self, frame: Any, cache_entry: Any, frame_state: Any) -> Any:
        if torch._dynamo.trace_rules.check(frame.f_code):  # a file Dynamo never compiles: nothing to tell
            return self._torchdynamo_orig_backend(frame, cache_entry, frame_state)
        conversion = _conversion_of(frame)
        failed = _failed_guard(self._guards.get((frame.f_code, conversion.mode)), frame.f_locals)
        before = _newest_metrics()
        started = time.perf_counter()
        try:
            with _marked(frame.f_locals, self._varies), attributed(self._listener, conversion):
                result = self._convert(conversion, frame, cache_entry, frame_state)
        except Exception as error:
            conversion.seconds = time.perf_counter() - started
            _read_metrics(conversion, before, failed)
            if self._listener.failed(conversion, error):
                return _run_eager()
            raise
        conversion.seconds = time.perf_counter() - started
        _read_metrics(conversion, before, failed)
        if result.guarded_code is not None:
            self._guards[frame.f_code, conversion.mode] = result.guarded_code.guard_manager
        elif conversion.skip_reason is None:
            conversion.skip_reason = getattr(result, "skip_reason", None) or "Dynamo skipped the frame"
        self._listener.converted(conversion)
        return result

    def _convert(self, conversion: Conversion, *frame: Any) -> Any:
        training = conversion.mode.startswith("train")
        try:
            with flags(training, daring=True):
                return self._torchdynamo_orig_backend(*frame)
        except Exception as error:
            if not is_data_dependent(error):
                raise
        conversion.graphs, conversion.breaks, conversion.daring = 0, [], False
        with flags(training, daring=False):
            return self._torchdynamo_orig_backend(*frame)


_MARK = "_dynamo_weak_dynamic_indices"  # what maybe_mark_dynamic leaves on a tensor
_MARKED = "_has_dynamo_dim_marking"


@contextmanager
def _marked(values: Mapping[str, Any], varies: Varies) -> Iterator[None]:
    """Mark the first dimension of each tensor dynamic where it varies, while the frame is traced.

    The mark is taken off again: a tensor that carries one makes other compiled code, which did not see it, recompile.
    """
    marked = [] if varies is None else [each for each in _tensors(values) if each.dim() and varies(each.shape[0])]
    marked = [each for each in marked if not hasattr(each, _MARK)]  # marked by the user: theirs
    flagged = [each for each in marked if not hasattr(each, _MARKED)]
    for each in marked:
        torch._dynamo.maybe_mark_dynamic(each, 0)
    try:
        yield
    finally:
        for name, tensors in ((_MARK, marked), (_MARKED, flagged)):
            for each in tensors:
                if hasattr(each, name):
                    delattr(each, name)


def _tensors(values: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors among a frame's locals, and in lists, tuples and dictionaries among them."""
    leaves = tree_leaves(list(values.values()))
    return list({id(each): each for each in leaves if isinstance(each, torch.Tensor)}.values())


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


_COMPILE_ID = re.compile(r"^(None|\d+/\d+(_\d+)?): ")  # in front of a failed guard; it says nothing to a person
_RESUME = re.compile(r"torch_dynamo_resume_in_(?P<function>.*)_at_(?P<line>\d+)$")


def _newest_metrics() -> Any:
    recent = get_compilation_metrics()
    return recent[-1] if recent else None


def _failed_guard(guards: Any, values: Mapping[str, Any]) -> str | None:
    """Which of the guards of the newest graph in the same mode fails for these locals.

    Dynamo itself asks the newest graph of all, which may be one of another mode, and then says no more than that.
    """
    if guards is None or getattr(guards, "cache_entry", None) is None:  # gone, as after torch._dynamo.reset
        return None
    backend = guards.cache_entry.backend
    more = {"backend": backend} if "backend" in inspect.signature(get_guard_fail_reason_helper).parameters else {}
    return get_guard_fail_reason_helper(guards, dict(values), None, **more)


def _read_metrics(conversion: Conversion, before: Any, failed: str | None) -> None:
    """Fill in what Dynamo wrote down about the newest conversion, if it wrote anything since ``before``."""
    newest = _newest_metrics()
    if newest is None or newest is before:
        return
    reason = failed or newest.recompile_reason
    conversion.recompile_reason = None if reason is None else _COMPILE_ID.sub("", reason)
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


_DATA_DEPENDENT = re.compile(r"data-dependent|unbacked|\bu\d+\b")


def is_data_dependent(error: Exception) -> bool:
    """Whether tracing, or a backend, could not do with a size that only the data tell; they are called ``u0``, ..."""
    return _DATA_DEPENDENT.search(str(error)) is not None


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
    context.callback = _Watcher(context.callback, listener, varies)
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
