"""Regional compilation on its own, for those who need nothing else of ``prepare``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from torch import nn

from .arguments import Arguments, sort
from .errors import SettingsError
from .plan import Draft, draft, resolve
from .prepare import carry_out

if TYPE_CHECKING:
    from .settings import Settings


_TORCH_COMPILES = ("backend", "mode", "options", "fullgraph", "dynamic", "disable")
_TAKEN = {*_TORCH_COMPILES, "regions", "exclude", "placement", "on_failure", "on_problem", "reapply_compile"}


def compile_regions(model: nn.Module, **torch_compile_kwargs: Any) -> nn.Module:
    """Compile each repeated block of a model once, where it is.

    Args:
        model: The model. It stays on its device, and in its precision.
        **torch_compile_kwargs: What ``torch.compile`` takes: ``backend`` (by default ``"inductor"``), ``mode``,
            ``options``, ``fullgraph``, ``dynamic``, ``disable``; and torchrig's ``regions``, ``exclude``,
            ``placement``, ``on_failure`` and ``on_problem``.

    Returns:
        ``model`` itself, but for ``placement="wrap"`` of a whole model, which gives the wrapper.

    Raises:
        SettingsError, BackendError, RegionError, AlreadyPreparedError: As :func:`torchrig.prepare`.
    """
    arguments = sort(model, ())
    if other := sorted(set(torch_compile_kwargs) - _TAKEN):
        raise SettingsError(
            f"compile_regions does not take {', '.join(other)}; prepare does what goes beyond compiling.",
            setting=other[0],
            origin="argument",
            choices=sorted(_TAKEN),
        )
    device = next((str(tensor.device) for tensor in model.parameters()), "cpu")
    alone = {"strategy": "single", "device": device, "mixed_precision": "no", "transforms": []}
    alone["activation_checkpointing"] = "none"
    settings = resolve(None, {"backend": "inductor", **torch_compile_kwargs, **alone})
    return carry_out(arguments, settings, _compiling_alone)[0]  # type: ignore[no-any-return]


def _compiling_alone(model: nn.Module, arguments: Arguments, settings: Settings) -> Draft:
    drafted = draft(model, arguments, settings, distributing=False)
    compiling = tuple(step for step in drafted.plan.steps if step.action == "compile")
    return dataclasses.replace(drafted, plan=dataclasses.replace(drafted.plan, steps=compiling))
