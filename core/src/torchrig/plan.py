"""Settings, plugins and regions -> the ordered steps of a prepare, each with its reason. Touches nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .arguments import Arguments, sort
from .errors import BackendUnavailable, SettingsError
from .hookspecs import BackendInfo, CompileRequest, Region, Step, StrategyInfo

if TYPE_CHECKING:
    import pluggy

    from .plugins import Plugin
    from .settings import Settings


@dataclass(frozen=True)
class Plan:
    """What ``prepare`` will do to a model, in order.

    ``str(plan)`` is a table for a person, :meth:`to_json` the same for a program.

    Args:
        model: The model's class name.
        strategy: The strategy's name, ``"auto"`` resolved.
        backend: The backend's name.
        device: The device the model goes to.
        regions: What is compiled; empty where nothing is.
        steps: What is done, in order.
        compile_kwargs: The arguments for ``torch.compile``; empty where nothing is compiled.
        notes: What a reader should know besides.
        settings: The settings it was made from.
    """

    model: str
    strategy: str
    backend: str
    device: torch.device
    regions: tuple[Region, ...]
    steps: tuple[Step, ...]
    compile_kwargs: Mapping[str, Any]
    notes: tuple[str, ...]
    settings: Settings

    def __str__(self) -> str:
        from .render import table

        head = f"{self.model}: strategy {self.strategy}, backend {self.backend}, device {self.device}"
        rows = [
            (str(place), step.action, step.target, step.by, step.reason) for place, step in enumerate(self.steps, start=1)
        ]
        lines = [head, table(("", "step", "on", "by", "because"), rows)]
        return "\n".join(lines + [f"note: {note}" for note in self.notes])

    def to_json(self) -> str:
        """The plan as a JSON object: ``model``, ``strategy``, ``backend``, ``device``, ``regions``, ``steps``, ..."""
        return json.dumps(
            {
                "model": self.model,
                "strategy": self.strategy,
                "backend": self.backend,
                "device": str(self.device),
                "regions": [_region_json(region) for region in self.regions],
                "steps": [
                    {"action": step.action, "target": step.target, "by": step.by, "reason": step.reason}
                    for step in self.steps
                ],
                "compile_kwargs": {name: _plain(value) for name, value in self.compile_kwargs.items()},
                "notes": list(self.notes),
                "settings": self.settings.to_dict(),
            },
            indent=2,
        )


def _region_json(region: Region) -> dict[str, Any]:
    cls = f"{region.cls.__module__}.{region.cls.__qualname__}"
    return {"kind": region.kind, "class": cls, "instances": list(region.instances), "reason": region.reason}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    return value if isinstance(value, (str, int, float, bool, type(None))) else getattr(value, "__name__", repr(value))


def plan(model: nn.Module, *others: Any, settings: Settings | None = None, **overrides: Any) -> Plan:
    """Say what :func:`torchrig.prepare` would do with the same arguments, and do nothing.

    Args:
        model: The model.
        *others: Optimizers, schedulers, loaders, losses, further models.
        settings: Where given, the settings to start from.
        **overrides: Single settings; they win over everything else.

    Returns:
        The plan of ``model``.

    Raises:
        SettingsError: A setting cannot be used; names where it came from.
        ArgumentError: Something given cannot be prepared.
        BackendError, StrategyError, PluginError, RegionError: As ``prepare`` would raise them.
    """
    arguments = sort(model, others)
    return draft(model, arguments, resolve(settings, overrides)).plan


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
        backend: The backend.
        transforms: In the order of the settings.
    """

    plan: Plan
    hooks: pluggy.PluginManager
    strategy: Plugin
    backend: Plugin
    transforms: tuple[Plugin, ...]


def draft(model: nn.Module, arguments: Arguments, settings: Settings) -> Draft:
    """Choose the plugins, find the regions, and put the steps in order."""
    from . import plugins

    strategy = plugins.load_strategy(_strategy_name(settings))
    backend = plugins.load_backend(settings.backend)
    transforms = tuple(plugins.load_transform(name) for name in settings.transforms)
    device = _device(settings)
    training = bool(arguments.optimizers_of(model))
    _check_backend(backend, device, training)
    compiles = backend.info.compiles and not settings.disable and not _dynamo_disabled()
    regions = _regions(model, settings) if compiles else ()
    hooks = plugins.make_manager((*transforms, backend, strategy))
    made = Plan(
        model=type(model).__name__,
        strategy=strategy.name,
        backend=backend.name,
        device=device,
        regions=regions,
        steps=_steps(model, arguments, settings, strategy, backend, transforms, regions),
        compile_kwargs=_compile_kwargs(backend, hooks, settings, device) if compiles else {},
        notes=_notes(settings, backend),
        settings=settings,
    )
    return Draft(made, hooks, strategy, backend, transforms)


