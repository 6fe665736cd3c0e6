"""What a process keeps, receives and sends of each unit, reckoned from shapes: for any number of processes."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from torchrig import Plan, StrategyError, Unit
from torchrig.regions import resolve

from . import mesh, settings, sharding, units


def of(model: nn.Module, plan: Plan, processes: int) -> tuple[Unit, ...]:
    """The units of a model.

    Args:
        model: The model, whole; it may be on the meta device.
        plan: Its plan.
        processes: How many there would be.

    Raises:
        SettingsError: The mesh does not divide so many processes.
        StrategyError: A parameter cannot be sharded, or the setting ``parallelize`` decides what is kept.
    """
    if plan.settings.parallelize is not None:
        raise StrategyError("What a process keeps is up to the function 'parallelize', and cannot be told beforehand.")
    sharding.refuse_parameters(model)
    sizes = mesh.sizes(plan, processes)
    own = _own_parameters(model, units.find(model, plan))
    return tuple(_unit(name, parameters, plan, sizes) for name, parameters in own.items() if parameters)


def _own_parameters(model: nn.Module, names: tuple[str, ...]) -> dict[str, dict[str, nn.Parameter]]:
    """The parameters of each unit that are of none inside it, by their names in the model."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    taken: set[int] = set()
    own: dict[str, dict[str, nn.Parameter]] = {}
    for name in names:
        found = {id(each): each for each in resolve(model, name).parameters() if id(each) not in taken}
        taken |= found.keys()
        own[name] = {name_of[key]: each for key, each in found.items()}
    return own


def _unit(name: str, parameters: Mapping[str, nn.Parameter], plan: Plan, sizes: Mapping[str, int]) -> Unit:
    shards, policy = sizes[mesh.SHARD], sharding.precision_of(plan, root=not name)
    kept = {each: _part(parameter, shards) for each, parameter in parameters.items()}
    part = sum(prod(kept[each]) * _itemsize(policy.param_dtype, p) for each, p in parameters.items())
    trained = {each: parameter for each, parameter in parameters.items() if parameter.requires_grad}
    gradients = sum(prod(kept[each]) * _reduced_itemsize(policy, p) for each, p in trained.items())
    return Unit(
        name,
        kept,
        gathered=_gathers(plan, part, shards, root=not name),
        reduced=(shards - 1) * gradients + (gradients if sizes.get(mesh.REPLICATE, 1) > 1 else 0),
        whole=part * shards if shards > 1 else 0,
    )


def _part(parameter: nn.Parameter, shards: int) -> torch.Size:
    """What a process keeps: rows, as many for each, the last ones padding."""
    rows, *rest = parameter.shape
    return torch.Size((-(-rows // shards), *rest))


def _gathers(plan: Plan, part: int, shards: int, *, root: bool) -> int:
    """Bytes received: for the forward from all, and for the backward from as many as keep it together then."""
    asked = settings.of(plan).reshard_after_forward
    after = (not root) if asked is None else asked
    together = shards if after is True else max(int(after), 1)
    return part * (shards - 1) + part * shards // together * (together - 1)


def _itemsize(dtype: torch.dtype | None, parameter: nn.Parameter) -> int:
    return parameter.itemsize if dtype is None else dtype.itemsize


def _reduced_itemsize(policy: MixedPrecisionPolicy, parameter: nn.Parameter) -> int:
    return _itemsize(policy.reduce_dtype or policy.param_dtype, parameter)
