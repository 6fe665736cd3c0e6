"""Buffers that a block's forward changes: its second computation sees what the first one saw, and changes nothing.

``torch.utils.checkpoint`` restores random numbers for the second computation, and no more. A counter, or the running
mean of a batch normalization, would be moved on twice a step. Compiled along, a block needs none of this: in a graph,
what writes to a buffer is no part of what is computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

_constant = WeakIdKeyDictionary()  # buffers that a forward left alone; the others alone are copied from then on


@dataclass(frozen=True)
class _Kept:
    """A buffer as it was at one time."""

    module: nn.Module
    name: str
    tensor: torch.Tensor
    version: int
    values: torch.Tensor | None

    @property
    def reassigned(self) -> bool:
        return self.module._buffers.get(self.name) is not self.tensor

    @property
    def changed(self) -> bool:
        return self.reassigned or self.tensor._version != self.version

    def restore(self) -> None:
        self.module._buffers[self.name] = self.tensor
        if self.values is not None and self.tensor._version != self.version:
            self.tensor.copy_(self.values)


class Forward:
    """A context for the first computation, that notes which buffers it changes.

    Args:
        module: The block.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before: tuple[_Kept, ...] = ()
        self.changed: tuple[_Kept, ...] = ()

    def __enter__(self) -> None:
        with torch.no_grad():
            self._before = tuple(_kept(self._module))

    def __exit__(self, *_: object) -> None:
        self.changed = tuple(each for each in self._before if each.changed)
        for each in self._before:
            if not each.changed:
                _constant[each.tensor] = True
        self._before = ()


class Again:
    """A context for each further computation: the buffers as they were before the first, and afterwards as now.

    Args:
        first: The context of the first.
        inner: A context that is entered within.
    """

    def __init__(self, first: Forward, inner: Any) -> None:
        self._first = first
        self._inner = inner
        self._now: list[tuple[dict[str, Any], str, Any, torch.Tensor | None]] = []

    @torch.no_grad()
    def __enter__(self) -> None:
        for each in self._first.changed:
            now = each.module._buffers.get(each.name)
            self._now.append((each.module._buffers, each.name, now, None if now is None else now.clone()))
            each.restore()
        self._inner.__enter__()

    @torch.no_grad()
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> Any:
        suppressed = self._inner.__exit__(kind, error, where)
        while self._now:
            buffers, name, now, values = self._now.pop()
            buffers[name] = now
            if now is not None:
                now.copy_(values)
        return suppressed


def _kept(block: nn.Module) -> Iterator[_Kept]:
    for module in block.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_inference():
                values = None if buffer in _constant else buffer.clone()
                yield _Kept(module, name, buffer, buffer._version, values)
