"""Accumulate and clip gradients, whatever the strategy made of the model."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from . import state
from .arguments import require_module


def no_sync(model: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
    """A context in which ``backward`` adds up gradients on this process alone, under any strategy.

    Take it for all micro-batches of a step but the last; the backward outside of it synchronises what was added up::

        for index, batch in enumerate(micro_batches):
            with torchrig.no_sync(model, enabled=index < len(micro_batches) - 1):
                loss_of(model(batch)).backward()

    The forward belongs inside as well, as it does with PyTorch's own ``no_sync``.

    Args:
        model: A prepared model. One that nothing synchronises is left as it is.
        enabled: ``False`` makes the context do nothing.

    Raises:
        ArgumentError: It is no model.
    """
    require_module(model, "no_sync")
    if not enabled:
        return nullcontext()
    live, answer = _live(model), None
    prepared = state.recall(model)
    if prepared is not None:
        answer = prepared.hooks.hook.no_sync(model=live)
    elif isinstance(model, nn.parallel.DistributedDataParallel):
        answer = model.no_sync()
    return nullcontext() if answer is None else answer


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale all gradients of a model down so that their norm is at most ``max_norm``, under any strategy.

    Under ``mixed_precision="fp16"`` gradients have their true size already, and ``max_norm`` means what it says.

    Args:
        model: A prepared model, or any other.
        max_norm: The largest norm that the gradients of the whole model may have.
        norm_type: Which norm, as in ``torch.nn.utils.clip_grad_norm_``.

    Returns:
        The norm before clipping; a tensor with one element, the same on every process.

    Raises:
        ArgumentError: It is no model.
    """
    require_module(model, "clip_grad_norm_")
    live, answer = _live(model), None
    prepared = state.recall(model)
    if prepared is not None:
        answer = prepared.hooks.hook.clip_grad_norm(model=live, max_norm=max_norm, norm_type=norm_type)
    return nn.utils.clip_grad_norm_(live.parameters(), max_norm, norm_type) if answer is None else answer


def _live(model: nn.Module) -> nn.Module:
    """What ``prepare`` made of a model; the model itself where that is gone, or never was."""
    prepared = state.recall(model)
    live = None if prepared is None else prepared.live()
    return model if live is None else live
