"""What belongs in a checkpoint: one tree of values for the model, its optimizers, and all that a user adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchrig import precision
from torchrig.errors import CheckpointError
from torchrig.unwrap import unwrap

from . import names, optimizers
from .leaves import Parted
from .wording import listed

Tree = dict[str, Any]


def capture(
    model: nn.Module, stepping: Sequence[Optimizer], extra: Mapping[str, Any]
) -> tuple[Tree, dict[str, torch.Tensor]]:
    """The state of a run: a tree of plain values with marks for tensors, and the tensors.

    Raises:
        CheckpointError: Something in it cannot be saved.
    """
    bare, parted = unwrap(model), Parted()
    state = names.state_dict(bare)  # first: it makes sharded parameters whole again where a forward left them gathered
    parameters = names.named_parameters(bare)
    scaling = precision.scaling_of(model)
    tree = {
        "model": {key: parted.part(value, f"model.{key}") for key, (_, value) in state.items()},
        "optimizers": [
            parted.part(optimizers.capture(each, parameters), f"optimizer.{place}")
            for place, each in enumerate(stepping)
        ],
        "scaling": None if scaling is None else scaling.state_dict(),
        "extra": {name: parted.part(state_of(value), f"extra.{name}") for name, value in extra.items()},
        "objects": {name: type(value).__name__ for name, value in extra.items() if has_state(value)},
    }
    return tree, parted.tensors


def has_state(value: Any) -> bool:
    """Whether a value is an object that is saved by its ``state_dict``, and loaded in place."""
    called = ("state_dict", "load_state_dict")
    return not isinstance(value, type) and all(callable(getattr(value, each, None)) for each in called)


def state_of(value: Any) -> Any:
    """What is saved of an extra.

    Raises:
        CheckpointError: It is an optimizer of sharded parameters, whose state means nothing without their names.
    """
    if isinstance(value, nn.Module):
        return {key: tensor for key, (_, tensor) in names.state_dict(unwrap(value)).items()}
    if isinstance(value, Optimizer) and optimizers.is_sharded(value):
        raise CheckpointError(
            f"This {type(value).__name__} steps sharded parameters. Pass it as optimizer=, in a list if there are "
            "several, so that its state is saved by their names."
        )
    return value.state_dict() if has_state(value) else value


def load_into(target: Any, state: Any) -> None:
    """Load what :func:`state_of` gave."""
    if not isinstance(target, nn.Module):
        target.load_state_dict(state)
        return
    bare = unwrap(target)
    live = names.state_dict(bare)
    missing, strange = [key for key in live if key not in state], [key for key in state if key not in live]
    if missing or strange:
        raise CheckpointError(
            f"The saved {type(bare).__name__} does not fit: {unfit(missing, strange, ())}. Build it as it was saved."
        )
    bare.load_state_dict({live[key][0]: value for key, value in state.items()})


def unfit(missing: Sequence[str], strange: Sequence[str], shapes: Sequence[str]) -> str:
    """How keys do not fit, in words.

    Args:
        missing: Keys the checkpoint does not have.
        strange: Keys the model does not have.
        shapes: What is said of keys whose shapes differ.
    """
    said = []
    if missing:
        said.append(f"the checkpoint does not have {listed(missing)}")
    if strange:
        said.append(f"the model does not have {listed(strange)}")
    if shapes:
        said.append("; ".join(shapes))
    return "; ".join(said)
