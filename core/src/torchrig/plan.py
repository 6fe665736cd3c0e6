"""Settings, plugins and regions -> the ordered steps of a prepare, each with its reason. Touches nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from . import besides, logs, named, processes, shapes, usercompile
from .arguments import Arguments, sort
from .errors import ArgumentError, BackendUnavailable, PluginLoadError, SettingsError, StrategyUnavailable
from .hookspecs import BackendInfo, CompileRequest, DynamicBatch, Plan, Region, Step, StrategyInfo
from .tree import Undo

if TYPE_CHECKING:
    import pluggy
    from pydantic import BaseModel

    from .plugins import Plugin
    from .settings import Settings


def plan(model: nn.Module, *others: Any, settings: Settings | None = None, **overrides: Any) -> Plan:
    """Say what :func:`torchrig.prepare` would do with the same arguments, and do nothing.

    Args:
        model: The model.
        *others: Optimizers, schedulers, loaders, losses, further models.
        settings: The settings to start from; by default those of the environment.
        **overrides: Single settings; they win over everything else.

    Returns:
        The plan of ``model``.

    Raises:
        SettingsError: A setting cannot be used; names where it came from.
        ArgumentError: Something given cannot be prepared.
        BackendError, StrategyError, PluginError, RegionError: As ``prepare`` would raise them.
    """
    arguments = sort(model, others)
    undos: list[Undo] = []
    try:
        taken = usercompile.take_off(model, resolve(settings, overrides), undos)
        return draft(taken.model, arguments, taken.settings).plan
    finally:
        for undo in reversed(undos):
            undo()


def resolve(settings: Settings | None, overrides: Mapping[str, Any]) -> Settings:
    """The settings of a call: those given, or those of environment and file, under the call's own overrides."""
    from .settings import Settings

    if settings is None:
        return Settings(**overrides)
    if not isinstance(settings, Settings):
        raise SettingsError(
            f"settings must be a torchrig.Settings, and is a {type(settings).__name__}. Pass Settings(...), "
            "Settings.from_yaml(path), or single settings by name.",
            setting="settings",
            origin="argument",
        )
    return settings.replace(**overrides) if overrides else settings


@dataclass(frozen=True)
class Draft:
    """A plan, and the plugins that will carry it out.

    Args:
        plan: The plan.
        hooks: One plugin manager with the selected plugins alone, in plan order.
        strategy: The strategy.
        transforms: The transforms, in the order of the settings.
        parallelize: The function of the setting ``parallelize``; ``None`` where there is none.
    """

    plan: Plan
    hooks: pluggy.PluginManager
    strategy: Plugin
    transforms: tuple[Plugin, ...]
    parallelize: Callable[..., Any] | None


@dataclass(frozen=True)
class _Chosen:
    """The plugins that the settings select."""

    strategy: Plugin
    backend: Plugin
    transforms: tuple[Plugin, ...]

    @property
    def compiler(self) -> BackendInfo:
        assert isinstance(self.backend.info, BackendInfo)
        return self.backend.info

    @property
    def compiles(self) -> bool:
        return self.compiler.compiles

    @property
    def compiles_after_wrap(self) -> bool:
        assert isinstance(self.strategy.info, StrategyInfo)
        return self.strategy.info.compile_after_wrap


def draft(
    model: nn.Module,
    arguments: Arguments,
    settings: Settings,
    *,
    distributing: bool = True,
    checking_model: bool = True,
) -> Draft:
    """Choose the plugins, find the regions, and put the steps in order.

    Args:
        model: The model.
        arguments: What ``prepare`` was given.
        settings: The settings.
        distributing: Whether the strategy will be used, and so must fit the model and the processes.
        checking_model: Whether it must fit the model as well, which may have no values yet.
    """
    try:
        drafted = _draft(model, arguments, settings)
        if distributing:
            _check_processes(drafted.strategy)
        if distributing and checking_model:
            drafted.hooks.hook.check_model(model=model, plan=drafted.plan)
        return drafted
    except SettingsError as error:  # plugins know which setting is wrong, and not where it came from
        if error.origin is None and error.setting is not None:
            error.origin = settings.origin(error.setting)
        raise


def _draft(model: nn.Module, arguments: Arguments, settings: Settings) -> Draft:
    from . import recompute
    from .plugins import make_manager

    chosen = _choose(settings)
    for plugin in (chosen.strategy, chosen.backend, *chosen.transforms):
        own_settings(plugin, settings)
    parallelize = _parallelize(chosen, settings)
    device = _device(settings)
    _check_backend(chosen.backend, device, training=bool(arguments.optimizers_of(model)))
    off = tuple(_switched_off(settings)) if chosen.compiles else ()
    compiles = chosen.compiles and not off
    if compiles:
        _refuse_lazy(model)
    hooks = make_manager((*chosen.transforms, chosen.backend, chosen.strategy))
    kwargs = _compile_kwargs(chosen.backend, hooks, settings, device)
    found = _found(model, settings, compiles)
    regions = found.compiled
    if compiles:
        recompute.refuse(chosen.compiler, regions, settings)
    varying = shapes.dynamic_batch(arguments.loaders) if compiles else None
    open_ = chosen.backend.info.capabilities.dynamic_shapes and kwargs["dynamic"] is None
    made = Plan(
        model=type(model).__name__,
        strategy=chosen.strategy.name,
        backend=chosen.backend.name,
        device=device,
        regions=regions,
        steps=tuple(_steps(model, arguments, settings, chosen, found)),
        compile_kwargs=kwargs if compiles else {},
        notes=(
            *off,
            *_shape_notes(varying, kwargs["dynamic"], open_),
            *recompute.notes(model, chosen.compiler if compiles else None, found.checkpointed, settings),
            *_beside_notes(model, arguments, settings),
        ),
        settings=settings,
        dynamic_batch=varying if open_ else None,
    )
    logs.planned(made)
    return Draft(made, hooks, chosen.strategy, chosen.transforms, parallelize)


