"""A run on many processes, reckoned on one: what each would keep in memory, and what it would send in a step.

The plan is made as each of those processes would make it, in a process group of PyTorch's that only pretends. The model
is on the meta device, so its size does not matter. The strategy says what a process keeps of each unit; the optimizer
itself, stepping parameters of those shapes without values, says what state it makes of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from .arguments import require_module, sort
from .errors import ArgumentError, StrategyError
from .hookspecs import Plan, Unit
from .plan import Draft, draft, resolve
from .processes import has_group
from .render import table

if TYPE_CHECKING:
    from .settings import Settings

Building = Callable[[list[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Simulation:
    """What one of many processes keeps and sends; all sizes in bytes.

    Args:
        plan: The plan that each process follows.
        processes: How many there are.
        optimizer: The optimizer's class.
        units: What is kept, gathered and reduced together; see :class:`torchrig.Unit`.
        parameters: Its part of the parameters.
        gradients: Its part of the gradients, between backward and step.
        optimizer_state: The optimizer's state for its part, after the first step.
        buffers: The model's buffers, whole on every process.
        workspace: What the strategy needs for gradients on their way.
        gathered: What it receives in a step, to have parameters whole.
        reduced: What it hands to others in a step, to add up gradients.
        largest: What the largest unit takes while it is whole.
    """

    plan: Plan
    processes: int
    optimizer: str
    units: tuple[Unit, ...]
    parameters: int
    gradients: int
    optimizer_state: int
    buffers: int
    workspace: int
    gathered: int
    reduced: int
    largest: int

    @property
    def kept(self) -> int:
        """All that stays in memory from step to step."""
        return self.parameters + self.gradients + self.optimizer_state + self.buffers + self.workspace

    def __str__(self) -> str:
        head = f"{self.plan.model} on {self.processes} processes, {self.plan.strategy}: what each of them has"
        rows = [
            ("parameters", _size(self.parameters), "its part"),
            ("gradients", _size(self.gradients), "its part"),
            ("optimizer state", _size(self.optimizer_state), f"{self.optimizer}, for its part"),
            ("buffers", _size(self.buffers), "whole"),
            ("workspace", _size(self.workspace), "for gradients on their way"),
            ("in all", _size(self.kept), "activations come on top"),
            ("largest unit", _size(self.largest), "while it is gathered; the next one may be there already"),
            ("receives", f"{_size(self.gathered)} a step", f"parameters, gathered in {len(self.units)} units"),
            ("sends", f"{_size(self.reduced)} a step", "gradients, to be added up"),
        ]
        return f"{head}\n{table(('', 'size', ''), rows)}"

    def to_json(self) -> str:
        """The simulation as a JSON object, its plan as ``plan``; sizes in bytes."""
        own = {name: value for name, value in vars(self).items() if name not in ("plan", "units")}
        units = [
            {**asdict(unit), "kept": {name: list(shape) for name, shape in unit.kept.items()}} for unit in self.units
        ]
        return json.dumps({"plan": json.loads(self.plan.to_json()), **own, "kept": self.kept, "units": units}, indent=2)


def simulate(
    model: nn.Module,
    processes: int,
    *,
    optimizer: str | Building = "AdamW",
    settings: Settings | None = None,
    **overrides: Any,
) -> Simulation:
    """Reckon what each of many processes would keep in memory and send in a step. Starts none, changes nothing.

    Args:
        model: The model; build it under ``torch.device("meta")`` if it is large.
        processes: How many there would be.
        optimizer: The name of one of ``torch.optim``'s, or a function that makes one of a list of parameters.
        settings: The settings to start from, as for ``prepare``.
        **overrides: Single settings, such as ``strategy="fsdp2"``.

    Raises:
        SettingsError: A setting cannot be used, or does not go with so many processes.
        StrategyError: The strategy cannot tell, the model does not go with it, or there is a process group already.
        ArgumentError: ``model`` is no model, or ``optimizer`` makes no optimizer that steps parameters without values.

    Example:
        >>> import torch
        >>> from torchrig.simulation import simulate
        >>> with torch.device("meta"):
        ...     model = torch.nn.Linear(1024, 1024, bias=False)
        >>> simulate(model, 8, strategy="ddp").optimizer_state
        8388612
    """
    require_module(model, "simulate")
    chosen = resolve(settings, overrides)
    with _pretended(processes):
        drafted = draft(model, sort(model, ()), chosen, checking_model=False)
        units = _units(model, drafted, processes)
    return _reckoned(model, drafted.plan, processes, units, optimizer)


@contextmanager
def _pretended(processes: int) -> Iterator[None]:
    """A process group in which this is the first of so many processes, and nobody listens."""
    if processes < 1:
        raise ArgumentError(f"There must be at least 1 process, and {processes} were asked for.")
    if has_group():
        raise StrategyError("There is a process group already; simulate in a script that is not started by torchrun.")
    dist.init_process_group("fake", rank=0, world_size=processes)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _units(model: nn.Module, drafted: Draft, processes: int) -> tuple[Unit, ...]:
    from .plugins import ask

    caller = drafted.hooks.hook.units
    if not any(each.plugin_name == drafted.strategy.name for each in caller.get_hookimpls()):
        raise StrategyError(f"Strategy {drafted.strategy.name!r} does not tell what a process keeps of a model.")
    arguments = {"model": model, "plan": drafted.plan, "processes": processes}
    found: tuple[Unit, ...] = ask(drafted.hooks, drafted.strategy, "units", tuple, **arguments)
    return found


def _reckoned(
    model: nn.Module, plan: Plan, processes: int, units: tuple[Unit, ...], optimizer: str | Building
) -> Simulation:
    parameters = dict(model.named_parameters())
    kept = {name: shape for unit in units for name, shape in unit.kept.items()}
    trained = {name: shape for name, shape in kept.items() if parameters[name].requires_grad}
    name, state = _stepped(trained, parameters, optimizer)
    return Simulation(
        plan=plan,
        processes=processes,
        optimizer=name,
        units=units,
        parameters=_bytes(kept, parameters),
        gradients=_bytes(trained, parameters),
        optimizer_state=state,
        buffers=sum(each.nbytes for each in model.buffers()),
        workspace=sum(unit.workspace for unit in units),
        gathered=sum(unit.gathered for unit in units),
        reduced=sum(unit.reduced for unit in units),
        largest=max((unit.whole for unit in units), default=0),
    )


def _bytes(shapes: Mapping[str, torch.Size], parameters: Mapping[str, nn.Parameter]) -> int:
    return sum(prod(shape) * parameters[name].itemsize for name, shape in shapes.items())


def _stepped(
    shapes: Mapping[str, torch.Size], parameters: Mapping[str, nn.Parameter], optimizer: str | Building
) -> tuple[str, int]:
    """The class of the optimizer, and the bytes of its state after a step of parameters of these shapes."""
    made = [torch.empty(shape, dtype=parameters[name].dtype, device="meta") for name, shape in shapes.items()]
    stepping = [nn.Parameter(each) for each in made]
    if not stepping:
        return "none", 0
    built = _built(optimizer, stepping)
    for each in stepping:
        each.grad = torch.empty_like(each)
    try:
        built.step()
    except Exception as error:
        raise ArgumentError(
            f"{type(built).__name__} cannot step parameters without values: {type(error).__name__}: {error}"
        ) from error
    tensors = [value for state in built.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    return type(built).__name__, sum(each.nbytes for each in tensors)


def _built(optimizer: str | Building, parameters: list[nn.Parameter]) -> Optimizer:
    known = {name.casefold(): each for name, each in vars(torch.optim).items() if _is_optimizer(each)}
    if not isinstance(optimizer, str):
        built = optimizer(parameters)
    elif optimizer.casefold() in known:
        built = known[optimizer.casefold()](parameters, lr=1e-3)
    else:
        names = ", ".join(sorted(each.__name__ for each in known.values()))
        raise ArgumentError(f"{optimizer!r} is no optimizer of torch.optim. It has: {names}.")
    if not isinstance(built, Optimizer):
        raise ArgumentError(f"The function of optimizer= must return an optimizer, and returned {built!r}.")
    return built


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer


def _size(count: int) -> str:
    """``1536`` -> ``"1.50 KiB"``."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        del units[0]
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.2f} {units[0]}"
