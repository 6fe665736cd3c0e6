"""Skip an optimizer's step when its gradients overflowed.

An optimizer steps over parameters whose gradient is ``None``. So the gradients are held back for the time of the step:
the parameters, the state and the step counters stay as they are. This is done from hooks that PyTorch calls before and
after the step of every optimizer of the process, so that one built after ``prepare`` is seen too. They are there while
there is a model whose loss is scaled, and leave other models' optimizers alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from torchrig import dtensors

from .scaling import LossScaling

_scalings: dict[int, tuple[weakref.ref[nn.Module], LossScaling]] = {}
_held: weakref.WeakKeyDictionary[Optimizer, list[tuple[torch.Tensor, torch.Tensor]]] = weakref.WeakKeyDictionary()
_handles: list[RemovableHandle] = []


def scaling_for(module: nn.Module) -> LossScaling:
    """The scaling of exactly this module; a new one where there is none yet, as on a copy."""
    found = recall(module)
    return _remember(module) if found is None else found


def recall(module: nn.Module) -> LossScaling | None:
    """The scaling of exactly this module, if it has one."""
    entry = _scalings.get(id(module))
    return entry[1] if entry is not None and entry[0]() is module else None


def forget(module: nn.Module) -> None:
    """Scale this module's loss no more."""
    if recall(module) is not None:
        _drop(id(module))


def _remember(module: nn.Module) -> LossScaling:
    key = id(module)
    scaling = LossScaling()
    _scalings[key] = (weakref.ref(module, lambda _: _drop(key)), scaling)
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before_step))
        _handles.append(register_optimizer_step_post_hook(_after_step))
    return scaling


def _drop(key: int) -> None:
    _scalings.pop(key, None)
    if not _scalings:
        while _handles:
            _handles.pop().remove()


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    scalings = _scalings_of(optimizer)
    if not scalings:
        return None
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": _checked(kwargs["closure"], optimizer, scalings)}
    if len(args) > 1 and callable(args[1]):
        return (args[0], _checked(args[1], optimizer, scalings), *args[2:]), kwargs
    _check(optimizer, scalings)
    return None


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for parameter, gradient in _held.pop(optimizer, ()):
        if parameter.grad is None:
            parameter.grad = gradient


def _scalings_of(optimizer: Optimizer) -> list[LossScaling]:
    """The scalings of the models that the optimizer steps a parameter of."""
    stepped = {id(parameter) for parameter in _parameters(optimizer)}
    live = [(reference(), scaling) for reference, scaling in tuple(_scalings.values())]
    return [
        scaling
        for module, scaling in live
        if module is not None and any(id(parameter) in stepped for parameter in module.parameters())
    ]


def _checked(closure: Callable[[], Any], optimizer: Optimizer, scalings: list[LossScaling]) -> Callable[[], Any]:
    """The closure that computes the gradients inside the step, followed by the check of them."""

    def call() -> Any:
        loss = closure()
        _check(optimizer, scalings)
        return loss

    return call


def _check(optimizer: Optimizer, scalings: list[LossScaling]) -> None:
    """Hold the gradients back if one overflowed, and tell the scalings."""
    held = [(parameter, parameter.grad) for parameter in _parameters(optimizer) if parameter.grad is not None]
    if not held:
        return
    overflowed = not _all_finite([gradient for _, gradient in held])
    for scaling in scalings:
        scaling.stepped(overflowed=overflowed)
    if overflowed:
        _held.setdefault(optimizer, []).extend(held)
        for parameter, _ in held:
            parameter.grad = None


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _all_finite(gradients: list[torch.Tensor]) -> bool:
    """Whether every element is finite; one wait for the device in all. Sharded gradients are asked on every rank."""
    dense = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    # The largest magnitude: unlike another norm it is infinite only where an element is.
    return bool(torch.isfinite(dtensors.total_norm([each for each in dense if each.numel()], float("inf"))))
