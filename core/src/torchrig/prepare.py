"""Run the plan's steps in order; if one raises, take back those before it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import loaders, sharding, state, usercompile
from .arguments import Arguments, sort
from .errors import AlreadyPreparedError
from .execution import Run
from .plan import Draft, draft, resolve
from .tree import Undo, undo_all

if TYPE_CHECKING:
    from .hookspecs import Share
    from .settings import Settings

Drafting = Callable[..., Draft]  # (model, arguments, settings), as plan.draft


def prepare(model: nn.Module, *others: Any, settings: Settings | None = None, **overrides: Any) -> Any:
    """Make a model distributed and compiled, in the right order, and leave the training loop plain PyTorch.

    Args:
        model: The model to train or to run.
        *others: Optimizers, LR schedulers, DataLoaders, loss functions, and further models, in any order.
        settings: The settings to start from; by default those of the environment
            (``TORCHRIG_*`` variables, and the YAML file that ``TORCHRIG_CONFIG`` names).
        **overrides: Single settings, such as ``backend="inductor"``; they win over everything else.

    Returns:
        What was given, in the same order: the model alone, or a tuple. Under a strategy that works in place the model
        is the very object that was given.

    Raises:
        SettingsError: A setting cannot be used; names where it came from.
        ArgumentError: Something given cannot be prepared.
        BackendError, StrategyError, PluginError: A plugin is missing, broken, or cannot run here.
        RegionError: The regions asked for are not in the model.
        AlreadyPreparedError: The model was prepared before, with other settings.

    When it raises, the model, the optimizers and the loaders are as they were. Called again with the same settings on a
    prepared model, it gives back what it made before.

    Example:
        >>> import torch, torchrig
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = torchrig.prepare(model, optimizer, backend="eager")
    """
    made = carry_out(sort(model, others), resolve(settings, overrides), draft)
    return made if others else made[0]


def carry_out(arguments: Arguments, settings: Settings, drafting: Drafting) -> tuple[Any, ...]:
    """Draft a plan for each model that is not prepared yet, carry them all out, and give back what was given."""
    undos: list[Undo] = []
    try:
        runs = _runs(arguments, settings, drafting, undos)
        replaced: dict[int, Any] = {}
        for run in runs:
            run.join_processes()
        for run in runs:
            run.run()
            replaced |= run.replaced()
        device, share = _whereabouts(arguments, runs)
        for loader in arguments.loaders:
            own = sharding.shard(loader, share, undos) if settings.shard_loaders else loader
            replaced[id(loader)] = loaders.place(own, device)
    except BaseException as error:
        undo_all(undos, error)
        raise
    for run in runs:
        run.remember(settings)
    return tuple(_replacement(each, replaced) for each in arguments.given)


def _runs(arguments: Arguments, settings: Settings, drafting: Drafting, undos: list[Undo]) -> list[Run]:
    """A run for each model that is not prepared yet, planned before any of them begins."""
    runs = []
    for given in arguments.models:
        if not _prepared_alike(given, settings):
            taken = usercompile.take_off(given, settings, undos)
            planning = functools.partial(drafting, arguments=arguments, settings=taken.settings)
            runs.append(Run(given, taken.model, arguments.optimizers_of(taken.model), planning, undos))
    return runs


def _whereabouts(arguments: Arguments, runs: list[Run]) -> tuple[torch.device, Share]:
    """Where the first model is, and which part of the samples it gets; prepared now or before."""
    first = arguments.models[0]
    for run in runs:
        if run.given is first:
            return run.draft.plan.device, run.share
    before = state.recall(first)
    assert before is not None
    return before.plan.device, before.share


def _prepared_alike(model: nn.Module, settings: Settings) -> bool:
    before = state.recall(model)
    if before is None or before.live() is None:  # what a strategy made of it was dropped, and is made anew
        return False
    if before.settings != settings:
        raise AlreadyPreparedError(
            f"This {type(model).__name__} is prepared already, with other settings: "
            f"{_difference(before.settings, settings)}. "
            "Take it off first: model = torchrig.unwrap(model, keep_compile=False)."
        )
    return True


def _difference(before: Settings, now: Settings) -> str:
    old, new = before.to_dict(), now.to_dict()
    return ", ".join(
        f"{name} was {old.get(name)!r} and is {new.get(name)!r}" for name in new if old.get(name) != new[name]
    )


def _replacement(given: Any, replaced: dict[int, Any]) -> Any:
    if id(given) in replaced:
        return replaced[id(given)]
    before = state.recall(given) if isinstance(given, nn.Module) else None
    live = None if before is None else before.live()
    return given if live is None else live
