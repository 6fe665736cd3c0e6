"""What torchrig remembers of a prepared model, beside the model rather than on it.

Kept by identity and weakly: a model is freed as before, a user's ``__eq__`` or ``__hash__`` plays no part, and nothing
of it shows in ``vars(model)``, a pickle or a copy. What a copy must know of itself is in its compiled forwards.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    import pluggy

    from .hookspecs import Plan, Share
    from .observe import Observation
    from .settings import Settings


@dataclass(frozen=True)
class Prepared:
    """What was made of a model.

    Args:
        settings: The settings that were asked for.
        plan: The plan that was followed.
        observation: What is seen of its compiled regions; ``None`` where nothing is compiled.
        hooks: The plugins of this prepare.
        live: The model that ``prepare`` gave back; the same one for a strategy that works in place.
        share: This process's part of the samples.
    """

    settings: Settings
    plan: Plan
    observation: Observation | None
    hooks: pluggy.PluginManager
    live: weakref.ref[nn.Module]
    share: Share


_prepared: dict[int, tuple[weakref.ref[nn.Module], Prepared]] = {}


def remember(module: nn.Module, prepared: Prepared) -> None:
    """Keep ``prepared`` for as long as ``module`` lives."""
    key = id(module)
    _prepared[key] = (weakref.ref(module, lambda _: _prepared.pop(key, None)), prepared)


def recall(module: nn.Module) -> Prepared | None:
    """What was remembered of exactly this object."""
    entry = _prepared.get(id(module))
    return entry[1] if entry is not None and entry[0]() is module else None


def forget(module: nn.Module) -> None:
    """Remember nothing of ``module`` any more."""
    if recall(module) is not None:
        del _prepared[id(module)]
