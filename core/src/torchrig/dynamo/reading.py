"""What Dynamo's graphs and errors say of themselves."""

from __future__ import annotations

import re

import torch
import torch._dynamo

from .conversion import Break


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
    # The last two are what becomes of a break inside a checkpoint, which a graph holds whole or not at all.
    exc = torch._dynamo.exc
    if isinstance(error, (exc.Unsupported, exc.UserError, exc.UncapturedHigherOrderOpError)):
        return "break"
    return "other"


def is_control_flow(error: Exception) -> bool:
    """Whether Dynamo raised it through a backend to go on in another way, as to trace once more; no failure at all."""
    return isinstance(error, (torch._dynamo.exc.RestartAnalysis, torch._dynamo.exc.SkipFrame))


_DATA_DEPENDENT = re.compile(r"data-dependent|unbacked|\bu\d+\b")


def is_data_dependent(error: Exception) -> bool:
    """Whether tracing, or a backend, could not do with a size that only the data tell; they are called ``u0``, ..."""
    return _DATA_DEPENDENT.search(str(error)) is not None
