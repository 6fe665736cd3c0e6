"""One attempt of Dynamo's to compile one frame, and who is told of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch


@dataclass(frozen=True)
class Break:
    """Where and why a graph ended early."""

    where: str
    reason: str


@dataclass
class Conversion:
    """One attempt of Dynamo's to compile one frame.

    Args:
        function: The frame's function name.
        where: ``file:line`` of its definition.
        mode: ``"train"`` or ``"eval"``, with ``", no_grad"`` where gradients are off.
        resumed: Whether the frame is what follows a graph break.
        graphs: How many graphs the backend was given.
        breaks: The breaks that ended those graphs.
        seconds: Wall time of the attempt, the backend's included.
        recompile_reason: The guard that failed, when the frame had been compiled before.
        skip_reason: Why the frame runs eager, when it does.
        limit_reached: Whether it runs eager because it was recompiled too often.
        restarts: Why tracing was started over; holds the reason of a break that no graph preceded.
        daring: Whether it is tried with the daring flags, and will be again without them.
    """

    function: str
    where: str
    mode: str
    resumed: bool = False
    graphs: int = 0
    breaks: list[Break] = field(default_factory=list)
    seconds: float = 0.0
    recompile_reason: str | None = None
    skip_reason: str | None = None
    limit_reached: bool = False
    restarts: tuple[str, ...] = ()
    daring: bool = True


class Listener(Protocol):
    """Who is told about conversions."""

    def converted(self, conversion: Conversion) -> None:
        """Take note of a conversion that ended."""

    def failed(self, conversion: Conversion, error: Exception) -> bool:
        """Take note of a conversion that raised; ``True`` runs the frame eager instead of raising ``error``."""


_current = threading.local()


def current() -> tuple[Listener, Conversion] | None:
    """Who listens to the conversion that this thread is in, and the conversion; ``None`` outside of one."""
    return getattr(_current, "value", None)


@contextmanager
def attributed(listener: Listener, conversion: Conversion) -> Iterator[None]:
    """Have what this thread compiles counted for ``conversion``."""
    before = current()
    _current.value = (listener, conversion)
    try:
        yield
    finally:
        _current.value = before


def unwatched(function: str) -> Conversion:
    """A conversion of which no more is known than that it happens now."""
    return Conversion(function, "unknown", "train" if torch.is_grad_enabled() else "eval, no_grad")
