"""All processes shard the same values: where they were built from different seeds, those of the first one.

Each process cuts its shard out of a copy of its own. Copies that differ would make a model that nobody built, and
nothing would show it; ``DistributedDataParallel`` sends the first process's values for the same reason. What is the
same already, by its checksum, is not sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchrig import StrategyError, dtensors

from .mesh import TENSOR


def on_values(model: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
    """Give the model's parameters and buffers the values of the first process, where they differ.

    A tensor that had other values gets new memory; what it had before stays as it is, for who holds on to it. What is
    sharded already is left alone.

    Args:
        model: The model, not sharded yet, but perhaps parallelized.
        mesh: The mesh.
        device: The device of this process.

    Raises:
        StrategyError: What was parallelized has other values in other groups of processes.
    """
    every = {id(each): each for each in (*model.parameters(), *model.buffers()) if not each.is_meta and each.numel()}
    plain = [each for each in every.values() if not dtensors.is_sharded(each)]
    parallel = [each for each in every.values() if dtensors.is_sharded(each) and _is_parallel(each)]
    differs = False
    for name in mesh.mesh_dim_names or ():
        group = mesh.get_group(name)
        if group.size() > 1:
            _agree(plain, group, device)
            differs |= name != TENSOR and bool(_different(parallel, group, device))
    _refuse_other_values(model, differs, device)


def _is_parallel(tensor: Any) -> bool:
    return bool(tensor.device_mesh.mesh_dim_names == (TENSOR,))


def _agree(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, device: torch.device) -> None:
    for tensor in _different(tensors, group, device):
        sent = tensor.detach().to(device, copy=True).contiguous()
        dist.broadcast(sent, group=group, group_src=0)
        tensor.data = sent.to(tensor.device)


def _refuse_other_values(model: nn.Module, differs: bool, device: torch.device) -> None:
    """On every process, though only some have seen it: the others would wait for them."""
    seen = torch.tensor(int(differs), device=device)
    dist.all_reduce(seen, dist.ReduceOp.MAX)
    if seen:
        raise StrategyError(
            f"The processes built this {type(model).__name__} with different values, and parallelize has cut them up "
            "already. Seed all processes alike before building it: torch.manual_seed(0)."
        )


def _different(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, device: torch.device) -> list[torch.Tensor]:
    """Those that are not bit for bit the same on every process of the group."""
    if not tensors:
        return []
    sums = torch.stack([_checksum(dtensors.local(each)).to(device) for each in tensors])
    least, most = sums.clone(), sums.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN, group)
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    return [each for each, same in zip(tensors, (least == most).tolist(), strict=True) if not same]


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    return (
        torch.hash_tensor(tensor.detach()).view(torch.int64) if tensor.numel() else torch.zeros((), dtype=torch.int64)
    )
