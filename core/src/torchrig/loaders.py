"""Bring batches to the device the model is on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from .nested import map_leaves

_OWN = frozenset({"loader", "device"})


def place(loader: DataLoader[Any], device: torch.device) -> Any:
    """The loader itself where there is nothing to move, else a :class:`DeviceLoader` around it.

    Args:
        loader: A ``DataLoader``, or what ``place`` made of one before.
        device: Where its batches go; batches are made on the CPU, so that for the CPU nothing is done.
    """
    if isinstance(loader, DeviceLoader):
        return loader if loader.device == device else place(loader.loader, device)
    return loader if device.type == "cpu" else DeviceLoader(loader, device)


class DeviceLoader:
    """A ``DataLoader`` whose batches arrive on a device.

    Iterating moves every tensor of a batch (see :func:`to_device`). Everything else is the loader's: its length,
    reading and setting its attributes, and ``isinstance(..., DataLoader)``, by which libraries choose (``__class__``
    says so, as a mock's does; a real subclass would need the loader's arguments, and a copy its pool of workers).

    Args:
        loader: The loader.
        device: Where its batches go.
    """

    loader: DataLoader[Any]
    device: torch.device

    def __init__(self, loader: DataLoader[Any], device: torch.device) -> None:
        self.loader = loader
        self.device = device

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            # Only a copy from pinned memory can be asynchronous; from other memory the flag means nothing.
            yield to_device(batch, self.device, non_blocking=bool(self.loader.pin_memory))

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:  # not there yet: unpickling asks before there is anything
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.loader, name, value)

    def __reduce__(self) -> tuple[type[DeviceLoader], tuple[DataLoader[Any], torch.device]]:
        return DeviceLoader, (self.loader, self.device)

    def __repr__(self) -> str:
        return f"DeviceLoader({self.loader!r}, device={str(self.device)!r})"

    @property  # type: ignore[misc]  # setting goes to the loader, as of every attribute
    def __class__(self) -> type:
        return type(self.loader)


def to_device(batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """``batch`` with every tensor in it on ``device``.

    Args:
        batch: A tensor, or any nesting of lists, tuples, named tuples, dicts and dataclasses. An object with a ``to``
            method of its own (a tokenizer's encoding, a packed sequence, a graph) is moved by that, as a whole. All
            else, strings for one, is left as it is.
        device: Where to.
        non_blocking: Whether the copy of a tensor may go on while the loop does.
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        return leaf.to(device) if _moves_itself(leaf) else leaf

    return map_leaves(batch, move, is_leaf=_moves_itself)


def _moves_itself(value: Any) -> bool:
    return not isinstance(value, (type, torch.Tensor)) and callable(getattr(value, "to", None))