def _choose(settings: Settings) -> _Chosen:
    from . import plugins

    return _Chosen(
        strategy=plugins.load_strategy(_strategy_name(settings)),
        backend=plugins.load_backend(settings.backend),
        transforms=tuple(plugins.load_transform(name) for name in settings.transforms),
    )


def _parallelize(chosen: _Chosen, settings: Settings) -> Callable[..., Any] | None:
    """The function of the setting ``parallelize``, looked up where it was given by name."""
    if settings.parallelize is None:
        return None
    assert isinstance(chosen.strategy.info, StrategyInfo)
    if not chosen.strategy.info.has_mesh:
        raise SettingsError(
            f"Strategy {chosen.strategy.name!r} has no mesh of processes to parallelize over. Strategy 'fsdp2' has.",
            setting="parallelize",
            origin=settings.origin("parallelize"),
        )
    return named.function(settings.parallelize, "parallelize", settings.origin("parallelize"))


def own_settings(plugin: Plugin, settings: Settings) -> BaseModel | None:
    """A plugin's own block of the settings, validated by its model; ``None`` for a plugin that has none.

    Raises:
        SettingsError: A value in the block cannot be used, or there is a block for a plugin that takes none.
    """
    if plugin.info.settings is not None:
        return settings.validate_block(plugin.name, plugin.info.settings)
    if settings.plugin_block(plugin.name):
        message = f"{plugin.name!r} takes no settings of its own."
        raise SettingsError(message, setting=plugin.name, origin=settings.origin(plugin.name))
    return None


def _strategy_name(settings: Settings) -> str:
    if settings.strategy != "auto":
        return settings.strategy
    return "ddp" if processes.world().size > 1 else "single"


def _check_processes(strategy: Plugin) -> None:
    size = processes.world().size
    if size > 1 and not strategy.info.capabilities.distributed:
        raise StrategyUnavailable(
            f"Strategy {strategy.name!r} is for one process, and there are {size}: each would train a model of its "
            "own. Use strategy='auto' or another one, or start the script without torchrun."
        )


def _device(settings: Settings) -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if settings.device is None:
        return processes.own_device(accelerator if accelerator is not None else torch.device("cpu"))
    try:
        device = torch.device(settings.device)
    except RuntimeError as error:
        raise _bad_device(settings, f"{settings.device!r} is no device: {str(error).splitlines()[0]}") from None
    if device.type not in ("cpu", "meta") and (accelerator is None or device.type != accelerator.type):
        raise _bad_device(settings, f"Device {settings.device!r} is not available on this machine.")
    return processes.own_device(device)


def _bad_device(settings: Settings, message: str) -> SettingsError:
    return SettingsError(message, setting="device", origin=settings.origin("device"))


def _check_backend(backend: Plugin, device: torch.device, training: bool) -> None:
    can = backend.info.capabilities
    if "*" not in can.devices and device.type not in can.devices:
        raise BackendUnavailable(
            f"Backend {backend.name!r} runs on {', '.join(can.devices)}, and the model is to run on {device.type}."
        )
    if training and not can.training:
        raise BackendUnavailable(
            f"Backend {backend.name!r} is for inference only, and an optimizer was given to train with. "
            "Train with another backend, or prepare the model alone."
        )


def _switched_off(settings: Settings) -> Iterator[str]:
    """Why nothing is compiled although the backend would."""
    if settings.disable:
        yield f"disable=True (from {settings.origin('disable')}): nothing is compiled."
    for variable in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"):  # PyTorch looks for "1" alone
        if os.environ.get(variable) == "1":
            yield f"{variable}=1 is set in the environment: nothing is compiled."


def _shape_notes(varying: DynamicBatch | None, dynamic: bool | None, open_: bool) -> Iterator[str]:
    """What becomes of a batch size that varies."""
    if varying is None or dynamic:
        return
    if open_:
        yield f"The first dimension is dynamic from the first step: {varying.reason}."
    else:
        why = "dynamic=False" if dynamic is False else "the backend takes no dynamic shapes"
        yield f"Each batch size gets a graph of its own ({why}): {varying.reason}."


