"""Stands around the callback by which Dynamo compiles a frame: sets flags, marks dimensions, tells what came of it."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.guards import get_guard_fail_reason_helper
from torch._dynamo.utils import get_compilation_metrics
from torch.utils._pytree import tree_leaves

from .conversion import Break, Conversion, Listener, attributed
from .flags import flags
from .reading import is_data_dependent

Varies = Callable[[int], bool] | None  # whether a dimension of that size varies from call to call


class Watcher:
    """Stands around a context's callback: sets the flags while a frame is traced, and tells what came of it."""

    def __init__(self, callback: Callable[..., Any], listener: Listener, varies: Varies) -> None:
        self._torchdynamo_orig_backend = callback
        self._listener = listener
        self._varies = varies
        self._guards: dict[tuple[Any, str], Any] = {}

    def __call__(self, frame: Any, cache_entry: Any, frame_state: Any) -> Any:
        """Compile one frame, as the interpreter asks for it."""
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

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_guards": {}}  # they are of this process, and code objects cannot be pickled

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
