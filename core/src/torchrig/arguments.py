"""Sort what ``prepare`` was given into models, optimizers, schedulers, loaders and losses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset

from . import optimizers as rebinding
from .errors import ArgumentError

T = TypeVar("T")


@dataclass(frozen=True)
class Arguments:
    """What one call of ``prepare`` or ``plan`` was given, each with its place in the call.

    Args:
        given: Everything, in the order given, the model first.
        models: Modules with parameters, each once; the first is the model.
        optimizers: In the order given, each once.
        loaders: In the order given, each once.
        losses: Callables and modules without parameters, in the order given, each once.
    """

    given: tuple[Any, ...]
    models: tuple[nn.Module, ...]
    optimizers: tuple[Optimizer, ...]
    loaders: tuple[DataLoader[Any], ...]
    losses: tuple[Callable[..., Any], ...] = ()

    def optimizers_of(self, model: nn.Module) -> tuple[Optimizer, ...]:
        """The optimizers that step a parameter of ``model``."""
        if not self.optimizers:  # going through the parameters of a large model takes longer than all else here
            return ()
        parameters = list(model.parameters())
        return tuple(optimizer for optimizer in self.optimizers if rebinding.owns_any(optimizer, parameters))

    def losses_of(self, model: nn.Module) -> tuple[Callable[..., Any], ...]:
        """The losses, for the first model: nothing tells which model a loss is for."""
        return self.losses if model is self.models[0] else ()


def sort(model: Any, others: Sequence[Any]) -> Arguments:
    """Sort the arguments, and refuse those that cannot be prepared.

    Raises:
        ArgumentError: Something is none of a module, optimizer, scheduler, loader or callable loss, the model is a
            TorchScript module, or an optimizer steps no parameter of the models.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"prepare takes an nn.Module first, and was given {kind_of(model)}{_advice_on_first(model, others)}."
        )
    for place, other in enumerate(others, start=2):
        if not _is_preparable(other):
            raise ArgumentError(
                f"prepare takes modules, optimizers, LR schedulers, DataLoaders and loss functions; "
                f"argument {place} is {kind_of(other)}{_advice(other)}."
            )
    sorted_ = Arguments(
        given=(model, *others),
        models=_once((model, *(other for other in others if _is_model(other)))),
        optimizers=_once(other for other in others if isinstance(other, Optimizer)),
        loaders=_once(other for other in others if isinstance(other, DataLoader)),
        losses=_once(other for other in others if _is_loss(other)),
    )
    _check(sorted_)
    return sorted_


def require_module(value: object, function: str) -> None:
    """Refuse what is no model.

    Args:
        value: What was given.
        function: What it was given to.

    Raises:
        ArgumentError: It is no ``nn.Module``.
    """
    if not isinstance(value, nn.Module):
        advice = "; unpack what prepare returned" if isinstance(value, (tuple, list)) else _advice_on_first(value, ())
        raise ArgumentError(f"{function} takes the model, and was given {kind_of(value)}{advice}.")


def kind_of(value: object) -> str:
    """What a value is, as a message calls it: ``"an int"``, ``"an instance of SGD"``, ``"the class Net"``."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    if type(value).__module__ != "builtins":
        return f"an instance of {name}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _advice_on_first(value: object, others: Iterable[object]) -> str:
    """What to do about something that stands in the model's place."""
    if hasattr(value, "_torchdynamo_orig_callable"):
        # PyTorch 2.13 takes the wrapper that torch.compile(module) made for a function, and compiles its forward.
        return (
            " that torch.compile made: torch.compile of a compiled module gives a plain function. Pass the model itself"
        )
    if not isinstance(value, type) and any(isinstance(other, nn.Module) for other in others):
        return ": the model comes first"
    return _advice(value)


def _advice(value: object) -> str:
    """What to do about something that cannot be prepared, where it can be guessed what was meant."""
    if isinstance(value, type):
        return f": pass an instance, {value.__name__}()"
    if isinstance(value, str):
        return ": settings are given by name, such as backend='inductor'"
    if isinstance(value, Dataset):
        return ": wrap it in a DataLoader"
    if isinstance(value, Iterator):  # of parameters() or of a loader, most likely
        return ": pass the optimizer itself rather than parameters, and the DataLoader itself rather than its iterator"
    if isinstance(value, (list, tuple)):
        return ": pass each thing in it by itself"
    return ""


def _once(values: Iterable[T]) -> tuple[T, ...]:
    return tuple({id(value): value for value in values}.values())


_KINDS = (nn.Module, Optimizer, LRScheduler, ReduceLROnPlateau, DataLoader)


def _is_preparable(value: Any) -> bool:
    return isinstance(value, _KINDS) or (callable(value) and not isinstance(value, type))


def _is_model(value: Any) -> bool:
    """Whether a further module is a model of its own; a loss has no parameters."""
    return isinstance(value, nn.Module) and next(value.parameters(), None) is not None


def _is_loss(value: Any) -> bool:
    return (callable(value) and not isinstance(value, _KINDS)) or (
        isinstance(value, nn.Module) and not _is_model(value)
    )


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
