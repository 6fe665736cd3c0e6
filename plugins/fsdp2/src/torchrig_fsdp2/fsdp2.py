"""Strategy ``fsdp2``: parameters, gradients and optimizer state sharded over the processes by ``fully_shard``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrig import Plan, StrategyInfo, Wrapped, hookimpl

from .settings import NAME, FSDP2Settings

if TYPE_CHECKING:
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
    )


@hookimpl
def device_mesh(plan: Plan) -> DeviceMesh:
    """The mesh, with dimensions ``replicate`` and ``tp`` where they are asked for, and ``shard``."""
    from . import mesh

    return mesh.of(plan)


@hookimpl
def wrap_strategy(model: nn.Module, optimizers: tuple[Optimizer, ...], plan: Plan) -> Wrapped:
    """Shard the model in place, bind the optimizers to its shards, and run it in the precision asked for."""
    from . import sharding

    return Wrapped(model, optimizers, sharding.shard(model, optimizers, plan))
