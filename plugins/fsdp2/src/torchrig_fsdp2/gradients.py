"""Accumulate and clip sharded gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchrig import dtensors


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """A context in which gradients are added up on this process, unreduced and whole."""
    roots = list(_roots(model))
    _synchronise(roots, False)
    try:
        yield
    finally:
        _synchronise(roots, True)


def _roots(module: nn.Module) -> Iterator[Any]:
    """The outermost units."""
    if isinstance(module, FSDPModule):
        yield module
        return
    for child in module.children():
        yield from _roots(child)


def _synchronise(roots: list[Any], wanted: bool) -> None:
    for root in roots:
        root.set_requires_gradient_sync(wanted)
        root.set_is_last_backward(wanted)


def clip(model: nn.Module, max_norm: float, norm_type: float) -> torch.Tensor:
    """Scale the gradients down to ``max_norm``; returns the norm they had, the same on every process."""
    parameters = [each for each in model.parameters() if each.grad is not None]
    norm = dtensors.total_norm([each.grad for each in parameters if each.grad is not None], norm_type)
    for each in dtensors.alike(parameters):
        torch.nn.utils.clip_grads_with_norm_(each, max_norm, norm)
    return norm
