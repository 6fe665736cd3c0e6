"""Strategy ``ddp``: a copy of the model on each process, gradients averaged by PyTorch's ``DistributedDataParallel``.

Regions are compiled inside of it, as PyTorch recommends.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torchrig import devices, precision, ranks
from torchrig.errors import StrategyError
from torchrig.hookspecs import Plan, StrategyInfo, Unit, Wrapped, hookimpl
from torchrig.replicated import Replicated
from torchrig.tree import Undo, undoing


class DdpSettings(BaseModel):
    """The block ``ddp`` of the settings; each means what it means to ``DistributedDataParallel``.

    Args:
        find_unused_parameters: Whether some parameters may get no gradient in a step.
        static_graph: Whether every step uses the same parameters in the same way.
        bucket_cap_mb: How many megabytes of gradients are averaged at once; ``None`` leaves it to PyTorch.
        gradient_as_bucket_view: Whether gradients are views of what is sent, and so take no memory of their own.
        broadcast_buffers: Whether every forward begins with the buffers of the first process.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    find_unused_parameters: bool = False
    static_graph: bool = False
    bucket_cap_mb: float | None = Field(default=None, gt=0)
    gradient_as_bucket_view: bool = False
    broadcast_buffers: bool = True


@hookimpl
def describe() -> StrategyInfo:
    """Say what the strategy is."""
    return StrategyInfo(
        name="ddp",
        summary="a copy on each process, gradients averaged by DistributedDataParallel",
        settings=DdpSettings,
        probe=lambda: None if dist.is_available() else "this PyTorch was built without torch.distributed",
        in_place=False,
        process_group=True,
    )


@hookimpl
def check_model(model: nn.Module, plan: Plan) -> None:
    """Refuse a model with nothing to average, or with parameters that have no data."""
    if plan.device.type == "meta":
        raise StrategyError("Strategy 'ddp' needs a device with memory; device 'meta' has none.")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise StrategyError(
                f"{name!r} is on the meta device, and strategy 'ddp' needs its values: every process starts from those "
                "of the first. Give it memory (model.to_empty(device=...)) and initial values first, or use a strategy "
                "that does it, such as fsdp2."
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise StrategyError(
            f"No parameter of this {type(model).__name__} is trained, so strategy 'ddp' has no gradients to average. "
            "Use strategy='single' on each process."
        )


@hookimpl
def wrap_strategy(model: nn.Module, optimizers: tuple[Optimizer, ...], plan: Plan) -> Wrapped:
    """Move the model to this process's device, run it in the precision asked for, and put it into DDP."""
    own = plan.settings.validate_block("ddp", DdpSettings)
    ranks.refuse_differences(model)
    with undoing() as undos:
        undos.append(_kept_values(model, plan.device))
        undos.append(devices.move(model, optimizers, plan.device))
        undos.append(precision.apply(model, optimizers, plan.settings.mixed_precision, plan.device))
        wrapped = _wrap(model, own)
        undos.append(wrapped.detach)
        return Wrapped(wrapped, optimizers, undos.all)


@hookimpl
def units(model: nn.Module, plan: Plan, processes: int) -> tuple[Unit, ...]:
    """Everything is kept; gradients are averaged, in buckets that are a copy of them unless they are views."""
    gradients = sum(each.nbytes for each in model.parameters() if each.requires_grad)
    own = plan.settings.validate_block("ddp", DdpSettings)
    kept = {name: parameter.shape for name, parameter in model.named_parameters()}
    buckets = 0 if own.gradient_as_bucket_view else gradients
    return (Unit("", kept, reduced=gradients if processes > 1 else 0, workspace=buckets),)


@hookimpl
def unwrap(model: nn.Module, keep_compile: bool) -> nn.Module | None:
    """Give back what is inside ``DistributedDataParallel``."""
    return model.module if isinstance(model, DistributedDataParallel) else None


@hookimpl
def no_sync(model: nn.Module) -> AbstractContextManager[None] | None:
    """PyTorch's own ``no_sync``."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else None


def _wrap(model: nn.Module, own: DdpSettings) -> Replicated:
    arguments = own.model_dump(exclude={"broadcast_buffers"})
    try:
        # Inputs are not moved: the loaders bring them, and a model is called alike under every strategy.
        return Replicated(model, **arguments, **_buffers(own.broadcast_buffers))
    except (RuntimeError, ValueError) as error:
        raise StrategyError(
            f"DistributedDataParallel refuses this {type(model).__name__}: {str(error).splitlines()[0]}"
        ) from error


def _buffers(broadcast: bool) -> dict[str, Any]:
    if broadcast:
        return {}
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters  # in torch 2.13
    return {"forward_sync_buffers" if renamed else "broadcast_buffers": False}


def _kept_values(model: nn.Module, device: torch.device) -> Undo:
    """Keep the values that the first process's will overwrite, until prepare is through.

    Only of what is on the device already: a tensor that is moved there leaves its values where it was.
    """
    own = [each for each in (*model.parameters(), *model.buffers()) if devices.is_on(each, device)]
    kept = [(tensor, tensor.detach().clone()) for tensor in own if dist.get_rank() > 0]

    @torch.no_grad()
    def undo() -> None:
        for tensor, values in kept:
            tensor.copy_(values)

    return undo
