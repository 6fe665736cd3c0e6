"""What torchrig tells its loggers: what was decided and why, what was compiled, and what went wrong.

The loggers are named as the modules that decide, below ``"torchrig"``. By default nothing is shown. PyTorch's own
variable shows it: ``TORCH_LOGS="torchrig"`` the plan and the problems (``INFO``), ``TORCH_LOGS="+torchrig"`` every
region, step and conversion as well (``DEBUG``); so does the ``logging`` module, set up as for any library.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .dynamo import Conversion
    from .hookspecs import Plan, Step

_plan = logging.getLogger("torchrig.plan")
_prepare = logging.getLogger("torchrig.prepare")
_records = logging.getLogger("torchrig.records")


def silence_by_default() -> None:
    """As a library should: nothing goes to the console unless somebody asks for it."""
    logging.getLogger("torchrig").addHandler(logging.NullHandler())


def planned(plan: Plan) -> None:
    """A plan was made: what was chosen and by whom, the regions, and the steps."""
    if not _plan.isEnabledFor(logging.INFO):
        return
    name, why = plan.model, plan.settings.origin
    device = why("device") if plan.settings.device is not None else "an accelerator where there is one, else the CPU"
    automatic = "auto: by the number of processes" if plan.settings.strategy == "auto" else why("strategy")
    _plan.info("%s: strategy %s (%s)", name, plan.strategy, automatic, stacklevel=2)
    _plan.info("%s: backend %s (%s)", name, plan.backend, why("backend"), stacklevel=2)
    _plan.info("%s: device %s (%s)", name, plan.device, device, stacklevel=2)
    for note in plan.notes:
        _plan.info("%s: %s", name, note, stacklevel=2)
    for region in plan.regions:
        _plan.info("%s: region %s: %s", name, region.kind, region.reason, stacklevel=2)
        _plan.debug(
            "%s: region %s is at %s", name, region.kind, ", ".join(region.instances) or "the root", stacklevel=2
        )
    for place, step in enumerate(plan.steps, start=1):
        _plan.debug(
            "%s: step %d: %s %s by %s: %s", name, place, step.action, step.target, step.by, step.reason, stacklevel=2
        )
    _plan.debug("%s: torch.compile gets %s", name, dict(plan.compile_kwargs), stacklevel=2)


def did(step: Step) -> None:
    """A step of a plan was carried out."""
    _prepare.debug("done: %s %s by %s", step.action, step.target, step.by, stacklevel=2)


def took_back(changes: int, error: BaseException) -> None:
    """A prepare raised, and what it had changed is taken back."""
    _prepare.info("prepare raised %s; changes to take back %d: %s", type(error).__name__, changes, error, stacklevel=2)


def unwrapped(model: str) -> None:
    """Compiled forwards and layers were taken off a model."""
    _prepare.info("%s: compiled forwards and layers are taken off (unwrap, keep_compile=False)", model, stacklevel=2)


def converted(kind: str, conversion: Conversion) -> None:
    """Dynamo compiled one frame, or tried to."""
    if not _records.isEnabledFor(logging.DEBUG):
        return
    reason = conversion.recompile_reason
    _records.debug(
        "%s: %s (%s) %s for %s in %.2f s: graphs %d, breaks %d%s",
        kind,
        conversion.function,
        conversion.where,
        "compiled" if reason is None else "compiled again",
        conversion.mode,
        conversion.seconds,
        conversion.graphs,
        len(conversion.breaks),
        "".join(
            f"; {label}: {' '.join(text.split())}"
            for label, text in (("guard that failed", reason), ("runs eager", conversion.skip_reason))
            if text is not None
        ),
        stacklevel=2,
    )


def problem(kind: str, what: str, text: str) -> None:
    """Something to look at was seen of a region kind: a break, a recompile, a fall-back to eager."""
    _records.info("%s %s: %s", kind, what, text, stacklevel=2)
