"""What stands beside the model and may be compiled too: the losses, and the optimizers' steps."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from .arguments import Arguments
from .hookspecs import Region
from .tree import Undo

if TYPE_CHECKING:
    from .placement import RegionCompiler


def losses(arguments: Arguments, model: nn.Module) -> tuple[Region, ...]:
    """A region for each loss that comes with ``model``, in the order given."""
    names = (getattr(each, "__name__", type(each).__name__) for each in arguments.losses_of(model))
    given = zip(_unique(names), arguments.losses_of(model), strict=True)
    return tuple(_region(f"loss {name}", each, "compile_loss=True") for name, each in given)


def optimizers(arguments: Arguments, model: nn.Module) -> tuple[Region, ...]:
    """A region for each optimizer that steps ``model``, in the order given; but a fused one has nothing to compile."""
    given = [each for each in arguments.optimizers_of(model) if not is_fused(each)]
    names = _unique(type(each).__name__ for each in given)
    named = zip(names, given, strict=True)
    return tuple(_region(f"{name}.step", each, "compile_optimizer=True") for name, each in named)


def _fixed(group: dict[str, Any]) -> bool:
    """Whether PyTorch refuses a tensor for the learning rate: ``foreach=True`` asked for, and not ``capturable``."""
    return bool(group.get("foreach")) and group.get("capturable") is False


def is_fused(optimizer: Optimizer) -> bool:
    """Whether the step is one kernel already, which PyTorch keeps ``torch.compile`` from looking into."""
    return any(group.get("fused") for group in optimizer.param_groups)


def compile_loss(loss: Callable[..., Any], compiler: RegionCompiler) -> tuple[Callable[..., Any], Undo]:
    """Compile a loss; returns what takes its place (a module stays where it is) and how to undo it."""
    if isinstance(loss, nn.Module):
        return compiler.compile(loss, "auto")
    return compiler.function(loss), lambda: None


def compile_step(optimizer: Optimizer, compiler: RegionCompiler) -> Undo:
    """Compile ``optimizer.step()``, and leave the object and its class as they are.

    What stands around the step of every optimizer (its hooks, the profiler's record, gradients switched off) is run as
    it is. A step that is given a closure is too: the closure runs the model, which has compiled code of its own.
    Schedulers find a bound method in ``step``, as they expect, whether they are built before or after.
    """
    before = vars(optimizer).get("step")
    original: Any = optimizer.step
    step = _own_step(optimizer, original, compiler) or _any_step(optimizer, original, compiler)
    vars(optimizer)["step"] = types.MethodType(functools.wraps(original)(step), optimizer)

    def undo() -> None:
        del vars(optimizer)["step"]
        if before is not None:
            vars(optimizer)["step"] = before

    return undo


def _own_step(optimizer: Optimizer, original: Any, compiler: RegionCompiler) -> Callable[..., Any] | None:
    """The step with its innermost function compiled; ``None`` where somebody put more around it than PyTorch does."""
    if "step" in vars(optimizer) and getattr(original, "__wrapped__", None) is not type(optimizer).step:
        return None
    inner: Any = type(optimizer).step
    while hasattr(inner, "__wrapped__") and inner.__module__.startswith("torch."):
        inner = inner.__wrapped__
    compiled, rates = compiler.function(inner), list[torch.Tensor]()

    @Optimizer.profile_hook_step
    def step(self: Optimizer) -> Any:
        with torch.set_grad_enabled(self.defaults.get("differentiable", False)), _rates_as_tensors(self, rates):
            return compiled(self)

    def call(self: Optimizer, closure: Callable[[], Any] | None = None, **more: Any) -> Any:
        if closure is not None or more:
            compiler.left("its step is called with a closure, and runs as it is")
            return original(closure, **more)
        self._opt_called = True  # type: ignore[attr-defined]  # what a scheduler's own wrapper notes, for its warning
        return step(self)

    return call


def _any_step(optimizer: Optimizer, original: Any, compiler: RegionCompiler) -> Callable[..., Any]:
    compiled, rates = compiler.function(original), list[torch.Tensor]()

    def call(self: Optimizer, closure: Callable[[], Any] | None = None, **more: Any) -> Any:
        if closure is not None or more:
            compiler.left("its step is called with a closure, and runs as it is")
            return original(closure, **more)
        with _rates_as_tensors(optimizer, rates):
            return compiled()

    return call


@contextmanager
def _rates_as_tensors(optimizer: Optimizer, rates: list[torch.Tensor]) -> Iterator[None]:
    """Let the learning rates be tensors for a while.

    A number is a constant in the compiled code: a scheduler that changes it would have the step compiled anew each time
    (torch 2.13: each time for SGD and RMSprop, once for Adam).

    Args:
        optimizer: Its groups have their numbers back afterwards.
        rates: The tensors, one for each group, from one step to the next; in float64 and of no dimension, so that they
            are as exact as the numbers and change nobody's type.
    """
    groups = optimizer.param_groups
    rates += [torch.zeros((), dtype=torch.float64) for _ in groups[len(rates) :]]
    numbers = [(group, group["lr"]) for group in groups if isinstance(group.get("lr"), float) and not _fixed(group)]
    for (group, number), rate in zip(numbers, rates, strict=False):
        group["lr"] = rate.fill_(number)
    try:
        yield
    finally:
        for group, number in numbers:
            group["lr"] = number


def _region(kind: str, value: object, reason: str) -> Region:
    return Region(kind, type(value), (kind,), reason)


def _unique(names: Iterable[str]) -> list[str]:
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name} {seen[name]}")
    return found
