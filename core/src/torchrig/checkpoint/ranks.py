"""Do something on all ranks, and fail on all of them where one failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from torchrig.errors import CheckpointError, TorchrigError
from torchrig.processes import has_group

T = TypeVar("T")


def rank() -> int:
    """This process's rank; 0 where there is one process."""
    return dist.get_rank() if has_group() else 0


def world_size() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if has_group() else 1


def gather(value: T) -> list[T]:
    """What every rank gave, by rank. What it gives must be picklable."""
    gathered: list[Any] = [value]
    if has_group():
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, value)
    return gathered


def together(doing: str, function: Callable[[], T]) -> T:
    """Call ``function`` on every rank, and go on only where it returned on all of them.

    Args:
        doing: What it does, as a message calls it: ``"Saving runs/1"``.
        function: What to call.

    Raises:
        CheckpointError: It raised on some rank: that rank's own error there, and one that tells of it on the others.
    """
    error: BaseException | None = None
    try:
        result = function()
    except (Exception, CheckpointException) as raised:
        error = raised
    failed = {place: told for place, told in enumerate(gather(None if error is None else _told(error))) if told}
    if isinstance(error, TorchrigError):
        raise error
    if error is not None:
        raise CheckpointError(f"{doing} failed: {failed[rank()]}") from error
    if failed:
        place, told = next(iter(failed.items()))
        raise CheckpointError(f"{doing} failed on rank {place}, and was stopped on all: {told}")
    return result


def _told(error: BaseException) -> str:
    if isinstance(error, CheckpointException):  # of PyTorch's: it holds each rank's own error
        place, (cause, _) = next(iter(error.failures.items()))
        return f"rank {place}: {type(cause).__name__}: {cause}"
    return str(error) if isinstance(error, TorchrigError) else f"{type(error).__name__}: {error}"
