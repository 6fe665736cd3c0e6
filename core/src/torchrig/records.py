"""What was seen of each region kind, judged as it comes in: counts, recompiles, breaks, and what fell back to eager."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import dynamo, logs
from .errors import CompileProblem, GraphBreak, RecompileLimitReached, RegionCompileError, RegionNotCompiled
from .hookspecs import Region
from .problems import Policy, first_line, hint_for

RECOMPILES_WORTH_A_WARNING = 4  # half of Dynamo's default limit: early enough to act on


@dataclass(frozen=True)
class Recompile:
    """A further graph for a function that had one in the same mode.

    Args:
        where: ``file:line`` of the function.
        guard: The guard that failed, as Dynamo words it.
        mode: ``"train"`` or ``"eval"``, with ``", no_grad"`` where gradients are off.
    """

    where: str
    guard: str
    mode: str


@dataclass
class KindRecord:
    """Everything that was seen of one region kind.

    Args:
        region: The kind and its instances.
        policy: What to do about each kind of problem; see :class:`torchrig.problems.Policy`.
        kwargs: The arguments for ``torch.compile`` that it is compiled with.
        graphs: Graphs built, over all modes.
        modes: Graphs built in each mode.
        calls: How often a compiled graph of this kind ran.
        seconds: Wall time of all its conversions.
        recompiles: Graphs beyond the first of a function in a mode, with the guard that failed.
        breaks: Where graphs ended early.
        fallbacks: Why code of this kind ran eager.
        gave_up: Whether nothing of it is compiled any more.
        checked: Whether it was looked at after its first run.
    """

    region: Region
    policy: Policy
    kwargs: Mapping[str, Any]
    graphs: int = 0
    modes: dict[str, int] = field(default_factory=dict)
    calls: int = 0
    seconds: float = 0.0
    recompiles: list[Recompile] = field(default_factory=list)
    breaks: list[dynamo.Break] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    gave_up: bool = False
    checked: bool = False
    _seen: set[tuple[str, str]] = field(default_factory=set)
    _pending_restart: dynamo.Break | None = None

    def converted(self, conversion: dynamo.Conversion) -> None:
        """Count what came of one conversion; see :class:`torchrig.dynamo.Listener`."""
        self.seconds += conversion.seconds
        logs.converted(self.region.kind, conversion)
        self._count_graphs(conversion)
        for found in self._breaks_in(conversion):
            self._note_break(found)
        if conversion.limit_reached:
            self._fall_back(f"recompile limit reached: {conversion.recompile_reason}")
            self._limit_reached(conversion.recompile_reason)
        elif conversion.breaks and conversion.skip_reason is not None:
            self._fall_back(f"{conversion.function} runs eager: {first_line(conversion.skip_reason)}")

    def failed(self, conversion: dynamo.Conversion, error: Exception) -> bool:
        """Raise the typed error, or note the fall-back to eager where the settings ask for it."""
        self.seconds += conversion.seconds
        problem = self._problem_of(conversion, error)
        if self.policy.on_failure == "eager":
            told = (
                str(problem)
                if problem
                else f"Region {self.region.kind}: {type(error).__name__}: {first_line(str(error))}"
            )
            self._fall_back(told)
            self.policy.warn(f"{told} It runs eager from now on (on_failure='eager').")
            return True
        if problem is not None:
            raise problem from _cause(error)
        return False

    def backend_failed(self, error: Exception) -> None:
        """Note, and warn once, that the backend raised and this kind runs eager."""
        reason = f"backend {self.policy.backend!r} failed: {_backend_text(error)}"
        if first_line(reason) not in self.fallbacks:
            self.policy.warn(f"Region {self.region.kind} runs eager from now on (on_failure='eager'): {reason}")
        self._fall_back(reason)

    @property
    def falls_back(self) -> bool:
        """Whether what cannot be compiled is to run eager rather than raise.

        PyTorch refuses a call under ``fullgraph`` in which nothing was compiled, so it is not asked for it then; a
        break is seen here, and the graphs around it are not compiled either.
        """
        return self.policy.on_failure == "eager"

    def give_up(self, found: dynamo.Break) -> None:
        """Run this kind eager from now on: it breaks, and was to be one graph."""
        if self.gave_up:
            return
        self.gave_up = True
        reason = f"it cannot be one graph (fullgraph=True): {found.where}: {first_line(found.reason)}"
        self.policy.warn(f"Region {self.region.kind} runs eager from now on (on_failure='eager'): {reason}")
        self._fall_back(reason)

    def left(self, reason: str) -> None:
        """Report, once, that it runs eager where something else than compiling decides it."""
        if reason not in self.fallbacks:
            self._fall_back(reason)
            told = f"{self.region.kind} is not compiled: {reason}."
            self.policy.handle("region_not_compiled", RegionNotCompiled(told))

    def _count_graphs(self, conversion: dynamo.Conversion) -> None:
        self.graphs += conversion.graphs
        if not conversion.graphs:
            return
        self.modes[conversion.mode] = self.modes.get(conversion.mode, 0) + conversion.graphs
        key = (conversion.where, conversion.mode)
        if key in self._seen and conversion.recompile_reason is not None:
            self._note_recompile(Recompile(conversion.where, conversion.recompile_reason, conversion.mode))
        self._seen.add(key)

    def _note_recompile(self, recompile: Recompile) -> None:
        self.recompiles.append(recompile)
        logs.problem(
            self.region.kind, f"recompiled ({recompile.mode}) at {recompile.where}", first_line(recompile.guard)
        )
        told = self.policy.on_problem["recompile_limit"] != "ignore"
        if told and len(self.recompiles) == RECOMPILES_WORTH_A_WARNING:
            self.policy.warn(
                f"Region {self.region.kind} was recompiled {len(self.recompiles)} times; PyTorch runs it eager after "
                f"its limit of {dynamo.recompile_limit()}. The guard that failed: {first_line(recompile.guard)}. "
                f"{hint_for(recompile.guard)}"
            )

    def _breaks_in(self, conversion: dynamo.Conversion) -> list[dynamo.Break]:
        """The breaks of a conversion, with those that no graph preceded found by the frame that resumes after them."""
        found = list(conversion.breaks)
        if conversion.resumed and self._pending_restart is not None:
            found.append(dynamo.Break(conversion.where, self._pending_restart.reason))
        self._pending_restart = None
        if conversion.restarts and not conversion.breaks:
            self._pending_restart = dynamo.Break(conversion.where, conversion.restarts[0])
        return found

    def _note_break(self, found: dynamo.Break) -> None:
        if found in self.breaks:
            return
        self.breaks.append(found)
        logs.problem(self.region.kind, f"breaks at {found.where}", first_line(found.reason))
        if self.kwargs["fullgraph"]:
            self.give_up(found)
            return
        self.policy.handle(
            "graph_break", GraphBreak(f"Region {self.region.kind} breaks at {found.where}: {first_line(found.reason)}")
        )

    def _limit_reached(self, guard: str | None) -> None:
        self.policy.handle(
            "recompile_limit",
            RecompileLimitReached(
                f"Region {self.region.kind} was recompiled as often as PyTorch allows ({dynamo.recompile_limit()}) and "
                f"runs eager from now on. The guard that failed: {first_line(guard or 'unknown')}. "
                f"{hint_for(guard or '')}"
            ),
        )

    def _fall_back(self, reason: str) -> None:
        told = first_line(reason)
        if told not in self.fallbacks:
            self.fallbacks.append(told)
            logs.problem(self.region.kind, "falls back to eager", told)

    def _problem_of(self, conversion: dynamo.Conversion, error: Exception) -> CompileProblem | None:
        kind, backend = self.region.kind, self.policy.backend
        text = first_line(str(error))
        family = dynamo.family_of(error)
        if family == "backend":
            return RegionCompileError(f"Backend {backend!r} failed to compile region {kind}: {_backend_text(error)}")
        if family == "limit":
            guard = first_line(conversion.recompile_reason or "unknown")
            return RecompileLimitReached(f"Region {kind} was recompiled too often; the guard that failed: {guard}.")
        if family == "break":
            where = conversion.breaks[0].where if conversion.breaks else conversion.where
            return GraphBreak(f"Region {kind} cannot be one graph (fullgraph=True): {where}: {text}")
        return None

    def check_compiled(self) -> None:
        """Report, once, a region for which no graph was built; called after it was to run for the first time."""
        pending, self._pending_restart = self._pending_restart, None
        if not self.graphs and pending is not None:  # nothing was compiled after it, as where a checkpoint breaks
            self._note_break(pending)
            self._fall_back(f"runs eager: {first_line(pending.reason)}")
        if self.checked or self.graphs or self.fallbacks:
            self.checked = True
            return
        self.checked = True
        instances = ", ".join(self.region.instances[:3]) + (", ..." if len(self.region.instances) > 3 else "")
        self.policy.handle(
            "region_not_compiled",
            RegionNotCompiled(
                f"Region {self.region.kind} ({instances or 'the whole model'}) built no graph in its first run: "
                "either it did not run, or PyTorch skipped its code. Exclude it, or try another placement."
            ),
        )


def _backend_text(error: Exception) -> str:
    cause = _cause(error)
    return f"{type(cause).__name__}: {first_line(str(cause))}"


def _cause(error: Exception) -> Exception:
    """What the backend raised, under Dynamo's own wrapping."""
    return getattr(error, "inner_exception", None) or error
