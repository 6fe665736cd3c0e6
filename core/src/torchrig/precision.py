"""Mixed precision around a plain loop: autocast in the model's forward, loss scaling in backward and step.

bf16 and fp16 run the root's ``forward`` under autocast and give floating-point outputs back in float32, so that a loss
computed outside keeps its accuracy. fp16 also scales: the loop's own ``loss.backward()`` is scaled by multiplying the
gradient where it enters the model's outputs, and ``optimizer.step()`` unscales first and steps nothing when a gradient
overflowed, through the optimizer's own step hooks. PyTorch's ``GradScaler`` holds the scale and decides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from .placement import Layer, Undo, put_layer, under

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def apply(model: nn.Module, optimizers: Sequence[Optimizer], precision: str, device: torch.device) -> Undo:
    """Run ``model`` in ``precision``; returns how to undo it.

    Args:
        model: The root; its ``forward`` gets a layer.
        optimizers: Those whose steps must unscale, for ``"fp16"``.
        precision: ``"no"``, ``"bf16"`` or ``"fp16"``.
        device: The device that autocast is for.
    """
    if precision == "no":
        return lambda: None
    scaling = LossScaling(device) if precision == "fp16" else None
    undos = [_put_autocast(model, device.type, DTYPES[precision], scaling)]
    if scaling is not None:
        undos += [scaling.attach(optimizer) for optimizer in optimizers]
    return lambda: [undo() for undo in reversed(undos)].clear()


def _put_autocast(model: nn.Module, device_type: str, dtype: torch.dtype, scaling: LossScaling | None) -> Undo:
    lying = under(model)
    inner: Callable[..., Any] = type(model).forward if lying is None else lying.function
    takes_self = lying is None or lying.bound

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype=dtype):
            outputs = inner(self, *args, **kwargs) if takes_self else inner(*args, **kwargs)
        outputs = pytree.tree_map_only(torch.Tensor, functools.partial(_to_float32, low=dtype), outputs)
        return outputs if scaling is None else scaling.of_outputs(outputs)

    return put_layer(model, forward, Layer("autocast", lying))


def _to_float32(tensor: torch.Tensor, low: torch.dtype) -> torch.Tensor:
    return tensor.float() if tensor.dtype is low else tensor


class _ScaleGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by the scale."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.scale = scale
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.scale.to(gradients[0].dtype), None


class LossScaling:
    """Dynamic loss scaling for a loop that does not know of it.

    Args:
        device: The device the gradients are on.
    """

    def __init__(self, device: torch.device) -> None:
        self.scaler = torch.amp.GradScaler(device.type)
        self._device = device
        self._unscaled: set[int] = set()
        self._held: dict[int, list[tuple[nn.Parameter, torch.Tensor]]] = {}

    def of_outputs(self, outputs: Any) -> Any:
        """``outputs`` with each tensor that needs a gradient scaled on the way back."""
        if not torch.is_grad_enabled():
            return outputs
        scale = self.scaler.scale(torch.ones((), device=self._device))
        return pytree.tree_map_only(
            torch.Tensor, lambda leaf: _ScaleGradient.apply(leaf, scale) if leaf.requires_grad else leaf, outputs
        )

    def attach(self, optimizer: Optimizer) -> Undo:
        """Unscale before each step of ``optimizer``, skip it on overflow, and adapt the scale after."""
        handles = [
            optimizer.register_step_pre_hook(lambda opt, *_: self._before_step(opt)),
            optimizer.register_step_post_hook(lambda opt, *_: self._after_step(opt)),
        ]
        return lambda: [handle.remove() for handle in handles].clear()

    def unscale(self, optimizer: Optimizer) -> None:
        """Bring the gradients to their true size before the step, once; for gradient clipping."""
        if id(optimizer) not in self._unscaled:
            self.scaler.unscale_(optimizer)
            self._unscaled.add(id(optimizer))

    def _before_step(self, optimizer: Optimizer) -> None:
        self.unscale(optimizer)
        if self._overflowed(optimizer):
            # An optimizer steps over parameters without a gradient: all of them held back is a skipped step.
            self._held[id(optimizer)] = _take_gradients(optimizer)

    def _after_step(self, optimizer: Optimizer) -> None:
        for parameter, gradient in self._held.pop(id(optimizer), []):
            parameter.grad = gradient
        self._unscaled.discard(id(optimizer))
        self.scaler.update()

    def _overflowed(self, optimizer: Optimizer) -> bool:
        # GradScaler keeps what unscale_ found in this method's result (seen on torch 2.9 and 2.13); it has no public one.
        found = self.scaler._found_inf_per_device(optimizer)  # type: ignore[attr-defined]
        return any(bool(value) for value in found.values())


def _take_gradients(optimizer: Optimizer) -> list[tuple[nn.Parameter, torch.Tensor]]:
    held = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                held.append((parameter, parameter.grad))
                parameter.grad = None
    return held
