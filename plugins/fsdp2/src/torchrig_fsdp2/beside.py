"""What is remembered of a sharded module, beside it: how it was sharded, so that a copy can be sharded alike."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Sharded:
    """How a module was sharded.

    Args:
        attributes: The names that came to ``vars(module)``.
        arguments: What ``fully_shard`` was given besides the module; ``None`` for a module that is no unit.
    """

    attributes: tuple[str, ...]
    arguments: Mapping[str, Any] | None = None


_known: dict[int, tuple[weakref.ref[nn.Module], Sharded]] = {}


def remember(module: nn.Module, sharded: Sharded) -> None:
    """Keep it for as long as the module lives."""
    key = id(module)
    _known[key] = (weakref.ref(module, lambda _: _known.pop(key, None)), sharded)


def recall(module: nn.Module) -> Sharded | None:
    """How exactly this module was sharded; ``None`` where torchrig did not do it."""
    entry = _known.get(id(module))
    return entry[1] if entry is not None and entry[0]() is module else None


def forget(module: nn.Module) -> None:
    """Remember nothing of it any more."""
    if recall(module) is not None:
        del _known[id(module)]
