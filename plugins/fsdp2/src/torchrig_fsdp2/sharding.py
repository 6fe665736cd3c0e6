"""Shard a model in place, unit after unit; all of it or nothing."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchrig import Plan, SettingsError, StrategyError, dtensors, precision, ranks, tree
from torchrig import optimizers as rebinding
from torchrig.regions import resolve
from torchrig.tree import Undo

from . import agree, beside, hooks, initialise, mesh, private, settings, unit, units


def check(model: nn.Module, plan: Plan) -> None:
    """Refuse what cannot be sharded; changes nothing.

    Raises:
        SettingsError: The settings contradict each other, or a sharding that is there already.
        StrategyError: Something in the model cannot be sharded, or has no way to be initialised.
    """
    mesh.check(plan)
    refuse_parameters(model)
    _refuse_other_sharding(model, plan)
    initialise.ways(model)


def shard(model: nn.Module, optimizers: tuple[Optimizer, ...], plan: Plan) -> Undo:
    """Shard ``model``, give it initial values where it has none yet, and bind the optimizers to its shards.

    A model in which ``fully_shard`` was called before keeps its units; the root is sharded where it is not yet.

    Returns:
        A function that takes it all back.

    Raises:
        StrategyUnavailable, SettingsError: There are no processes, or not so many as the settings need.
        StrategyError: The model's own initialisation left something without values.
    """
    processes = mesh.of(plan)
    ranks.refuse_differences(model)
    ways = initialise.ways(model)
    found = [resolve(model, name) for name in units.find(model, plan)]
    with tree.undoing() as undos:
        undos.append(tree.snapshot(model))
        undos.append(lambda: _forget(found))
        before = rebinding.parameters_by_name(model)
        agree.on_values(model, processes, plan.device)
        _shard_units(found, plan, mesh.of_data(processes))
        if ways:
            initialise.carry_out(model, ways, _memory(plan), plan.device)
        undos += [_rebound(each, before, model) for each in optimizers]
        _carry_over(before, rebinding.parameters_by_name(model))
        hooks.put(model, keeps_gathered=settings.of(plan).reshard_after_forward is False)
        undos.append(precision.apply(model, optimizers, _layered(plan), plan.device))
    return undos.all


def _rebound(optimizer: Optimizer, before: dict[str, nn.Parameter], model: nn.Module) -> Undo:
    return rebinding.rebind(optimizer, before, rebinding.parameters_by_name(model))


def _forget(found: Iterable[nn.Module]) -> None:
    """Let each be sharded again; those that the user sharded are not among them."""
    for module in found:
        private.forget_sharded(module)
        for each in module.modules():
            beside.forget(each)


def refuse_parameters(model: nn.Module) -> None:
    """Refuse parameters that ``fully_shard`` cannot cut.

    Raises:
        StrategyError: There is such a one.
    """
    named = model.named_parameters()
    reasons = [f"{name!r} {reason}" for name, parameter in named if (reason := _obstacle(parameter))]
    if reasons:
        more = f" ({len(reasons)} such in all)" if len(reasons) > 1 else ""
        raise StrategyError(f"Strategy 'fsdp2' cannot shard this {type(model).__name__}: {reasons[0]}{more}.")


def _obstacle(parameter: nn.Parameter) -> str | None:
    if is_lazy(parameter):
        return "has no shape yet; run one batch through the model first"
    if parameter.dim() == 0:
        return "is a scalar; give it the shape (1,)"
    if not parameter.is_contiguous():
        return "is not contiguous in memory; make it so with parameter.data = parameter.data.contiguous()"
    return None


def _refuse_other_sharding(model: nn.Module, plan: Plan) -> None:
    """Sharding stays once it is there, so that it cannot be asked for in another way."""
    if not isinstance(model, FSDPModule):
        return
    known = beside.recall(model)
    same = (
        known is not None
        and known.arguments is not None
        and known.arguments["mp_policy"] == precision_of(plan, root=True)
    )
    if not same and plan.settings.mixed_precision == "bf16":
        raise SettingsError(
            f"This {type(model).__name__} is sharded already, with another precision, and fully_shard cannot be "
            "undone. Give it an mp_policy with param_dtype=torch.bfloat16, or leave the sharding to torchrig.",
            setting="mixed_precision",
            origin=plan.settings.origin("mixed_precision"),
        )


def _shard_units(found: list[nn.Module], plan: Plan, data_mesh: DeviceMesh) -> None:
    own = settings.of(plan)
    for module in found:
        given = [(each, each.data) for each in module.parameters() if not dtensors.is_sharded(each)]
        arguments = {
            "mesh": data_mesh,
            "reshard_after_forward": own.reshard_after_forward,
            "mp_policy": precision_of(plan, root=module is found[-1]),
            "offload_policy": _offload(own, plan),
        }
        unit.shard(module, arguments)
        for (
            each,
            data,
        ) in given:  # whole parameters, moved to the device to be cut: prepare holds on to them till its end
            if each.device != data.device:
                each.data = data


def _carry_over(before: dict[str, nn.Parameter], after: dict[str, nn.Parameter]) -> None:
    """Gradients that were there, and attributes that the user set on parameters."""
    for name, new in after.items():
        old = before.get(name)
        if old is None or old is new:
            continue
        new.__dict__.update(old.__dict__)
        if old.grad is not None and dtensors.is_sharded(new):
            new.grad = dtensors.cut_like(old.grad, new)


def precision_of(plan: Plan, *, root: bool) -> MixedPrecisionPolicy:
    """Gather and compute in bfloat16, reduce gradients in float32; outputs come back in float32, as under autocast."""
    if plan.settings.mixed_precision != "bf16":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32 if root else None
    )


def _layered(plan: Plan) -> str:
    """The precision that is left to autocast and loss scaling.

    With float16 parameters the gradients would underflow before they are unscaled: so parameters are gathered in
    float32, and autocast makes the float16 copies, as with one process.
    """
    return "fp16" if plan.settings.mixed_precision == "fp16" else "no"


def _offload(own: settings.FSDP2Settings, plan: Plan) -> OffloadPolicy:
    if not own.cpu_offload:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=own.offload_pin_memory and plan.device.type != "cpu")


def _memory(plan: Plan) -> torch.device:
    return torch.device("cpu") if settings.of(plan).cpu_offload else plan.device
