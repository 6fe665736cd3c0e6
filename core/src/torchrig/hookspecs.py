"""The hooks a plugin implements, and the frozen values that cross them.

A plugin is a module or an object whose functions carry :data:`hookimpl`.
It is published under an entry point of one of the groups in :mod:`torchrig.catalogue`;
the entry's name is the backend's, strategy's or transform's name.

Pluggy calls every registered implementation and cannot thread a value through them,
so :mod:`torchrig.prepare` folds: ``transform`` and ``wrap_strategy`` in plan order, ``unwrap`` in reverse.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from .settings import Settings

PROJECT = "torchrig"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


def _always_available() -> str | None:
    return None


def _no_facts() -> Mapping[str, str]:
    return {}


def _no_folders() -> Sequence[str]:
    return ()


@dataclass(frozen=True)
class Capabilities:
    """What a backend or a strategy can do.

    Args:
        training: Whether gradients flow through what it makes.
        dynamic_shapes: Whether one graph may serve several shapes.
        devices: Device types it runs on; ``("*",)`` is any.
        distributed: Whether it may be used with more than one process.
    """

    training: bool = True
    dynamic_shapes: bool = True
    devices: tuple[str, ...] = ("*",)
    distributed: bool = True


@dataclass(frozen=True)
class PluginInfo:
    """What every plugin says of itself.

    Args:
        name: The name it is selected by; the same as its entry point's.
        summary: One line for ``torchrig plugins``.
        aliases: Other names that mean the same; each needs an entry point of its own to be found.
        capabilities: See :class:`Capabilities`.
        settings: The pydantic model of the plugin's own block in the settings, or ``None``.
        probe: Says why the plugin cannot be used on this machine, or ``None`` when it can.
            Called only when somebody asks; it must not initialise a device.
        facts: What a bug report should say of the plugin's own tools, such as compilers and libraries with their
            versions: a mapping of names to texts. Called by ``torchrig doctor`` alone, also where ``probe`` gives a
            reason; it may take a second and import what it needs, and should change nothing.
    """

    name: str
    summary: str
    aliases: tuple[str, ...] = ()
    capabilities: Capabilities = field(default_factory=Capabilities)
    settings: type[BaseModel] | None = None
    probe: Callable[[], str | None] = _always_available
    facts: Callable[[], Mapping[str, str]] = _no_facts

    def unavailable_reason(self) -> str | None:
        """Why this plugin cannot be used here; ``None`` when it can."""
        return self.probe()


@dataclass(frozen=True)
class BackendInfo(PluginInfo):
    """What a compile backend says of itself.

    Args:
        compiles: ``False`` only for a backend that leaves the model eager, as ``no`` does.
        recomputes: Whether a checkpoint in a graph is carried out by its compiler, as those do that partition
            AOTAutograd's joint graph: what is computed again in the backward has the random numbers of the forward.
            Without it, checkpointed blocks run their compiled forward twice.
        modes: The values of ``mode`` it takes; empty when it takes none.
        options: A function that lists the options it takes, or ``None`` when it takes none.
            A function, because listing them may import the backend.
        cache_dirs: A function that names the folders it keeps compiled code in, whether they are there yet or not.
            ``torchrig doctor`` looks whether they can be written to and loaded from.
    """

    compiles: bool = True
    recomputes: bool = False
    modes: tuple[str, ...] = ()
    options: Callable[[], Sequence[str]] | None = None
    cache_dirs: Callable[[], Sequence[str]] = _no_folders


@dataclass(frozen=True)
class StrategyInfo(PluginInfo):
    """What a strategy says of itself.

    Args:
        in_place: Whether ``wrap_strategy`` gives back the very model it was given.
        compile_after_wrap: Whether regions are compiled after the wrapping rather than before.
        has_mesh: Whether it implements ``device_mesh``, which the setting ``parallelize`` needs.
        process_group: Whether PyTorch's default process group is started for it, before anything is changed, where
            there is none yet: ``True`` always, of this process alone where no launcher says otherwise; ``False`` never,
            as it has a way of its own; ``None`` where a launcher such as torchrun says how many processes there are.
            Not for a strategy that is not ``distributed``.
    """

    in_place: bool = True
    compile_after_wrap: bool = False
    has_mesh: bool = False
    process_group: bool | None = None


@dataclass(frozen=True)
class TransformInfo(PluginInfo):
    """What a transform (a conversion of the model before sharding, such as float8) says of itself."""


@dataclass(frozen=True)
class CompileRequest:
    """What a backend is asked to turn into arguments for ``torch.compile``.

    Args:
        backend: The backend's name.
        mode: The mode the user asked for; already one of the backend's.
        options: The options the user asked for; their names already checked against the backend's.
        fullgraph: Whether a graph break is an error.
        dynamic: ``True``, ``False`` or ``None`` (decide at the first recompile).
        device: The device type the model will run on.
        own: The plugin's own block of settings, validated by its model, or ``None``.
    """

    backend: str
    mode: str | None
    options: Mapping[str, Any] | None
    fullgraph: bool
    dynamic: bool | None
    device: str
    own: BaseModel | None = None


@dataclass(frozen=True)
class Region:
    """All the places of one kind that are compiled alike.

    Args:
        kind: The name of the kind, unique in a plan; the class's name where that is unique.
        cls: The class of every instance.
        instances: The fully qualified name of each instance in the model; ``("",)`` is the model itself. What
            stands beside the model (a loss, an optimizer's step) has its kind there.
        reason: Why these modules are a region, for a person to read.
    """

    kind: str
    cls: type[Any]
    instances: tuple[str, ...]
    reason: str

    @property
    def whole(self) -> bool:
        """Whether the region is the whole model."""
        return self.instances == ("",)


@dataclass(frozen=True)
class DynamicBatch:
    """The first dimension of a region's inputs varies, and its first graph is to serve every size of it.

    Args:
        sizes: The full batch sizes, in samples; empty where a batch may have any size.
        reason: What makes it vary.
    """

    sizes: frozenset[int]
    reason: str

    def varies(self, size: int) -> bool:
        """Whether a first dimension of that size holds the batch: alone, or times what else was flattened into it."""
        return size > 1 and (not self.sizes or any(size % each == 0 for each in self.sizes))


@dataclass(frozen=True)
class Step:
    """One thing that prepare does, in its place in the order.

    Args:
        action: ``"transform"``, ``"parallelize"``, ``"checkpoint"``, ``"compile"``, ``"wrap"``, ``"optimizers"``,
            ``"compile loss"``, ``"compile optimizer"`` or ``"loaders"``.
        target: What it is done to.
        by: The plugin that does it, or ``"torchrig"``.
        reason: Why it is done, and why at this place.
        region: What a step that compiles or checkpoints something does it to.
    """

    action: str
    target: str
    by: str
    reason: str
    region: Region | None = None


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
        dynamic_batch: What the first graphs are built dynamic in; ``None`` where they take the shape they see.
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
    dynamic_batch: DynamicBatch | None = None

    def __str__(self) -> str:
        from .render import table

        head = f"{self.model}: strategy {self.strategy}, backend {self.backend}, device {self.device}"
        rows = [
            (str(place), step.action, step.target, step.by, step.reason)
            for place, step in enumerate(self.steps, start=1)
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


def _nothing() -> None:
    """Undo nothing."""


@dataclass(frozen=True)
class Share:
    """Which part of the samples this process trains on.

    Args:
        index: The part, from 0. Processes that hold parts of one copy of the model read the same one.
        count: How many parts there are.
    """

    index: int = 0
    count: int = 1


@dataclass(frozen=True)
class Wrapped:
    """What a strategy made of a model.

    Args:
        model: The model to train from now on; the one that was given where the strategy works in place.
        optimizers: The optimizers, in the order given, owning ``model``'s live parameters.
        undo: Takes the wrapping off again. Called when a later step of prepare raises.
        share: This process's part of the samples of the loaders; ``None`` gives each process of the process group one
            of its own, where the strategy is ``distributed``.
    """

    model: nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]
    undo: Callable[[], None] = _nothing
    share: Share | None = None


@dataclass(frozen=True)
class Unit:
    """Parameters that a strategy keeps, gathers and reduces together, as one process sees them.

    Args:
        name: The module they belong to; ``""`` is the model itself.
        kept: For each parameter, by its name in the model, the shape of what the process keeps of it; of processes that
            keep parts of different sizes, the largest.
        gathered: Bytes that it receives from others in a training step, to have the parameters whole.
        reduced: Bytes that it hands to others in a training step, to add up gradients; of an all-reduce, its operand.
        whole: Bytes that the gathered parameters take while they are in use; 0 where they are kept whole.
        workspace: Bytes that it needs for gradients on their way, for as long as it trains.
    """

    name: str
    kept: Mapping[str, torch.Size]
    gathered: int = 0
    reduced: int = 0
    whole: int = 0
    workspace: int = 0


@hookspec(firstresult=True)
def describe() -> BackendInfo | StrategyInfo | TransformInfo:  # type: ignore[empty-body]
    """Say what the plugin is called, what it can do and what it takes. Every plugin implements it."""


@hookspec(firstresult=True)
def torch_compile_kwargs(request: CompileRequest) -> dict[str, Any]:  # type: ignore[empty-body]
    """Turn a request into arguments for ``torch.compile``. Backends implement it.

    Raises:
        SettingsError: An option's value is not one the backend takes. Raised here, it is raised by ``prepare``
            before the model was touched.
    """


@hookspec(firstresult=True)
def device_mesh(plan: Plan) -> DeviceMesh:  # type: ignore[empty-body]
    """The mesh of processes that a strategy shards over, for the setting ``parallelize``.

    Strategies implement it whose :class:`StrategyInfo` says ``has_mesh``. It is called once the process group is there,
    and before ``wrap_strategy``, which must use the same mesh. Its dimensions are named.

    Raises:
        SettingsError: The settings ask for a mesh that the number of processes does not allow.
    """


@hookspec
def check_model(model: nn.Module, plan: Plan) -> None:
    """Refuse a model that the strategy cannot wrap. Strategies may implement it.

    Called by ``plan`` and by ``prepare``, before anything is changed and before there is a process group. It changes
    nothing.

    Raises:
        TorchrigError: A :class:`~torchrig.StrategyError` or another of the tree, that says what to do.
    """


@hookspec
def wrap_strategy(  # type: ignore[empty-body]
    model: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...], plan: Plan
) -> Wrapped:
    """Shard, wrap or move the model, and bind the optimizers to its live parameters. Strategies implement it.

    An implementation that raises must leave ``model`` and ``optimizers`` as it found them.
    """


@hookspec(firstresult=True)
def units(model: nn.Module, plan: Plan, processes: int) -> tuple[Unit, ...]:  # type: ignore[empty-body]
    """What a process keeps and sends under this strategy, for ``torchrig plan --world-size``.

    Strategies may implement it. ``model`` may be on the meta device, and is not changed.

    Raises:
        TorchrigError: The model or the settings do not go with so many processes.
    """


@hookspec
def compile_region(module: nn.Module, region: Region, kwargs: Mapping[str, Any], plan: Plan) -> nn.Module | None:
    """Compile one instance of a region in a way of its own; ``None`` leaves it to torchrig.

    ``kwargs`` are the arguments for ``torch.compile``, with the one backend object of this prepare in them.
    What is returned takes the place of ``module`` in the model; returning ``module`` itself is the usual case.
    More than one plugin answering is an :class:`~torchrig.AmbiguousPluginError`.
    """


@hookspec(firstresult=True)
def no_sync(model: nn.Module) -> AbstractContextManager[None] | None:
    """Give a context in which a backward adds up gradients on this process alone; ``None`` where there is nothing to
    keep from synchronising. ``model`` is what ``prepare`` gave back. Strategies implement it.
    """


@hookspec(firstresult=True)
def clip_grad_norm(model: nn.Module, max_norm: float, norm_type: float) -> torch.Tensor | None:
    """Clip the gradients of the whole model to a norm, and return the norm they had, the same on every process.

    ``None``, or no implementation, leaves it to PyTorch's ``clip_grad_norm_``, which is right where every process holds
    whole gradients. ``model`` is what ``prepare`` gave back. Strategies that shard gradients implement it.
    """


@hookspec
def unwrap(model: nn.Module, keep_compile: bool) -> nn.Module | None:
    """Give back what is under this strategy's own wrapper; ``None`` if ``model`` is not such a wrapper."""


@hookspec
def transform(model: nn.Module, plan: Plan) -> nn.Module:  # type: ignore[empty-body]
    """Convert the model, before it is compiled and sharded. Transforms implement it.

    In place, or by returning another model; then ``unwrap`` gives back that one. Optimizers are bound to the parameters
    of what is returned, by name. Where a later step raises, what stood where in the model is brought back.
    """
