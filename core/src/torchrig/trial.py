"""One step of a model on one batch, to see what of it compiles; the training step of nobody's loop in particular."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import loaders, losses, state
from .errors import CompileProblemWarning, TorchrigError
from .prepare import prepare
from .report import Report, report

if TYPE_CHECKING:
    from .hookspecs import Plan
    from .settings import Settings


@dataclass(frozen=True)
class Trial:
    """What one step showed.

    Args:
        report: What was compiled.
        notes: What a reader should know of how it came about.
    """

    report: Report
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether something was compiled, and all of it in one piece."""
        return bool(self.report.kinds) and self.report.ok


class StepFailed(Exception):
    """The user's own code raised in the step; the cause is chained.

    Args:
        stage: ``"forward"`` or ``"backward"``.
    """

    def __init__(self, stage: str) -> None:
        super().__init__(stage)
        self.stage = stage


def try_step(model: nn.Module, batch: Any, settings: Settings, *, train: bool = True) -> Trial:
    """Prepare ``model``, run one step of it, and tell what was compiled.

    Problems are collected rather than raised or warned about, unless the settings say so explicitly: ``on_problem`` is
    ``"ignore"`` and ``on_failure`` is ``"eager"`` where nobody set them. With backend ``"no"`` the step is captured by
    ``"eager"``: where a graph breaks is the same for every backend.

    Args:
        model: The model; it is changed as by :func:`torchrig.prepare` and by a backward, and is to be thrown away.
        batch: ``model(*batch)`` is called for a tuple or a list, ``model(**batch)`` for a mapping, else
            ``model(batch)``. Its tensors are moved to the model's device.
        settings: The settings.
        train: Whether to run a backward; without it the model is put in eval mode and runs without gradients.

    Raises:
        StepFailed: The model's forward or backward raised.
        TorchrigError: As :func:`torchrig.prepare`, and problems that the settings ask to be raised.
    """
    settings, notes = _watching(settings)
    prepared = prepare(model.train(train), settings=settings)
    planned = _plan_of(prepared)
    batch = loaders.to_device(batch, planned.device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CompileProblemWarning)  # all of them are in the report
        with torch.set_grad_enabled(train), _stage("forward"):
            output = call(prepared, batch)
        if train:
            notes += _backward(output)
    return Trial(report(prepared), (*notes, *planned.notes))


def call(model: nn.Module, batch: Any) -> Any:
    """``model(*batch)``, ``model(**batch)`` or ``model(batch)``, as ``batch`` is."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _plan_of(prepared: nn.Module) -> Plan:
    remembered = state.recall(prepared)
    assert remembered is not None
    return remembered.plan


def _watching(settings: Settings) -> tuple[Settings, tuple[str, ...]]:
    quiet: dict[str, Any] = {}
    if not any(row.origin != "default" for row in settings.rows() if row.name.startswith("on_problem")):
        quiet["on_problem"] = "ignore"
    if settings.origin("on_failure") == "default":
        quiet["on_failure"] = "eager"
    if settings.backend != "no":
        return settings.replace(**quiet), ()
    note = "backend 'no' compiles nothing: captured with 'eager'; graphs break at the same places with every backend"
    return settings.replace(backend="eager", **quiet), (note,)


def _backward(output: Any) -> tuple[str, ...]:
    with _stage("backward"):
        ran = losses.backward(output)
    return () if ran else ("the output needs no gradient: no backward was run",)


@contextmanager
def _stage(name: str) -> Iterator[None]:
    try:
        yield
    except TorchrigError:
        raise
    except Exception as error:
        raise StepFailed(name) from error
