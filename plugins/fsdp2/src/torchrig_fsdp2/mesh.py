"""The mesh of processes: replicas, shards, and what is left to tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchrig import Plan, SettingsError, StrategyUnavailable, processes
from torchrig.hookspecs import Share

from . import settings

REPLICATE, SHARD, TENSOR = "replicate", "shard", "tp"

_made: dict[tuple[str, tuple[tuple[str, int], ...]], tuple[Any, DeviceMesh]] = {}


def of(plan: Plan) -> DeviceMesh:
    """The mesh of a plan: ``shard``, before it ``replicate`` and after it ``tp`` where they are asked for.

    Raises:
        StrategyUnavailable: There is no process group.
        SettingsError: The number of processes cannot be divided as asked for.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise StrategyUnavailable(
            "Strategy 'fsdp2' shards over a group of processes, and there is none. Start the script with torchrun, or "
            "call torch.distributed.init_process_group first."
        )
    return _mesh(plan.device.type, sizes(plan, dist.get_world_size()))


def of_data(mesh: DeviceMesh) -> DeviceMesh:
    """The part of the mesh that ``fully_shard`` takes: that over which batches differ."""
    names = tuple(name for name in mesh.mesh_dim_names or () if name != TENSOR)
    return mesh[names]


def check(plan: Plan) -> None:
    """Refuse a mesh that the number of processes does not allow; starts nothing.

    Raises:
        SettingsError: The number of processes cannot be divided as asked for.
    """
    sizes(plan, processes.world().size)


def share(mesh: DeviceMesh) -> Share:
    """Which part of the samples this process reads: processes of one tensor-parallel group read the same."""
    data = of_data(mesh)
    place = data.get_coordinate() or [0]
    index = 0
    for coordinate, size in zip(place, data.shape, strict=True):
        index = index * size + coordinate
    return Share(index, data.size())


def sizes(plan: Plan, world: int) -> dict[str, int]:
    """The dimensions of the mesh for so many processes: ``shard``, and those besides that are larger than 1.

    Raises:
        SettingsError: The number of processes cannot be divided as asked for.
    """
    own = settings.of(plan)
    if own.tensor_parallel > 1 and plan.settings.parallelize is None:
        raise SettingsError(
            f"fsdp2.tensor_parallel is {own.tensor_parallel}, and no function parallelizes the model: pass "
            "parallelize=(a function of model and mesh).",
            setting="fsdp2.tensor_parallel",
        )
    shards, rest = divmod(world, own.replicate * own.tensor_parallel)
    if rest or not shards:
        name = "replicate" if own.replicate > 1 else "tensor_parallel"
        raise SettingsError(
            f"{world} processes cannot be divided into {own.replicate} replicas of groups of {own.tensor_parallel}.",
            setting=f"fsdp2.{name}",
            choices=[str(each) for each in range(1, world + 1) if world % each == 0],
        )
    wanted = {REPLICATE: own.replicate, SHARD: shards, TENSOR: own.tensor_parallel}
    return {name: size for name, size in wanted.items() if size > 1 or name == SHARD}


def _mesh(device: str, sizes: dict[str, int]) -> DeviceMesh:
    """One mesh for all models: each makes process groups, of which a machine has not many."""
    key, world = (device, tuple(sizes.items())), dist.group.WORLD
    if key not in _made or _made[key][0] is not world:
        made = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        _made[key] = (world, made)
    return _made[key][1]
