"""Sort what ``prepare`` was given into models, optimizers, schedulers, loaders and losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from . import optimizers as rebinding
from .errors import ArgumentError


@dataclass(frozen=True)
class Arguments:
    """What one call of ``prepare`` or ``plan`` was given, each with its place in the call.

    Args:
        given: Everything, in the order given, the model first.
        models: Modules with parameters; the first is the model.
        optimizers: In the order given.
        loaders: In the order given.
    """

    given: tuple[Any, ...]
    models: tuple[nn.Module, ...]
    optimizers: tuple[Optimizer, ...]
    loaders: tuple[DataLoader[Any], ...]

    def optimizers_of(self, model: nn.Module) -> tuple[Optimizer, ...]:
        """The optimizers that step a parameter of ``model``."""
        if not self.optimizers:  # going through the parameters of a large model takes longer than all else here
            return ()
        parameters = list(model.parameters())
        return tuple(optimizer for optimizer in self.optimizers if rebinding.owns_any(optimizer, parameters))


def sort(model: Any, others: Sequence[Any]) -> Arguments:
    """Sort the arguments, and refuse those that cannot be prepared.

    Raises:
        ArgumentError: Something is none of a module, optimizer, scheduler, loader or callable loss, the model is a
            TorchScript module, or an optimizer steps no parameter of the models.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"prepare takes an nn.Module first, and was given {_kind(model)}.")
    for place, other in enumerate(others, start=2):
        if not _is_preparable(other):
            raise ArgumentError(
                f"prepare takes modules, optimizers, LR schedulers, DataLoaders and loss functions; "
                f"argument {place} is {_kind(other)}."
            )
    sorted_ = Arguments(
        given=(model, *others),
        models=(model, *(other for other in others if _is_model(other))),
        optimizers=tuple(other for other in others if isinstance(other, Optimizer)),
        loaders=tuple(other for other in others if isinstance(other, DataLoader)),
    )
    _check(sorted_)
    return sorted_


def _is_preparable(value: Any) -> bool:
    kinds = (nn.Module, Optimizer, LRScheduler, ReduceLROnPlateau, DataLoader)
    return isinstance(value, kinds) or (callable(value) and not isinstance(value, type))


def _is_model(value: Any) -> bool:
    """Whether a further module is a model of its own; a loss has no parameters."""
    return isinstance(value, nn.Module) and next(value.parameters(), None) is not None


def _check(arguments: Arguments) -> None:
    for model in arguments.models:
        if isinstance(model, torch.jit.ScriptModule):
            raise ArgumentError("A TorchScript module cannot be prepared; prepare the nn.Module it was made from.")
    models = arguments.models if arguments.optimizers else ()
    parameters = [parameter for model in models for parameter in model.parameters()]
    for optimizer in arguments.optimizers:
        if not rebinding.owns_any(optimizer, parameters):
            raise ArgumentError(
                f"{type(optimizer).__name__} steps no parameter of the model: was it built for another model, "
                "or before the model was replaced? Build it from this model's parameters()."
            )


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}" if not isinstance(value, type) else f"the class {value.__name__}"
