"""Put a model, and the state of its optimizers, on a device."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from . import optimizers as rebinding
from . import tree
from .tree import Undo


def move(model: nn.Module, optimizers: tuple[Optimizer, ...], device: torch.device) -> Undo:
    """Move parameters and buffers to ``device``, and bind the optimizers to what the parameters became.

    Tied parameters stay tied. Where everything is there already, nothing is touched.

    Args:
        model: The model.
        optimizers: Those that step it.
        device: Where to.

    Returns:
        A function that takes it all back.
    """
    if all(_is_on(tensor, device) for tensor in (*model.parameters(), *model.buffers())):
        return lambda: None
    restore = tree.tensors(model)
    before = rebinding.parameters_by_name(model)
    tied = _tied(model)
    model.to(device)
    _tie(tied)
    rebound = [rebinding.rebind(each, before, rebinding.parameters_by_name(model)) for each in optimizers]

    def undo() -> None:
        for each in rebound:
            each()
        restore()

    return undo


def _tied(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """The places of each parameter that stands in more than one."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    return [each for each in places.values() if len(each) > 1]


def _tie(tied: list[list[tuple[nn.Module, str]]]) -> None:
    """Make one parameter of those again; ``Module.to`` makes one for each place where the devices differ in kind."""
    for (first, first_name), *others in tied:
        for module, name in others:
            module._parameters[name] = first._parameters[first_name]


def _is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)
