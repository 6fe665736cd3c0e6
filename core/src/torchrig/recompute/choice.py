"""Which blocks are checkpointed, inside the compiled code or around it, and what cannot be. Pure.

*Inside*, the compiler sees the checkpoint, and computes again in the backward's own graph what it needs. *Around*, the
compiled forward is run a second time by PyTorch. Only a backend that says ``recomputes`` is given the checkpoint: run
as it stands in the graph, it would draw other random numbers the second time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from torchrig.errors import RegionError, SettingsError
from torchrig.hookspecs import BackendInfo, Region
from torchrig.placement import is_plain
from torchrig.regions import find_blocks, find_regions, resolve

from . import operators

if TYPE_CHECKING:
    from torchrig.settings import Settings

SETTING = "activation_checkpointing"
_WRAPPER = "CheckpointWrapper"  # of torch.distributed.algorithms, and of fairscale


def blocks(model: nn.Module, settings: Settings) -> tuple[Region, ...]:
    """The blocks to checkpoint, by class: each ``activation_checkpointing_every``-th of those that repeat.

    They do not depend on what is compiled, so that the memory does not depend on the backend.

    Raises:
        SettingsError: Nothing repeats; the model checkpoints by itself; an operator does not exist.
    """
    if settings.activation_checkpointing == "none":
        return ()
    operators.asked(settings)
    found = _found(model, settings)
    _refuse_own(model, settings)
    every = settings.activation_checkpointing_every
    chosen = (
        dataclasses.replace(each, instances=each.instances[::every], reason=_reason(each, every)) for each in found
    )
    return tuple(chosen)


def _found(model: nn.Module, settings: Settings) -> tuple[Region, ...]:
    try:
        found = find_blocks(model, settings.regions)
        if any(region.whole for region in found):
            found = find_regions(model, "repeated")
    except RegionError as error:
        if not isinstance(settings.regions, str):
            raise
        raise _refusal(
            f"{SETTING} is for blocks that repeat, and nothing does in this {type(model).__name__}. Name the blocks "
            "(regions=[\"Block\"]), or leave it at 'none'.",
            settings,
        ) from error
    for region in found:
        if not is_plain(type(resolve(model, region.instances[0]))):
            raise _refusal(f"The forward of {region.kind} is no plain method, so it cannot be checkpointed.", settings)
    return found


def _reason(region: Region, every: int) -> str:
    part = "" if every == 1 else f", one in {every} of"
    return f"activations are computed again in the backward{part}: {region.reason}"


def around(backend: BackendInfo, settings: Settings) -> bool:
    """Whether the checkpoint goes around the compiled code rather than into it."""
    return backend.compiles and not (backend.recomputes and settings.on_failure == "raise")


def refuse(backend: BackendInfo, regions: tuple[Region, ...], settings: Settings) -> None:
    """Refuse a way to compile that would take the checkpoint into the graph where it must not be.

    Raises:
        SettingsError: Says what to set instead.
    """
    if settings.activation_checkpointing == "none" or not around(backend, settings):
        return
    why = _why(backend, settings)
    if any(region.whole for region in regions):
        raise _refusal(
            f"The whole model is compiled, blocks and checkpoints with it, and {why}: random numbers would be others "
            "the second time. Compile by blocks (regions='auto'), or use another backend such as inductor.",
            settings,
        )
    if settings.placement in ("inplace", "wrap"):
        raise SettingsError(
            f"placement={settings.placement!r} compiles the checkpoint with the block, and {why}: random numbers would "
            "be others the second time. Leave placement to 'auto'.",
            setting="placement",
            origin=settings.origin("placement"),
        )


def _why(backend: BackendInfo, settings: Settings) -> str:
    if backend.recomputes:
        return "with on_failure='eager' it may have to run without its compiler"
    return f"backend {backend.name!r} does not recompute by itself"


def notes(
    model: nn.Module, backend: BackendInfo | None, chosen: tuple[Region, ...], settings: Settings
) -> Iterator[str]:
    """What a reader of the plan should know besides; ``backend`` is ``None`` where nothing is compiled."""
    if chosen and backend is not None and around(backend, settings):
        yield (
            f"Each checkpointed block runs its compiled code a second time in the backward: {_why(backend, settings)}."
        )
        if settings.activation_checkpointing == "selective":
            yield (
                "What is kept are results of operators that PyTorch runs one by one; a graph that the backend made one "
                "piece of is computed again whole."
            )
    for region in chosen:
        inner = sorted(_with_own(resolve(model, region.instances[0])))
        if inner:
            yield (
                f"{', '.join(inner)} in {region.kind} calls checkpoint by itself: what is in there is computed twice "
                "in the backward."
            )


def _with_own(block: nn.Module) -> Iterator[str]:
    """The classes in a block whose forward names PyTorch's ``checkpoint``."""
    for cls in {type(module) for module in block.modules()}:
        code = getattr(cls.forward, "__code__", None)
        if code is not None and "checkpoint" in code.co_names:
            yield cls.__name__


def _refuse_own(model: nn.Module, settings: Settings) -> None:
    """Refuse a model whose blocks are checkpointed already: transformers' own way, and PyTorch's wrapper."""
    for module in model.modules():
        if vars(module).get("gradient_checkpointing") is True:
            raise _refusal(
                f"This {type(model).__name__} checkpoints its blocks by itself, and would compute them twice in the "
                "backward. Call model.gradient_checkpointing_disable() first, or leave it at 'none'.",
                settings,
            )
        if any(cls.__name__ == _WRAPPER for cls in type(module).__mro__):
            raise _refusal(
                f"Blocks of this {type(model).__name__} are in a checkpoint wrapper already, and would be computed "
                "twice in the backward. Leave the wrapper out, or leave it at 'none'.",
                settings,
            )


def _refusal(message: str, settings: Settings) -> SettingsError:
    return SettingsError(message, setting=SETTING, origin=settings.origin(SETTING))