def _strategy_name(settings: Settings) -> str:
    if settings.strategy != "auto":
        return settings.strategy
    return "ddp" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else "single"


def _device(settings: Settings) -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if settings.device is None:
        return accelerator if accelerator is not None else torch.device("cpu")
    try:
        device = torch.device(settings.device)
    except RuntimeError as error:
        raise _setting_error(settings, "device", f"{settings.device!r} is no device: {error}".splitlines()[0]) from None
    if device.type not in ("cpu", "meta") and (accelerator is None or device.type != accelerator.type):
        raise _setting_error(settings, "device", f"device {settings.device!r} is not available on this machine.")
    return device


def _setting_error(settings: Settings, name: str, message: str) -> SettingsError:
    return SettingsError(message, setting=name, origin=settings.origin(name))


def _dynamo_disabled() -> bool:
    return os.environ.get("TORCHDYNAMO_DISABLE", "") == "1"


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


def _regions(model: nn.Module, settings: Settings) -> tuple[Region, ...]:
    from .regions import find_regions

    return find_regions(model, settings.regions, settings.exclude)


def _compile_kwargs(
    backend: Plugin, hooks: pluggy.PluginManager, settings: Settings, device: torch.device
) -> dict[str, Any]:
    info = backend.info
    assert isinstance(info, BackendInfo)
    request = CompileRequest(
        backend=backend.name,
        mode=settings.mode,
        options=settings.options,
        fullgraph=settings.fullgraph,
        dynamic=settings.dynamic,
        device=device.type,
        own=settings.validate_block(backend.name, info.settings) if info.settings is not None else None,
    )
    try:
        from .plugins import check_request

        check_request(info, request)
        asked: dict[str, Any] = hooks.hook.torch_compile_kwargs(request=request)
    except SettingsError as error:
        if error.origin is None and error.setting is not None:
            error.origin = settings.origin(error.setting)
        raise
    return {"fullgraph": settings.fullgraph, "dynamic": settings.dynamic, **asked}


def _notes(settings: Settings, backend: Plugin) -> tuple[str, ...]:
    notes = []
    if backend.info.compiles and settings.disable:
        notes.append(f"disable=True (from {settings.origin('disable')}): nothing is compiled.")
    if backend.info.compiles and _dynamo_disabled():
        notes.append("TORCHDYNAMO_DISABLE=1 is set in the environment: nothing is compiled.")
    return tuple(notes)


def _steps(
    model: nn.Module,
    arguments: Arguments,
    settings: Settings,
    strategy: Plugin,
    backend: Plugin,
    transforms: tuple[Plugin, ...],
    regions: tuple[Region, ...],
) -> tuple[Step, ...]:
    info = strategy.info
    assert isinstance(info, StrategyInfo)
    compiling = [_compile_step(region, backend) for region in regions]
    wrapping = [Step("wrap", type(model).__name__, strategy.name, _wrap_reason(settings, info))]
    steps = [
        Step("transform", type(model).__name__, each.name, "conversions come first: what is compiled must be final")
        for each in transforms
    ]
    steps += wrapping + compiling if info.compile_after_wrap else compiling + wrapping
    steps += [
        Step("optimizers", type(optimizer).__name__, strategy.name, "must own the parameters that live after wrapping")
        for optimizer in arguments.optimizers_of(model)
    ]
    if model is arguments.models[0]:
        steps += [Step("loaders", type(loader).__name__, "torchrig", "batches must arrive on the device") for loader in arguments.loaders]
    return tuple(steps)


def _compile_step(region: Region, backend: Plugin) -> Step:
    target = region.kind if region.whole else f"{region.kind} x{len(region.instances)}"
    return Step("compile", target, backend.name, region.reason, region)


def _wrap_reason(settings: Settings, info: StrategyInfo) -> str:
    precision = "" if settings.mixed_precision == "no" else f", in {settings.mixed_precision}"
    return f"{info.summary}{precision}"
