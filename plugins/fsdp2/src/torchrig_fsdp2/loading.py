"""A whole state dict loads into a sharded model: each parameter takes its part of the whole one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchrig import sharded


def accept_whole(model: nn.Module) -> None:
    """Have ``load_state_dict`` of ``model``, and of any module in it, take plain tensors of the whole shape too."""
    for module in model.modules():
        own = (each for each in module._parameters.values() if each is not None)
        known = any(hook is _cut for hook in map(_function, module._load_state_dict_pre_hooks.values()))
        if not known and any(sharded.is_sharded(each) for each in own):
            module.register_load_state_dict_pre_hook(_cut)  # type: ignore[no-untyped-call]


def _function(hook: Any) -> Any:
    return getattr(hook, "hook", hook)


def _cut(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in module._parameters.items():
        given = state_dict.get(prefix + name)
        if parameter is None or not isinstance(given, torch.Tensor) or sharded.is_sharded(given):
            continue
        if sharded.is_sharded(parameter) and given.shape == parameter.shape:
            state_dict[prefix + name] = sharded.cut_like(given, parameter)
