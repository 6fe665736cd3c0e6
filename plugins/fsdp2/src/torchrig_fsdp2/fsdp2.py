"""Strategy ``fsdp2``: parameters, gradients and optimizer state sharded over the processes by ``fully_shard``."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from torchrig import Plan, StrategyInfo, Unit, Wrapped, hookimpl

from .settings import NAME, FSDP2Settings

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer


def _missing_here() -> str | None:
    import torch.distributed as dist

    return None if dist.is_available() else "this build of PyTorch comes without torch.distributed"


@hookimpl
def describe() -> StrategyInfo:
    """Say what the strategy is."""
    return StrategyInfo(
        name=NAME,
        summary="PyTorch FSDP2: parameters, gradients and optimizer state sharded over the processes",
        settings=FSDP2Settings,
        probe=_missing_here,
        has_mesh=True,
        process_group=True,
    )


@hookimpl
def device_mesh(plan: Plan) -> DeviceMesh:
    """The mesh, with dimensions ``replicate`` and ``tp`` where they are asked for, and ``shard``."""
    from . import mesh

    return mesh.of(plan)


@hookimpl
def check_model(model: nn.Module, plan: Plan) -> None:
    """Refuse what cannot be sharded, before anything is changed."""
    from . import sharding

    sharding.check(model, plan)


@hookimpl
def wrap_strategy(model: nn.Module, optimizers: tuple[Optimizer, ...], plan: Plan) -> Wrapped:
    """Shard the model in place, bind the optimizers to its shards, and run it in the precision asked for."""
    from . import mesh, sharding

    undo = sharding.shard(model, optimizers, plan)
    return Wrapped(model, optimizers, undo, mesh.share(mesh.of(plan)))


@hookimpl
def units(model: nn.Module, plan: Plan, processes: int) -> tuple[Unit, ...]:
    """What a process keeps of each unit, and what it sends."""
    from . import account

    return account.of(model, plan, processes)


@hookimpl
def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Keep the gradients of a backward on this process, whole; the next backward outside reduces their sum."""
    from . import gradients

    return gradients.no_sync(model)


@hookimpl
def clip_grad_norm(model: nn.Module, max_norm: float, norm_type: float) -> torch.Tensor:
    """Clip by the norm of the whole gradients."""
    from . import gradients

    return gradients.clip(model, max_norm, norm_type)
