"""Copies of a sharded model. PyTorch refuses them: its hooks and its state are bound to the one model.

Either way a bare copy comes first: what sharding put on the original is taken off, what is left is copied, and the
original is made what it was. A deep copy is then sharded as the original is, and takes over its shards, so that no
process ever holds all of it. A pickle holds the whole model, so that it can be loaded anywhere; every process must make
it, as each has a part to give.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchrig import StrategyError, dtensors, tree

from . import beside, hooks, unit
from .mesh import TENSOR


def deepcopy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """What ``copy.deepcopy`` makes of a sharded module: one that is sharded alike.

    Raises:
        StrategyError: Something in it was sharded by the user's own ``fully_shard``, or is tensor-parallel.
    """
    units = [name for name, each in module.named_modules() if isinstance(each, FSDPModule)]
    arguments = {name: _arguments(module.get_submodule(name)) for name in units}
    _reshard(module)
    copied = _bare_copy(module, memo, _without_values)
    for name in reversed(units):  # children first
        unit.shard(copied.get_submodule(name), arguments[name])
    _take_over(copied, module)
    hooks.put(copied, keeps_gathered=arguments[""]["reshard_after_forward"] is False)
    return copied


def reduce(module: nn.Module, protocol: Any) -> Any:
    """What ``pickle`` makes of a sharded module: the whole model, not sharded. Every process must call it."""
    if all(beside.recall(each) is None for each in module.modules()):  # sharded by the user
        return object.__reduce_ex__(module, protocol)
    _reshard(module)
    # Pickled as the first item of a tuple: pickle refuses the parts of an object of another class than the module's.
    return operator.itemgetter(0), ((_bare_copy(module, {}, _with_values),),)


def _arguments(module: nn.Module) -> Mapping[str, Any]:
    known = beside.recall(module)
    if known is None or known.arguments is None:
        raise StrategyError(
            f"This {type(module).__name__} was sharded by a call of fully_shard outside of torchrig, and PyTorch "
            "cannot copy such a module. Load its state dict into a second one."
        )
    return known.arguments


def _reshard(module: nn.Module) -> None:
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()


def _bare_copy(module: nn.Module, memo: dict[int, Any], made_of: Callable[[Any], nn.Parameter]) -> nn.Module:
    """A copy without what sharding put on the original, and with ``made_of(shard)`` for each sharded parameter."""
    new = {id(each): made_of(each) for each in module.parameters() if dtensors.is_sharded(each)}
    memo.update({id(each): each for each in new.values()})  # not to be copied once more
    restore = tree.snapshot(module, data=False)
    try:
        for each in tuple(module.modules()):
            unit.strip(each)
            for name, parameter in each._parameters.items():
                each._parameters[name] = new.get(id(parameter), parameter)
        return copy.deepcopy(module, memo)
    finally:
        restore()


def _without_values(shard: Any) -> nn.Parameter:
    if TENSOR in (shard.device_mesh.mesh_dim_names or ()):
        raise StrategyError(
            "A model that is tensor-parallel cannot be copied: the copy would lack what parallelize did to the "
            "original. Build and prepare a second one, and load the state dict of the first."
        )
    return nn.Parameter(torch.empty(shard.shape, dtype=shard.dtype, device="meta"), shard.requires_grad)


def _with_values(shard: Any) -> nn.Parameter:
    return nn.Parameter(shard.full_tensor().detach(), shard.requires_grad)


def _take_over(copied: nn.Module, module: nn.Module) -> None:
    """Give the copy memory for its shards, with the original's values and gradients in it."""
    memory = {dtensors.local(each).device for each in module.parameters()}
    device = next(iter(memory), torch.device("cpu"))
    copied._apply(lambda each: torch.empty_like(each, device=device) if each.is_meta else each)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for own, given in zip(copied.parameters(), module.parameters(), strict=True):
            dtensors.local(own).copy_(dtensors.local(given))
            own.grad = None if given.grad is None else given.grad.clone()
