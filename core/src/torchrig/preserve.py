"""Run a model without a trace: parameters, gradients, buffers, attributes and random numbers are as they were."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from .tree import Undo, snapshot


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Leave ``model`` bit for bit as it was, whatever its forward and backward do meanwhile.

    Gradients go to ``.grad`` and are dropped; those that were there come back, the same objects. Hooks that a user
    registered to run once a gradient is accumulated, an optimizer's step for one, are not called meanwhile.

    Args:
        model: Any module. What is kept of it besides its state: the training flag, plain attributes, and what lists,
            dictionaries, sets and tensors among those held.
    """
    with ExitStack() as held:
        undos: list[Undo] = [snapshot(model), *map(_contents, _containers(model)), *map(_values, _written(model))]
        undos += [_gradient(parameter) for parameter in model.parameters()]
        held.callback(_undo, undos)
        held.enter_context(_random_state())
        yield


def _undo(undos: list[Undo]) -> None:
    for undo in reversed(undos):
        undo()


def _containers(model: nn.Module) -> Iterator[Any]:
    """The lists, dictionaries and the like that the model's forward may append to."""
    own = nn.Module().__dict__
    for module in model.modules():
        for name, value in vars(module).items():
            if name not in own and type(value) in (list, dict, set, deque):
                yield value


def _contents(container: Any) -> Undo:
    before = container.copy()

    def undo() -> None:
        container.clear()
        (container.extend if isinstance(container, (list, deque)) else container.update)(before)

    return undo


def _written(model: nn.Module) -> Iterator[torch.Tensor]:
    """The tensors that a forward may write into: buffers, and those in plain attributes."""
    yield from model.buffers()
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor):
                yield value


def _values(tensor: torch.Tensor) -> Undo:
    before = tensor.detach().clone()

    def undo() -> None:
        with torch.no_grad():
            tensor.copy_(before)

    return undo


def _gradient(parameter: nn.Parameter) -> Undo:
    # The dictionary is private; a hook of the user's cannot be put aside by public means (torch 2.9 and 2.13).
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    gradient, kept = parameter.grad, dict(hooks)
    parameter.grad = None
    hooks.clear()

    def undo() -> None:
        parameter.grad = gradient
        hooks.update(kept)

    return undo


@contextmanager
def _random_state() -> Iterator[None]:
    """Give the random generators of torch, Python and NumPy back as they were."""
    accelerator = torch.accelerator.current_accelerator()
    kind = "cuda" if accelerator is None else accelerator.type
    devices = range(torch.accelerator.device_count()) if accelerator is not None else ()
    python, numpy = random.getstate(), sys.modules.get("numpy")
    drawn = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices, device_type=kind):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(drawn)
