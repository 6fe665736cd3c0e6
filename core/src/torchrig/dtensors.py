"""Cut a whole tensor as a sharded parameter is cut.

PyTorch's ``distribute_tensor`` cuts one mesh dimension after the other. Where a dimension of a tensor is cut by tensor
parallelism first and by FSDP2 second, the mesh has them the other way round, and the placement of FSDP2 says so with a
stride; there the cuts are made in the order in which they were made on the parameter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a ``DTensor``."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def local(tensor: Any) -> torch.Tensor:
    """What this process holds of a tensor: its part of a ``DTensor``, all of any other."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[no-any-return]


def whole(tensor: Any) -> torch.Tensor:
    """A ``DTensor`` put together, by all processes at once; any other tensor as it is."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[no-any-return]


def total_norm(tensors: Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """The norm of all tensors together, the same on every process.

    PyTorch's ``get_total_norm`` takes tensors that are all on one mesh, and tensor parallelism leaves some on another
    than others; and its infinite norm raises where a process has nothing of a tensor.

    Args:
        tensors: Tensors and ``DTensor`` s, in any mixture. Where there are none, the norm is 0.
        norm_type: Which norm, above 0; ``inf`` is the largest magnitude.
    """
    norms = [_norm_of_alike(each, norm_type) for each in alike(tensors)]
    if len(norms) < 2:
        return norms[0] if norms else torch.zeros(())
    return _vector_norm([each.to(norms[0].device) for each in norms], norm_type)


def _norm_of_alike(tensors: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    parts = [local(each) for each in tensors]
    filled = [each for each in parts if each.numel()]
    norm = torch.zeros((), dtype=parts[0].dtype, device=parts[0].device)
    if filled:
        norm = torch.nn.utils.get_total_norm(filled, norm_type)
    return _over_processes(norm, tensors[0], norm_type) if is_sharded(tensors[0]) else norm


def _over_processes(norm: torch.Tensor, tensor: Any, norm_type: float) -> torch.Tensor:
    """The norm of what the processes have, from the norm of what this one has."""
    for place, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            sent = norm.to(tensor.device_mesh.device_type)
            others = [torch.empty_like(sent) for _ in range(tensor.device_mesh.size(place))]
            torch.distributed.all_gather(others, sent, group=tensor.device_mesh.get_group(place))
            norm = _vector_norm(others, norm_type).to(norm.device)
    return norm


def _vector_norm(norms: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)  # type: ignore[no-any-return]


def alike(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tensors, those together that are on one mesh and placed alike; PyTorch takes no others at once."""
    groups: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        key = (tensor.device_mesh, tensor.placements) if is_sharded(tensor) else tensor.device  # type: ignore[attr-defined]
        groups.setdefault(key, []).append(tensor)
    return list(groups.values())


def cut_like(uncut: Any, parameter: Any) -> DTensor:
    """This process's part of ``uncut``, as a ``DTensor`` cut and placed as ``parameter`` is.

    Nothing is sent, but where ``uncut`` is a ``DTensor`` that is cut in another way: it is put together first.

    Args:
        uncut: A tensor of the parameter's whole shape, the same on every process.
        parameter: A ``DTensor``.
    """
    from torch.distributed.tensor import DTensor

    if is_sharded(uncut) and (uncut.device_mesh, uncut.placements) == (parameter.device_mesh, parameter.placements):
        return uncut  # type: ignore[no-any-return]
    part, own = _cut(whole(uncut), parameter), parameter.to_local()
    if part.shape != own.shape:  # a process that has nothing of it
        part = part.reshape(own.shape)
    part = part.detach().to(own.device, copy=True).contiguous()
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
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
