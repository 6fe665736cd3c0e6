"""What all ranks of a process group do together: wait longer for one another, and learn when one of them failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch.distributed as dist
from torch import nn

from . import processes
from .errors import RankFailed, StrategyError

PATIENCE = timedelta(hours=2)  # a rank may be compiling for as long while the others wait in a collective


@contextmanager
def patient(timeout: timedelta = PATIENCE) -> Iterator[None]:
    """Wait in collectives of any group for ``timeout`` rather than for what the group was made with.

    Done through ``torch.distributed.distributed_c10d._set_pg_timeout`` and ``_world.pg_map``, which are private: there
    is no public way to change the timeout of a group that exists (torch 2.9 and 2.13). Where they are gone, the groups'
    own timeouts hold.
    """
    before = [(group, each) for group in _groups() if (each := _timeout(group)) is not None and each < timeout]
    try:
        for group, _ in before:
            _set(group, timeout)
        yield
    finally:
        for group, each in before:
            _set(group, each)


@contextmanager
def together(what: str) -> Iterator[None]:
    """Do something on every rank; leave only when all have done it, and raise on all of them if one raises.

    Args:
        what: What is done, as a message calls it.

    Raises:
        RankFailed: Another rank raised. The rank that did raises what it raised.
    """
    try:
        yield
    except Exception as error:
        _tell(f"{type(error).__name__}: {error}")
        raise
    failed = {rank: told for rank, told in enumerate(_tell(None)) if told is not None}
    if failed:
        rank, told = next(iter(failed.items()))
        raise RankFailed(f"Rank {rank} failed in {what}, so that no rank goes on: {told}")


def refuse_differences(model: nn.Module) -> None:
    """Refuse, on every process, a model that is not the first one's: collectives would wait, or mix tensors up.

    Raises:
        StrategyError: Names the process and the first parameter that differs.
    """
    here = [_described(name, parameter) for name, parameter in model.named_parameters()]
    first: list[Any] = [here]
    dist.broadcast_object_list(first, src=0)
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, _difference(here, first[0]))
    for rank, difference in enumerate(said):
        if difference:
            raise StrategyError(
                f"Every process must build the same {type(model).__name__}, and process {rank} has {difference}."
            )


def _described(name: str, parameter: nn.Parameter) -> str:
    frozen = "" if parameter.requires_grad else ", frozen"
    return f"{name!r} ({list(parameter.shape)}, {str(parameter.dtype).removeprefix('torch.')}{frozen})"


def _difference(here: list[str], first: list[str]) -> str:
    for own, other in zip_longest(here, first, fillvalue="no more parameters"):
        if own != other:
            return f"{own} where process 0 has {other}"
    return ""


def _tell(error: str | None) -> list[str | None]:
    """What each rank says; every rank waits here for the others."""
    size = dist.get_world_size() if processes.has_group() else 1
    if size == 1:
        return [error]
    told: list[str | None] = [None] * size
    dist.all_gather_object(told, error)
    return told


def _groups() -> list[Any]:
    if not processes.has_group():
        return []
    from torch.distributed import distributed_c10d

    world = getattr(distributed_c10d, "_world", None)
    return list(getattr(world, "pg_map", ()))


def _timeout(group: Any) -> timedelta | None:
    """The timeout of a group; ``None`` where it cannot be asked for, or this process is not in the group."""
    for device in getattr(group, "_device_types", ()):
        options = getattr(group._get_backend(device), "options", None)
        found = getattr(options, "_timeout", None)
        if isinstance(found, timedelta):
            return found
    return None


def _set(group: Any, timeout: timedelta) -> None:
    from torch.distributed import distributed_c10d

    distributed_c10d._set_pg_timeout(timeout, group)
