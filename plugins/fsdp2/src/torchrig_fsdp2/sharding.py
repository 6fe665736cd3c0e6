"""Shard a model in place, unit after unit; all of it or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchrig import Plan, StrategyError, precision, tree
from torchrig import optimizers as rebinding
from torchrig.regions import resolve
from torchrig.tree import Undo

from . import initialise, loading, mesh, names, settings, units


def shard(model: nn.Module, optimizers: tuple[Optimizer, ...], plan: Plan) -> Undo:
    """Shard ``model``, give it initial values where it has none yet, and bind the optimizers to its shards.

    A module that ``fully_shard`` was called on before stays as it is.

    Returns:
        A function that takes it all back.

    Raises:
        StrategyUnavailable, SettingsError: There are no processes, or not so many as the settings need.
        StrategyError: Something in the model cannot be sharded, or has no way to be initialised.
    """
    whole = mesh.of(plan)
    _refuse(model)
    ways = initialise.ways(model)
    found = [resolve(model, name) for name in units.find(model, plan)]
    undos: list[Undo] = [tree.snapshot(model)]
    try:
        before = rebinding.parameters_by_name(model)
        _shard_units(found, plan, mesh.of_data(whole))
        if ways:
            initialise.carry_out(model, ways, _memory(plan), plan.device)
        after = rebinding.parameters_by_name(model)
        undos += [rebinding.rebind(each, before, after) for each in optimizers]
        loading.accept_whole(model)
        undos.append(precision.apply(model, optimizers, _layered(plan), plan.device))
    except BaseException as error:
        tree.undo_all(undos, error)
        raise
    return lambda: _take_back(undos)


def _take_back(undos: list[Undo]) -> None:
    while undos:
        undos.pop()()


def _refuse(model: nn.Module) -> None:
    """Name what ``fully_shard`` cannot take, before anything is changed."""
    reasons = [f"{name!r} {reason}" for name, tensor in _parameters(model) if (reason := _obstacle(tensor))]
    if reasons:
        more = f" ({len(reasons)} such in all)" if len(reasons) > 1 else ""
        raise StrategyError(f"Strategy 'fsdp2' cannot shard this {type(model).__name__}: {reasons[0]}{more}.")


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    yield from model.named_parameters()


def _obstacle(parameter: nn.Parameter) -> str | None:
    if is_lazy(parameter):
        return "has no shape yet; run one batch through the model first"
    if parameter.dim() == 0:
        return "is a scalar; give it the shape (1,)"
    if not parameter.is_contiguous():
        return "is not contiguous in memory; make it so with parameter.data = parameter.data.contiguous()"
    return None


def _shard_units(found: list[nn.Module], plan: Plan, data_mesh: Any) -> None:
    own = settings.of(plan)
    *_, root = found
    for module in found:
        if isinstance(module, FSDPModule):
            continue
        given = [(each, each.data) for each in module.parameters()]
        fully_shard(
            module,
            mesh=data_mesh,
            reshard_after_forward=own.reshard_after_forward,
            mp_policy=_precision(plan, root=module is root),
            offload_policy=_offload(own, plan),
        )
        for each, data in given:  # what was moved to the device is needed there no longer, and prepare holds on to it
            if each.data is not data and not isinstance(each, torch.distributed.tensor.DTensor):
                each.data = data
        names.keep(module)


def _precision(plan: Plan, *, root: bool) -> MixedPrecisionPolicy:
    """Gather and compute in bfloat16, reduce gradients in float32; outputs come back in float32, as under autocast."""
    if plan.settings.mixed_precision != "bf16":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32 if root else None
    )


def _layered(plan: Plan) -> str:
    """The precision that is left to autocast and loss scaling.

    With float16 parameters the gradients would be reduced before they are unscaled, and would underflow in float16:
    so parameters are gathered in float32, and autocast makes the float16 copies, as with one process.
    """
    return "fp16" if plan.settings.mixed_precision == "fp16" else "no"


def _memory(plan: Plan) -> torch.device:
    return torch.device("cpu") if settings.of(plan).cpu_offload else plan.device


def _offload(own: settings.FSDP2Settings, plan: Plan) -> OffloadPolicy:
    if not own.cpu_offload:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=own.offload_pin_memory and plan.device.type != "cpu")
