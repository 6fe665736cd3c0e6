"""Mixed precision around a plain loop: autocast in the model's forward, and loss scaling where fp16 needs it.

The root's ``forward`` gets a layer that runs what was there under autocast, and gives low-precision outputs back in
float32, so that a loss computed outside keeps its accuracy. The loop stays as it is; :mod:`torchrig.scaling` says how.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchrig.errors import SettingsError
from torchrig.nested import map_tensors
from torchrig.placement import Layer, Under, put_layer, under
from torchrig.tree import Undo

from . import overflow
from .scaling import LossScaling

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_LOW = frozenset(DTYPES.values())


def apply(model: nn.Module, optimizers: Sequence[Optimizer], precision: str, device: torch.device) -> Undo:
    """Run ``model`` in ``precision``.

    Args:
        model: The root; its ``forward`` gets a layer.
        optimizers: Those that step it. They need nothing done to them, and one that is built later works the same.
        precision: ``"no"``, ``"bf16"`` or ``"fp16"``.
        device: The device that autocast is for.

    Returns:
        A function that takes it all back.

    Raises:
        SettingsError: ``"fp16"``, and the parameters are float16 themselves: their gradients would underflow, and
            so PyTorch's ``GradScaler`` refuses them as well.
    """
    if precision == "no":
        return lambda: None
    scaled = precision == "fp16"
    if scaled:
        _refuse_half(model)
    take_off = put_layer(model, *_autocast_layer(model, device.type, DTYPES[precision], scaled))
    if scaled:
        overflow.scaling_for(model)

    def undo() -> None:
        take_off()
        overflow.forget(model)

    return undo


def scaling_of(model: nn.Module) -> LossScaling | None:
    """The loss scaling of a model prepared with ``fp16``; ``None`` for any other.

    Args:
        model: The model, or a wrapper around it such as ``DistributedDataParallel``.
    """
    return next((scaling for module in model.modules() if (scaling := overflow.recall(module)) is not None), None)


def _refuse_half(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dtype is torch.float16 and parameter.requires_grad:
            raise SettingsError(
                f"mixed_precision='fp16' needs parameters in float32, and {name!r} is float16 itself. "
                "Build the model in float32 (model.float()); autocast makes the float16 copies.",
                setting="mixed_precision",
            )


def _autocast_layer(
    model: nn.Module, device_type: str, dtype: torch.dtype, scaled: bool
) -> tuple[Callable[..., Any], Layer]:
    lying = under(model)
    inner = _with_self(type(model).forward if lying is None else lying.function, lying)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device_type, dtype=dtype):
                return inner(self, *args, **kwargs)

        if scaled:
            return overflow.scaling_for(self).run(self, call, _to_float32, args, kwargs)
        return map_tensors(call(*args, **kwargs), _to_float32)

    # Not the attributes: those of a compiled function would make Dynamo take this one for compiled.
    functools.update_wrapper(forward, inner, updated=())
    forward.__name__ = "forward"  # a bound method is pickled as getattr(module, its name)
    return forward, Layer("autocast", lying, taken=overflow.forget)


def _with_self(function: Callable[..., Any], lying: Under | None) -> Callable[..., Any]:
    """``function`` as one that takes the module first; a free ``forward`` of the instance's own does not."""
    if lying is None or lying.bound:
        return function

    @functools.wraps(function, updated=())
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    del call.__wrapped__
    with contextlib.suppress(TypeError, ValueError):  # a callable without a signature
        signature = inspect.signature(function)
        me = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        call.__signature__ = signature.replace(parameters=[me, *signature.parameters.values()])  # type: ignore[attr-defined]
    return call


def _to_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _LOW else tensor