def _beside_notes(model: nn.Module, arguments: Arguments, settings: Settings) -> Iterator[str]:
    """What of losses and optimizers stays as it is although it was to be compiled."""
    if settings.compile_loss and not arguments.losses_of(model):
        yield "compile_loss=True, and no loss was given."
    if settings.compile_optimizer and not arguments.optimizers_of(model):
        yield "compile_optimizer=True, and no optimizer was given."
    for optimizer in arguments.optimizers_of(model) if settings.compile_optimizer else ():
        if besides.is_fused(optimizer):
            yield f"{type(optimizer).__name__} has fused=True: its step is one kernel already, and is not compiled."


def _refuse_lazy(model: nn.Module) -> None:
    """Dynamo restores the random state after it traced a lazy module's initialisation: all blocks would start alike."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ArgumentError(
                f"{name!r} has no shape yet, and compiled, its initial values would not be eager's. "
                "Run one batch through the model first."
            )


@dataclass(frozen=True)
class _Found:
    """The parts of a model that something is done to."""

    compiled: tuple[Region, ...]
    checkpointed: tuple[Region, ...]


def _found(model: nn.Module, settings: Settings, compiles: bool) -> _Found:
    from . import recompute
    from .regions import find_regions

    compiled = find_regions(model, settings.regions, settings.exclude) if compiles else ()
    return _Found(compiled, recompute.blocks(model, settings))


_COMPILE_KWARGS = frozenset({"backend", "mode", "options", "fullgraph", "dynamic"})


def _compile_kwargs(
    backend: Plugin, hooks: pluggy.PluginManager, settings: Settings, device: torch.device
) -> dict[str, Any]:
    from .plugins import ask, check_request

    info = backend.info
    assert isinstance(info, BackendInfo)
    request = CompileRequest(
        backend=backend.name,
        mode=settings.mode,
        options=settings.options,
        fullgraph=settings.fullgraph,
        dynamic=settings.dynamic,
        device=device.type,
        own=own_settings(backend, settings),
    )
    check_request(info, request)
    asked: dict[str, Any] = ask(hooks, backend, "torch_compile_kwargs", dict, request=request)
    if unknown := set(asked) - _COMPILE_KWARGS:
        raise PluginLoadError(
            f"The hook torch_compile_kwargs() of backend {backend.name!r} ({backend.distribution} {backend.version}) "
            f"returned {', '.join(sorted(unknown))}, which torch.compile does not take from a backend."
        )
    return {"fullgraph": settings.fullgraph, "dynamic": settings.dynamic, **asked}


def _steps(
    model: nn.Module,
    arguments: Arguments,
    settings: Settings,
    chosen: _Chosen,
    found: _Found,
) -> Iterator[Step]:
    """The order: transforms, parallelize, checkpoint, compile, wrap (or wrap, then compile), optimizers, loaders."""
    from . import recompute

    name, strategy = type(model).__name__, chosen.strategy
    for each in chosen.transforms:
        yield Step("transform", name, each.name, "conversions come first: what is compiled must be final")
    if settings.parallelize is not None:
        asked = getattr(settings.parallelize, "__name__", str(settings.parallelize))
        yield Step("parallelize", name, asked, "what is compiled must be what each process computes")
    regions = found.compiled
    compiling = [_compile_step(region, chosen.backend) for region in regions]
    checkpoints = [Step("checkpoint", _target(each), "torchrig", each.reason, each) for each in found.checkpointed]
    around = bool(regions) and recompute.around(chosen.compiler, settings)
    compiling = compiling + checkpoints if around else compiling
    yield from () if around else checkpoints
    wrapping = [Step("wrap", name, strategy.name, _wrap_reason(settings, strategy))]
    yield from wrapping + compiling if chosen.compiles_after_wrap else compiling + wrapping
    for optimizer in arguments.optimizers_of(model):
        target = type(optimizer).__name__
        yield Step("optimizers", target, strategy.name, "must own the parameters that live after wrapping")
    for region in besides.losses(arguments, model) if settings.compile_loss and regions else ():
        yield Step("compile loss", region.kind, chosen.backend.name, region.reason, region)
    for region in besides.optimizers(arguments, model) if settings.compile_optimizer and regions else ():
        yield Step("compile optimizer", region.kind, chosen.backend.name, region.reason, region)
    for loader in arguments.loaders:
        yield Step("loaders", type(loader).__name__, "torchrig", _loader_reason(settings))


def _compile_step(region: Region, backend: Plugin) -> Step:
    return Step("compile", _target(region), backend.name, region.reason, region)


def _target(region: Region) -> str:
    return region.kind if region.whole else f"{region.kind} x{len(region.instances)}"


def _loader_reason(settings: Settings) -> str:
    arriving = "batches must arrive on the model's device"
    size = processes.world().size
    return (
        arriving if size == 1 or not settings.shard_loaders else f"one of {size} processes reads its share; {arriving}"
    )


def _wrap_reason(settings: Settings, strategy: Plugin) -> str:
    precision = "" if settings.mixed_precision == "no" else f", in {settings.mixed_precision}"
    return f"{strategy.info.summary}{precision}"
