"""The loss in what a model returned, for a step that torchrig makes itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .nested import map_tensors


def backward(output: Any) -> bool:
    """Go backward from a model's output, if it depends on anything that learns; returns whether it does.

    From the loss where the output has one (``.loss``, or the key ``"loss"``); else from every floating tensor in it,
    each with a gradient of ones.

    Args:
        output: A tensor, or any nesting of them.
    """
    tensors = _tensors(_loss_in(output))
    if tensors:
        torch.autograd.backward(tensors, [torch.ones_like(each) for each in tensors])
    return bool(tensors)


def _loss_in(output: Any) -> Any:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, torch.Tensor) and loss.requires_grad else output


def _tensors(output: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    map_tensors(output, keep)
    return found
