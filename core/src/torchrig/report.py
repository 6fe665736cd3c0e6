"""What was really compiled, as a person and a program read it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from torch import nn

from . import placement, state, trace
from .arguments import require_module
from .errors import TorchrigError
from .problems import break_hint, first_line, hint_for

if TYPE_CHECKING:
    from .observe import Observation
    from .records import KindRecord


@dataclass(frozen=True)
class BreakReport:
    """Where a graph ended early (``file:line``), why, and what can be done."""

    where: str
    reason: str
    hint: str = ""


@dataclass(frozen=True)
class RecompileReport:
    """A further graph for code that had one in the same mode: where, the guard that failed, and what can be done."""

    where: str
    guard: str
    mode: str
    hint: str


@dataclass(frozen=True)
class KindReport:
    """What was seen of one region kind.

    Args:
        kind: Its name.
        instances: How many modules of the model are of it.
        graphs: Graphs built for it, over all modes.
        modes: Graphs built in each mode (``"train"``, ``"eval, no_grad"``, ...).
        calls: How often one of its compiled graphs ran.
        recompiles: Graphs beyond the first of a function in a mode.
        breaks: Where its graphs ended early.
        fallbacks: Why code of it runs eager.
        compile_seconds: Wall time spent on compiling it, in seconds. The backward is compiled along with the forward in
            training mode; one that is compiled later is not in it.
    """

    kind: str
    instances: int
    graphs: int
    modes: dict[str, int]
    calls: int
    recompiles: tuple[RecompileReport, ...]
    breaks: tuple[BreakReport, ...]
    fallbacks: tuple[str, ...]
    compile_seconds: float

    @property
    def compiled(self) -> bool:
        """Whether it runs compiled: a graph was built, and none of its code fell back to eager."""
        return self.graphs > 0 and not self.fallbacks


@dataclass(frozen=True)
class Report:
    """What was compiled of a prepared model, up to now.

    ``str(report)`` is a table for a person, :meth:`to_json` the same for a program.

    Args:
        model: The model's class name.
        backend: The backend's name.
        strategy: The strategy's name.
        kinds: One entry for each region kind, in the model's order, then the losses and optimizer steps; empty where
            nothing is compiled.
    """

    model: str
    backend: str
    strategy: str
    kinds: tuple[KindReport, ...]

    @property
    def graphs(self) -> int:
        """Graphs built in all."""
        return sum(kind.graphs for kind in self.kinds)

    @property
    def recompiles(self) -> int:
        """Recompiles in all."""
        return sum(len(kind.recompiles) for kind in self.kinds)

    @property
    def breaks(self) -> int:
        """Graph breaks in all."""
        return sum(len(kind.breaks) for kind in self.kinds)

    @property
    def ok(self) -> bool:
        """Whether every region runs compiled, in one piece."""
        return all(kind.compiled and not kind.breaks for kind in self.kinds)

    def __getitem__(self, kind: str) -> KindReport:
        """The report of one kind, by name."""
        for each in self.kinds:
            if each.kind == kind:
                return each
        raise KeyError(f"no region kind {kind!r}; there are {', '.join(each.kind for each in self.kinds) or 'none'}")

    def __str__(self) -> str:
        from .render import table

        head = f"{self.model}: strategy {self.strategy}, backend {self.backend}"
        if not self.kinds:
            return f"{head}: nothing is compiled"
        names = ("region", "instances", "graphs", "recompiles", "breaks", "calls", "compile s", "compiled")
        return "\n".join([head, table(names, [_row(kind) for kind in self.kinds]), *_details(self.kinds)])

    def to_json(self) -> str:
        """The report as a JSON object: ``model``, ``backend``, ``strategy``, ``kinds`` and the totals."""
        totals = {"graphs": self.graphs, "recompiles": self.recompiles, "breaks": self.breaks, "ok": self.ok}
        kinds = [{**asdict(kind), "compiled": kind.compiled} for kind in self.kinds]
        head = {"model": self.model, "backend": self.backend, "strategy": self.strategy}
        return json.dumps({**head, **totals, "kinds": kinds}, indent=2)


def _row(kind: KindReport) -> tuple[str, ...]:
    counts = (kind.instances, kind.graphs, len(kind.recompiles), len(kind.breaks), kind.calls)
    return (kind.kind, *map(str, counts), f"{kind.compile_seconds:.1f}", "yes" if kind.compiled else "NO")


def _details(kinds: tuple[KindReport, ...]) -> list[str]:
    lines = []
    for kind in kinds:
        for place, each in enumerate(kind.recompiles):
            told = any(each.hint == before.hint for before in kind.recompiles[:place])
            hint = "" if told else each.hint
            lines.append(f"{kind.kind} recompiled ({each.mode}) at {each.where}: {each.guard}. {hint}".rstrip())
        lines += [f"{kind.kind} breaks at {each.where}: {each.reason}. {each.hint}".rstrip() for each in kind.breaks]
        lines += [f"{kind.kind} fell back: {each}" for each in kind.fallbacks]
    return lines


def report(model: nn.Module) -> Report:
    """What was really compiled of a prepared model, up to now.

    Args:
        model: What ``prepare`` was given or gave back, or a deep copy of it; copies share their compiled code, and so
            their counts.

    Raises:
        ArgumentError: It is no model.
        TorchrigError: The model was not prepared.
    """
    require_module(model, "report")
    made = _report(model)
    trace.artifact("torchrig_report", made.to_json)
    return made


def _report(model: nn.Module) -> Report:
    prepared = state.recall(model)
    if prepared is not None:
        plan = prepared.plan
        return Report(plan.model, plan.backend, plan.strategy, _kinds(prepared.observation))
    records = _records_in(model)
    if not records:
        raise TorchrigError(f"This {type(model).__name__} was not prepared: there is nothing to report.")
    backend = next(iter(records)).policy.backend
    return Report(type(model).__name__, backend, "single", tuple(_kind_report(record) for record in records))


def _records_in(model: nn.Module) -> list[KindRecord]:
    found: dict[int, KindRecord] = {}
    for module in model.modules():
        record = placement.record_of(module)
        if record is not None:
            found.setdefault(id(record), record)
    return list(found.values())


def _kinds(observation: Observation | None) -> tuple[KindReport, ...]:
    if observation is None:
        return ()
    return tuple(_kind_report(each) for each in (*observation.records.values(), *observation.besides.values()))


def _kind_report(record: KindRecord) -> KindReport:
    return KindReport(
        kind=record.region.kind,
        instances=len(record.region.instances),
        graphs=record.graphs,
        modes=dict(record.modes),
        calls=record.calls,
        recompiles=tuple(
            RecompileReport(each.where, first_line(each.guard), each.mode, hint_for(each.guard))
            for each in record.recompiles
        ),
        breaks=tuple(
            BreakReport(each.where, first_line(each.reason), break_hint(each.reason)) for each in record.breaks
        ),
        fallbacks=tuple(record.fallbacks),
        compile_seconds=record.seconds,
    )


def is_compiled(module: nn.Module) -> bool:
    """Whether this very module runs compiled: by torchrig, ``torch.compile(module)`` or ``module.compile()``.

    Raises:
        ArgumentError: It is no module.
    """
    require_module(module, "is_compiled")
    return placement.is_compiled(module)


def has_compiled_regions(model: nn.Module) -> bool:
    """Whether some module inside ``model``, or ``model`` itself, runs compiled.

    Raises:
        ArgumentError: It is no module.
    """
    require_module(model, "has_compiled_regions")
    return any(placement.is_compiled(module) for module in model.modules())
