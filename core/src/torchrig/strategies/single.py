"""Strategy ``single``: one process, one device."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from torchrig import optimizers as rebinding
from torchrig import precision, tree
from torchrig.hookspecs import Capabilities, Plan, StrategyInfo, Wrapped, hookimpl
from torchrig.tree import Undo


@hookimpl
def describe() -> StrategyInfo:
    """Say what the strategy is."""
    return StrategyInfo(
        name="single",
        summary="one process on one device",
        capabilities=Capabilities(distributed=False),
    )


@hookimpl
def wrap_strategy(model: nn.Module, optimizers: tuple[Optimizer, ...], plan: Plan) -> Wrapped:
    """Move the model and its optimizers' state to the device, and run it in the precision asked for."""
    undos = [_move(model, optimizers, plan.device)]
    try:
        undos.append(precision.apply(model, optimizers, plan.settings.mixed_precision, plan.device))
    except BaseException:
        undos.pop()()
        raise

    def undo() -> None:
        for each in reversed(undos):
            each()

    return Wrapped(model, optimizers, undo)


def _move(model: nn.Module, optimizers: tuple[Optimizer, ...], device: torch.device) -> Undo:
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
