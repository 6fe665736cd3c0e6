"""What would stop a compile on this machine, and what would hide that it was stopped; found by asking, not by guessing.

The plan of a model of one layer is drawn up with the settings as they are: it refuses what ``prepare`` would refuse.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchrig.catalogue import DynamoBackend
from torchrig.errors import BackendNotInstalled, TorchrigError, TorchrigWarning
from torchrig.plan import plan
from torchrig.plugins import load_backend
from torchrig.problems import first_line

from . import folders

if TYPE_CHECKING:
    from torchrig.hookspecs import Plan
    from torchrig.settings import Settings

    from .folders import Folder

_NONE = DynamoBackend.NO.value
_DEFAULT = DynamoBackend.INDUCTOR.value  # what torch.compile compiles with when nothing else is asked of it
_ALWAYS = DynamoBackend.EAGER.value


def backend_to_judge(settings: Settings | None) -> tuple[str, str]:
    """The backend that a compile would use, and why that one.

    The one of the settings; where they choose none, that of ``torch.compile`` itself, if it is installed.
    """
    if settings is not None and settings.backend != _NONE:
        chosen = settings.backend
        name = chosen if isinstance(chosen, str) else getattr(chosen, "__name__", type(chosen).__name__)
        return name, f"the settings' backend (from {settings.origin('backend')})"
    chose = "the settings cannot be read" if settings is None else f"the settings choose {_NONE!r}"
    try:
        load_backend(_DEFAULT)
    except BackendNotInstalled as error:
        return _ALWAYS, f"{chose}; {error}"
    except TorchrigError:
        pass
    return _DEFAULT, f"{chose}; it is what torch.compile takes by default"


def stops(settings: Settings | None, backend: str, looked_at: Iterable[Folder]) -> tuple[list[str], list[str]]:
    """What would stop a compile, and what only gives cause for doubt.

    Args:
        settings: The settings; ``None`` where they cannot be read.
        backend: The backend that is judged.
        looked_at: The folders that code is kept in.
    """
    mine = [folder for folder in looked_at if folder.of == f"backend {backend}"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [*_of_dynamo(), *_of_plan(settings, backend), *_of_folders(mine)]
    doubts = [str(each.message) for each in caught if issubclass(each.category, TorchrigWarning)]
    doubts += [f"{folder.path}: {folder.doubt}" for folder in mine if folder.doubt is not None]
    return list(dict.fromkeys(found)), list(dict.fromkeys([*doubts, *_hidden()]))


def tried(settings: Settings, backend: str) -> list[str]:
    """What went wrong when a small model was really compiled, forward and backward, in this one process.

    Its width is a random one, so that a compiler is run where else a cache would answer.
    """
    from torchrig.trial import StepFailed, try_step

    width = random.SystemRandom().randrange(3, 2000)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    changed = {**_small(settings, backend), "strategy": "single", "on_problem": "ignore", "on_failure": "eager"}
    try:
        trial = try_step(model, torch.ones(2, width), settings.replace(**changed))
    except StepFailed as failed:
        return [f"A small model was compiled, and its {failed.stage} raised {_first(failed.__cause__)}"]
    except TorchrigError as error:
        return [str(error)]
    kinds = trial.report.kinds
    reasons = [reason for kind in kinds for reason in (*kind.fallbacks, *(each.reason for each in kind.breaks))]
    if not trial.ok and not reasons:
        reasons = ["no graph was built of it, and PyTorch does not say why"]
    return [f"A small model was to be compiled: {reason}" for reason in reasons]


def _first(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {first_line(str(error))}"


def _of_dynamo() -> Iterator[str]:
    try:
        from torchrig import dynamo
    except Exception as error:
        yield f"torch._dynamo cannot be imported: {type(error).__name__}: {error}"
        return
    reason = dynamo.unsupported()
    if reason is not None:
        yield reason
    if dynamo.switches()["disable"] and os.environ.get("TORCH_COMPILE_DISABLE") != "1":  # which the plan tells of
        yield "torch._dynamo.config.disable is on: nothing is compiled."


def _hidden() -> Iterator[str]:
    try:
        from torchrig import dynamo
    except Exception:  # told as what stops a compile
        return
    if dynamo.switches()["suppress_errors"]:
        yield (
            "torch._dynamo.config.suppress_errors is on: what fails to compile runs eager without an error. "
            "TORCHDYNAMO_SUPPRESS_ERRORS sets it; unset it to see why."
        )


def _of_plan(settings: Settings | None, backend: str) -> Iterator[str]:
    try:
        if settings is None:
            load_backend(backend)
            return
        yield from _planned(settings, backend).notes
    except TorchrigError as error:
        yield str(error)


def _planned(settings: Settings, backend: str) -> Plan:
    return plan(nn.Linear(1, 1), settings=settings.replace(**_small(settings, backend)))


def _small(settings: Settings, backend: str) -> dict[str, Any]:
    """What of the settings is changed for a model that is not the user's."""
    chosen = {} if settings.backend != _NONE else {"backend": backend}
    return {"regions": "whole", "exclude": [], **chosen}


def _of_folders(mine: Iterable[Folder]) -> Iterator[str]:
    for folder in mine:
        if folder.problem is not None:
            yield f"{folder.path}, where compiled code is kept: {folder.problem}."
    if (reason := folders.temporary()) is not None:
        yield reason
