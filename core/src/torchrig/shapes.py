"""Which dimension of the input varies, as far as the loaders tell before the first step.

A graph is built for the shape it sees first. Where the last batch of a loader is smaller, or a batch sampler deals out
batches of any size, the first graph may as well be built for every batch size: it saves the second one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from .hookspecs import DynamicBatch


def dynamic_batch(loaders: Iterable[DataLoader[Any]]) -> DynamicBatch | None:
    """What the loaders' batches vary in; ``None`` where each is as large as the one before.

    Nothing is drawn from a loader for it: that would advance the random state and the workers' queues.

    Args:
        loaders: What ``prepare`` was given.
    """
    found = [each for loader in loaders if (each := _of(loader)) is not None]
    if not found:
        return None
    sizes = frozenset[int]() if any(not each.sizes for each in found) else frozenset().union(*(e.sizes for e in found))
    return DynamicBatch(sizes, "; ".join(dict.fromkeys(each.reason for each in found)))


def _of(loader: DataLoader[Any]) -> DynamicBatch | None:
    sampler: Any = loader.batch_sampler
    if sampler is None:  # the dataset makes the batches, or there are none: nothing is known of their sizes
        return None
    name = type(loader).__name__
    if type(sampler) is not BatchSampler:
        reason = f"{type(sampler).__name__} may deal out batches of any size"
        return DynamicBatch(frozenset(), f"the {name}'s {reason}")
    size, length = sampler.batch_size, _length(sampler.sampler)
    if sampler.drop_last or (length is not None and length % size == 0):
        return None
    if length is None:
        return DynamicBatch(frozenset({size}), f"the {name}'s last batch may hold less than {size} samples")
    rest = length % size
    more = "; size 1 gets a graph of its own" if rest == 1 else ""
    return DynamicBatch(frozenset({size}), f"the {name}'s last batch holds {rest} of {size} samples{more}")


def _length(sampler: Any) -> int | None:
    try:
        return len(sampler)
    except TypeError:  # an IterableDataset's sampler has none
        return None
