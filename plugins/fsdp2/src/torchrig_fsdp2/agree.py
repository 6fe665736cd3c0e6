"""All processes shard the same values: where they were built from different seeds, those of the first one.

Each process cuts its shard out of a copy of its own. Copies that differ would make a model that nobody built, and
nothing would show it; ``DistributedDataParallel`` sends the first process's values for the same reason. What is the
same already, by its checksum, is not sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchrig import dtensors

from .mesh import TENSOR


def on_values(model: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
    """Give the model's parameters and buffers the values of the first process, where they differ.

    A tensor that had other values gets new memory; what it had before stays as it is, for who holds on to it.

    Args:
        model: The model, not sharded yet; parameters that are parallelized already differ along the mesh's ``tp``.
        mesh: The mesh.
        device: The device of this process.
    """
    every = {id(each): each for each in (*model.parameters(), *model.buffers()) if not each.is_meta and each.numel()}
    plain = [each for each in every.values() if not dtensors.is_sharded(each)]
    cut = [each for each in every.values() if dtensors.is_sharded(each)]
    for name in mesh.mesh_dim_names or ():
        group = mesh.get_group(name)
        if group.size() > 1:
            _agree(plain if name == TENSOR else [*plain, *cut], group, device)


def _agree(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, device: torch.device) -> None:
    for tensor in _different(tensors, group, device):
        local = dtensors.local(tensor)
        sent = local.detach().to(device, copy=True).contiguous()
        dist.broadcast(sent, group=group, group_src=0)
        _set(tensor, sent.to(local.device))


def _different(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, device: torch.device
) -> Iterable[torch.Tensor]:
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


def _set(tensor: Any, values: torch.Tensor) -> None:
    if dtensors.is_sharded(tensor):
        tensor.data = type(tensor).from_local(
            values, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
        )
    else:
        tensor.data = values
