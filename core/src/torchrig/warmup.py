"""Compile every region ahead of the loop, in each mode, and leave no trace of it but the compiled code."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import loaders, losses, processes, ranks, state
from .arguments import require_module
from .errors import ArgumentError, TorchrigError
from .nested import map_tensors
from .report import report

if TYPE_CHECKING:
    from .report import Report
    from .state import Prepared

MODES = ("train", "eval", "inference")


def warmup(
    model: nn.Module, *example_args: Any, modes: Iterable[str] = ("train", "eval"), **example_kwargs: Any
) -> Report:
    """Compile every region of a prepared model before the first step.

    Runs ``model(*example_args, **example_kwargs)`` once in each mode, with a backward when training. Parameters,
    gradients, buffers, plain attributes, the training flags and the random state are bit for bit as before; nothing
    steps an optimizer, and the example is not written into. Forward hooks are called.

    Under several processes every rank calls it. They wait for one another at the end, and up to two hours in what they
    do together meanwhile. Rank 0 shows the progress on standard error, unless ``TORCHRIG_QUIET=1``.

    Args:
        model: What ``prepare`` gave back.
        *example_args: A batch, as the loop gives it to the model; its tensors are brought to the model's device.
        modes: ``"train"`` (forward and backward), ``"eval"`` (forward under ``torch.no_grad``) and ``"inference"``
            (forward under ``torch.inference_mode``, whose tensors need graphs of their own), in the order they are run.
            Training flags that were set one by one are kept for the mode that the model itself is in.
        **example_kwargs: As ``example_args``.

    Returns:
        The report of what was compiled.

    Raises:
        ArgumentError: It is no model, or one of ``modes`` is unknown.
        TorchrigError: The model was not prepared.
        CompileProblem: As in a step, where the settings ask for it.
        RankFailed: Another rank raised.

    Whatever the model itself raises comes through, with the model as it was.
    """
    require_module(model, "warmup")
    wanted = _checked(modes)
    prepared = state.recall(model)
    if prepared is None:
        raise TorchrigError(f"This {type(model).__name__} was not prepared: there is nothing to warm up.")
    if prepared.observation is not None:
        _run(model, prepared, wanted, (example_args, example_kwargs))
    return report(model)


def _checked(modes: Iterable[str]) -> tuple[str, ...]:
    wanted = (modes,) if isinstance(modes, str) else tuple(modes)
    for mode in wanted:
        if mode not in MODES:
            raise ArgumentError(f"warmup knows the modes {' and '.join(MODES)}, and was given {mode!r}.")
    return tuple(dict.fromkeys(wanted))


def _run(model: nn.Module, prepared: Prepared, modes: tuple[str, ...], example: Any) -> None:
    from .preserve import preserved
    from .progress import shown

    assert prepared.observation is not None
    placed = loaders.to_device(example, prepared.plan.device)
    with (
        ranks.together("the warm-up"),
        ranks.patient(),
        shown(prepared.observation.records, modes, speaks=processes.world().rank == 0) as progress,
        preserved(model),
    ):
        flags = {module: module.training for module in model.modules()}
        for mode in modes:
            _set_flags(model, mode == "train", flags)
            _pass(model, mode, placed)
            progress.done(mode)


def _pass(model: nn.Module, mode: str, example: Any) -> None:
    training = mode == "train"
    with torch.inference_mode(False):
        args, kwargs = map_tensors(example, _copied)
    with torch.inference_mode(mode == "inference"), torch.set_grad_enabled(training):
        output = model(*args, **kwargs)
        if training:
            losses.backward(output)


def _set_flags(model: nn.Module, training: bool, flags: dict[nn.Module, bool]) -> None:
    """The training flags as they were where the model was in that mode, with parts that differ; else all alike."""
    if flags[model] != training:
        model.train(training)
        return
    for module, flag in flags.items():
        module.training = flag


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that the model may write into; a leaf where the given one is."""
    copied = tensor.detach().clone()
    return copied.requires_grad_(tensor.requires_grad)
