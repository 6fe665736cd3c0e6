"""Run a model without a trace: parameters, gradients, buffers, attributes and random numbers are as they were."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from .dtensors import local
from .tree import Undo, snapshot


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Leave ``model`` bit for bit as it was, whatever its forward and backward do meanwhile.

    Gradients go to ``.grad`` and are dropped; those that were there come back, the same objects. Hooks that a user
    registered to run once a gradient is accumulated, an optimizer's step for one, are not called meanwhile.

    Parameters are copied to the host for it. Of plain attributes, what lists, dictionaries, sets, deques, tensors,
    NumPy arrays and random generators among them hold comes back, however deep; other objects are not looked into.

    Args:
        model: Any module; a module in a plain attribute of it is looked after alike.
    """
    with ExitStack() as held:  # calls every one of them, whatever another raises
        for module in _modules(model):
            held.callback(snapshot(module, data=False))
        for parameter in _parameters(model):
            held.callback(_gradient(parameter))
        for undo in _values(model):
            held.callback(undo)
        held.enter_context(_random_state())
        yield


def _modules(model: nn.Module) -> list[nn.Module]:
    """The model, and every module that stands in its plain attributes rather than among its children."""
    found, todo = {id(model): model}, [model]
    known = {id(module) for module in model.modules()}
    while todo:
        for value in _attributes(todo.pop()):
            if isinstance(value, nn.Module) and id(value) not in known:
                known |= {id(module) for module in value.modules()}
                found[id(value)] = value
                todo.append(value)
    return list(found.values())


def _parameters(model: nn.Module) -> list[nn.Parameter]:
    every = (parameter for module in _modules(model) for parameter in module.parameters())
    return list({id(parameter): parameter for parameter in every}.values())


def _values(model: nn.Module) -> Iterator[Undo]:
    """How to bring back what is written into: tensors, containers, generators."""
    seen: set[int] = set()
    for root in _modules(model):
        for value in (*root.parameters(), *root.buffers(), *_attributes(root)):
            if id(value) not in seen:
                seen.add(id(value))
                undo = _undo_of(value)
                if undo is not None:
                    yield undo


def _attributes(root: nn.Module) -> Iterator[Any]:
    """What the plain attributes of the modules hold, containers and what is in them alike."""
    own = nn.Module().__dict__
    seen: set[int] = set()
    todo = [value for module in root.modules() for name, value in vars(module).items() if name not in own]
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, (list, tuple, deque)):
            todo += value


def _undo_of(value: Any) -> Undo | None:
    if isinstance(value, torch.Tensor):
        return None if value.is_meta else _tensor(local(value))
    if isinstance(value, (list, dict, set, deque)):
        return _contents(value)
    if isinstance(value, torch.Generator):
        return _state(value.get_state, value.set_state)
    if isinstance(value, random.Random):
        return _state(value.getstate, value.setstate)
    return _undo_of_numpys(value)


def _undo_of_numpys(value: Any) -> Undo | None:
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return _state(value.copy, lambda before: numpy.copyto(value, before))
    if numpy is not None and isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        return _state(lambda: bits.state, lambda before: setattr(bits, "state", before))
    return None


def _state(get: Callable[[], Any], put: Callable[[Any], Any]) -> Undo:
    before = get()
    return lambda: put(before)


def _contents(container: Any) -> Undo:
    before = container.copy()

    def undo() -> None:
        container.clear()
        (container.extend if isinstance(container, (list, deque)) else container.update)(before)

    return undo


def _tensor(tensor: torch.Tensor) -> Undo:
    """Write back what was there, but only where it changed: writing marks a tensor as changed for a pending backward.

    What the value was is kept on the host: an accelerator may have no room for a model twice.
    """
    before = tensor.detach().to("cpu", copy=True)

    def undo() -> None:
        if not torch.equal(tensor.detach().cpu(), before):
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
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
