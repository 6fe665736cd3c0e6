"""The hooks that a sharded model gets besides PyTorch's own.

A whole state dict loads: each parameter takes its part of the whole one. And the root's parameters are sharded again
after a forward without gradients. PyTorch leaves them gathered, as the backward comes next; where none comes,
``model.parameters()`` would go on giving the gathered ones, and an optimizer or an average of weights made then would
hold tensors that are never stepped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchrig import dtensors, placement


def put(model: nn.Module, *, keeps_gathered: bool) -> None:
    """Put the hooks on a model; those that are there already are not put twice.

    Args:
        model: The model.
        keeps_gathered: Whether the user asked for parameters that stay gathered after the forward.
    """
    for module in model.modules():
        own = [each for each in module._parameters.values() if each is not None]
        if any(dtensors.is_sharded(each) for each in own) and not _is_there(_cut, module._load_state_dict_pre_hooks):
            module.register_load_state_dict_pre_hook(_cut)  # type: ignore[no-untyped-call]
    in_place = placement.IN_PLACE in vars(model)  # its hooks are compiled with it
    reshards = isinstance(model, FSDPModule) and not keeps_gathered and not in_place
    if reshards and not _is_there(_reshard_without_gradients, model._forward_hooks):
        model.register_forward_hook(_reshard_without_gradients)


def _is_there(function: Any, hooks: dict[int, Any]) -> bool:
    return any(getattr(each, "hook", each) is function for each in hooks.values())


def _cut(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in module._parameters.items():
        given = state_dict.get(prefix + name)
        if parameter is None or not isinstance(given, torch.Tensor) or dtensors.is_sharded(given):
            continue
        if dtensors.is_sharded(parameter) and given.shape == parameter.shape:
            state_dict[prefix + name] = dtensors.cut_like(given, parameter)


def _reshard_without_gradients(module: Any, args: Any, output: Any) -> None:
    if not torch.is_grad_enabled():
        module.reshard()
