"""Each process reads its share of a loader: the samples in the loader's own order, dealt out in turn.

Dealt out like cards, the parts of one round make up what one process would have read at that place. So a loader with
batches of ``B`` on ``W`` processes gives, step for step, the samples of one process with batches of ``W * B``; with
``drop_last`` exactly those, and else all of them, with some of the first once more where the last round is not full.

All processes must deal out the same order. What draws it is made to agree once, in ``prepare``: the generator of a
sampler that has one starts from the first process's state, and any other sampler draws from a random stream of its own,
whose seed is the first process's. No process waits for another while it reads.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler

from . import processes
from .errors import ArgumentError
from .hookspecs import Share
from .loaders import DeviceLoader
from .tree import Undo


def shard(loader: DataLoader[Any], share: Share, undos: list[Undo]) -> Any:
    """A loader that reads a share of the samples, and is the given one in everything else.

    Args:
        loader: The loader. It is not changed, but for the state of its sampler's generator.
        share: Which part.
        undos: Gets how to take back what was changed.

    Returns:
        A copy of the loader; the loader itself where there is one part only, or where its sampler deals out already, as
        a ``DistributedSampler`` does.

    Raises:
        ArgumentError: Its dataset is iterable, and so cannot be split from outside; or its sampler deals out other
            parts.
    """
    if share.count == 1:
        return loader
    if issubclass(type(loader), DeviceLoader):  # isinstance asks it for the class of what is inside
        placed = cast(DeviceLoader, loader)
        return DeviceLoader(shard(placed.loader, share, undos), placed.device)
    if isinstance(loader.dataset, IterableDataset):
        raise ArgumentError(
            f"{type(loader.dataset).__name__} is an iterable dataset: each of the {share.count} processes would read "
            "all of it, as only the dataset itself can leave samples out. Have it give each process its own part (by "
            "torch.distributed.get_rank(), or a method of its own such as shard), and say so: shard_loaders=False."
        )
    return loader if _deals_out(loader, share) else _copy(loader, share, undos)


def _deals_out(loader: DataLoader[Any], share: Share) -> bool:
    """Whether a sampler of the user's deals out already; told as ``DistributedSampler`` and its kin tell it."""
    for sampler in _samplers(loader):
        part = getattr(sampler, "rank", None), getattr(sampler, "num_replicas", None)
        if None in part:
            continue
        if part != (share.index, share.count):
            raise ArgumentError(
                f"The loader's {type(sampler).__name__} reads part {part[0]} of {part[1]}, and this process trains on "
                f"part {share.index} of {share.count}. Leave the sampler to prepare, or keep it as it is: "
                "shard_loaders=False."
            )
        return True
    return False


def _samplers(loader: DataLoader[Any]) -> Iterator[Any]:
    yield from (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))


def _copy(loader: DataLoader[Any], share: Share, undos: list[Undo]) -> DataLoader[Any]:
    """The loader with other samplers. A copy keeps what a subclass adds, and all that a constructor would be told."""
    seed = _agree(loader, undos)
    batches: Any = loader.batch_sampler
    changed: dict[str, Any] = {"_iterator": None}  # the workers of an earlier epoch are the original's
    if batches is None:  # the dataset makes batches itself
        changed["sampler"] = ShareSampler(loader.sampler, share, seed)
    elif type(batches) is BatchSampler:
        dealt = ShareSampler(batches.sampler, share, seed, drop_last=batches.drop_last)
        changed["sampler"], changed["batch_sampler"] = dealt, BatchSampler(dealt, batches.batch_size, batches.drop_last)
    else:
        changed["batch_sampler"] = ShareSampler(batches, share, seed)
    copied = copy.copy(loader)
    copied.__dict__.update(changed)  # DataLoader refuses other samplers to those who assign them
    return copied


def _agree(loader: DataLoader[Any], undos: list[Undo]) -> int:
    """Have all processes draw the same order; returns the seed for what has no generator."""
    generators = [each for sampler in _samplers(loader) if (each := _generator_of(sampler)) is not None]
    found = {id(each): each for each in generators}.values()
    default = torch.Generator()
    default.set_state(torch.get_rng_state())
    seed = next((each.initial_seed() for each in found), int(torch.randint(2**48, (), generator=default)))
    agreed: list[Any] = [seed, *(each.get_state() for each in found)]
    if processes.has_group():
        dist.broadcast_object_list(agreed, src=0)
    for generator, state in zip(found, agreed[1:], strict=True):
        undos.append(_put(generator, state))
    return int(agreed[0])


def _put(generator: torch.Generator, state: torch.Tensor) -> Undo:
    before = generator.get_state()
    generator.set_state(state)

    def undo() -> None:
        generator.set_state(before)

    return undo


def _generator_of(sampler: Any) -> torch.Generator | None:
    generator = getattr(sampler, "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


class ShareSampler(Sampler[Any]):
    """Every so-many-th of what a sampler gives. All else is that sampler's.

    Args:
        sampler: Gives indices, or batches of them.
        share: Which part, of how many.
        seed: For a sampler that draws from torch's global random state: each epoch has a stream of its own.
        drop_last: Whether a last round that does not reach all is left out; else it is filled up with the first ones.
    """

    def __init__(self, sampler: Iterable[Any], share: Share, seed: int, drop_last: bool = False) -> None:
        self.sampler = sampler
        self.rank = share.index
        self.num_replicas = share.count
        self.drop_last = drop_last
        self.epoch = 0
        self._seed = seed

    def set_epoch(self, epoch: int) -> None:
        """Have the order of the next epoch depend on this number; without it, epochs count themselves.

        Args:
            epoch: From 0.
        """
        self.epoch = epoch
        generators = (_generator_of(self.sampler), _generator_of(getattr(self.sampler, "sampler", None)))
        for generator in filter(None, generators):
            generator.manual_seed(self._seed + epoch)

    def __iter__(self) -> Iterator[Any]:
        first: list[Any] = []
        for dealt in self._rounds():
            first = first or dealt
            if len(dealt) == self.num_replicas:
                yield dealt[self.rank]
            elif not self.drop_last:
                yield next(itertools.islice(itertools.chain(dealt, itertools.cycle(first)), self.rank, None))

    def __len__(self) -> int:
        total: int = len(self.sampler)  # type: ignore[arg-type]  # its own TypeError where it has no length
        return total // self.num_replicas if self.drop_last else -(-total // self.num_replicas)

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":  # not there yet: unpickling asks before there is anything
            raise AttributeError(name)
        return getattr(self.sampler, name)

    def _rounds(self) -> Iterator[list[Any]]:
        """What the sampler gives, in rounds of one for each process; the last may be shorter."""
        seed, self.epoch = self._seed + self.epoch, self.epoch + 1
        if isinstance(self.sampler, SequentialSampler):
            return _in_rounds(iter(self.sampler), self.num_replicas)
        return _drawing(self.sampler, self.num_replicas, seed)


def _in_rounds(given: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while dealt := list(itertools.islice(given, size)):
        yield dealt


def _drawing(sampler: Iterable[Any], size: int, seed: int) -> Iterator[list[Any]]:
    """The rounds of a sampler that finds, in place of torch's global random state, a stream that begins at ``seed``."""
    given, state = None, torch.Generator().manual_seed(seed).get_state()
    while True:
        outside = torch.get_rng_state()
        torch.set_rng_state(state)
        try:
            given = iter(sampler) if given is None else given
            dealt = list(itertools.islice(given, size))
        finally:
            state = torch.get_rng_state()
            torch.set_rng_state(outside)
        if not dealt:
            return
        yield dealt
