"""Cut a whole tensor as a sharded parameter is cut.

PyTorch's ``distribute_tensor`` cuts one mesh dimension after the other. Where a dimension of a tensor is cut by tensor
parallelism first and by FSDP2 second, the mesh has them the other way round, and the placement of FSDP2 says so with a
stride; there the cuts are made in the order in which they were made on the parameter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a ``DTensor``."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def cut_like(whole: Any, parameter: Any) -> DTensor:
    """This process's part of ``whole``, as a ``DTensor`` cut and placed as ``parameter`` is.

    Nothing is sent, but where ``whole`` is a ``DTensor`` that is cut in another way: it is put together first.

    Args:
        whole: A tensor of the parameter's whole shape, the same on every process.
        parameter: A ``DTensor``.
    """
    from torch.distributed.tensor import DTensor

    if is_sharded(whole):
        if (whole.device_mesh, whole.placements) == (parameter.device_mesh, parameter.placements):
            return whole  # type: ignore[no-any-return]
        whole = whole.full_tensor()
    local = _cut(whole, parameter)
    own = parameter.to_local()
    if local.shape != own.shape:  # a process that has nothing of it
        local = local.reshape(own.shape)
    local = local.detach().to(own.device, copy=True).contiguous()
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )


def _cut(whole: torch.Tensor, parameter: Any) -> torch.Tensor:
    mesh, placements = parameter.device_mesh, parameter.placements
    strided = [place for place, each in enumerate(placements) if getattr(each, "split_factor", 1) > 1]
    plain = [place for place, each in enumerate(placements) if each.is_shard() and place not in strided]
    for place in (*plain, *strided):
        whole = _chunk(whole, placements[place].dim, mesh.size(place), mesh.get_local_rank(place))
    return whole


def _chunk(tensor: torch.Tensor, dim: int, count: int, index: int) -> torch.Tensor:
    """One of ``count`` pieces; the last ones may be shorter, or empty, as ``torch.chunk`` and DTensor have it."""
    size = -(-tensor.size(dim) // count)
    start = min(index * size, tensor.size(dim))
    return tensor.narrow(dim, start, min(size, tensor.size(dim) - start))
