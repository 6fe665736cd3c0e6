"""Bring batches to the device the model is on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader


def place(loader: DataLoader[Any], device: torch.device) -> Any:
    """The loader itself where there is nothing to move (the CPU), else a :class:`DeviceLoader` around it."""
    return loader if device.type == "cpu" else DeviceLoader(loader, device)


class DeviceLoader:
    """A ``DataLoader`` whose batches arrive on a device.

    Iterating moves every tensor of a batch, in any nesting of lists, tuples, dicts and objects with a ``to`` method of
    their own; the copy is asynchronous where the loader pins its memory. Everything else is the loader's.

    Args:
        loader: The loader.
        device: Where its batches go.
    """

    def __init__(self, loader: DataLoader[Any], device: torch.device) -> None:
        self.loader = loader
        self.device = device

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield to_device(batch, self.device, non_blocking=bool(self.loader.pin_memory))

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not there yet: unpickling asks before __init__ would have run
            raise AttributeError(name)
        return getattr(self.loader, name)


def to_device(batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """``batch`` with every tensor in it on ``device``."""

    def move(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=non_blocking) if isinstance(leaf, torch.Tensor) else _move_other(leaf, device)

    return pytree.tree_map(move, batch)


def _move_other(leaf: Any, device: torch.device) -> Any:
    to = getattr(leaf, "to", None)
    return to(device) if callable(to) else leaf
