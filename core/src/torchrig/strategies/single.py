"""Strategy ``single``: one process, one device."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from torchrig import devices, precision
from torchrig.hookspecs import Capabilities, Plan, StrategyInfo, Unit, Wrapped, hookimpl
from torchrig.tree import undoing


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
    with undoing() as undos:
        undos.append(devices.move(model, optimizers, plan.device))
        undos.append(precision.apply(model, optimizers, plan.settings.mixed_precision, plan.device))
        return Wrapped(model, optimizers, undos.all)


@hookimpl
def units(model: nn.Module) -> tuple[Unit, ...]:
    """Everything is kept, and nothing is sent."""
    return (Unit("", {name: parameter.shape for name, parameter in model.named_parameters()}),)
