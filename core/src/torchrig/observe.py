"""What was compiled, counted while it happens.

One :class:`Observation` belongs to one prepared model. It holds the one backend object of that prepare, which counts
graphs and their runs, and a :class:`KindRecord` for each region kind, which Dynamo's conversions are told to.
Nothing here runs on a step that compiles nothing, save one addition for each run of a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import dynamo
from .errors import (
    CompileProblem,
    GraphBreak,
    RecompileLimitReached,
    RegionCompileError,
    RegionNotCompiled,
)
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
    _seen: set[tuple[str, str]] = field(default_factory=set)
    _pending_restart: str | None = None
    _own_backend: Callable[..., Any] | None = None

    def converted(self, conversion: dynamo.Conversion) -> None:
        """Count what came of one conversion; see :class:`torchrig.dynamo.Listener`."""
        self.seconds += conversion.seconds
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
            self._fall_back(str(problem or error))
            self.policy.warn(f"{problem or error} It runs eager from now on (on_failure='eager').")
            return True
        if problem is not None:
            raise problem from _cause(error)
        return False

    def backend_failed(self, error: Exception) -> None:
        """Note, and warn once, that the backend raised and this kind runs eager."""
        reason = f"backend {self.policy.backend!r} failed: {_backend_text(error)}"
        if reason not in self.fallbacks:
            self.policy.warn(f"Region {self.region.kind} runs eager from now on (on_failure='eager'): {reason}")
        self._fall_back(reason)

    def backend(self, backend: ObservedBackend) -> Callable[..., Any]:
        """``backend``, called outside of a watched conversion, with its graphs counted here."""
        if self._own_backend is None:

            def compile_graph(graph: Any, example_inputs: Any) -> Callable[..., Any]:
                conversion = dynamo.unwatched(self.region.kind)
                with dynamo.attributed(self, conversion):
                    compiled = backend(graph, example_inputs)
                self.converted(conversion)
                return compiled

            self._own_backend = compile_graph
        return self._own_backend

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
        if len(self.recompiles) == RECOMPILES_WORTH_A_WARNING:
            self.policy.warn(
                f"Region {self.region.kind} was recompiled {len(self.recompiles)} times; PyTorch runs it eager after "
                f"its limit of {dynamo.recompile_limit()}. The guard that failed: {first_line(recompile.guard)}. "
                f"{hint_for(recompile.guard)}"
            )

    def _breaks_in(self, conversion: dynamo.Conversion) -> list[dynamo.Break]:
        """The breaks of a conversion, with those that no graph preceded found by the frame that resumes after them."""
        found = list(conversion.breaks)
        if conversion.resumed and self._pending_restart is not None:
            found.append(dynamo.Break(conversion.where, self._pending_restart))
        self._pending_restart = None
        if conversion.restarts and not conversion.breaks:
            self._pending_restart = conversion.restarts[0]
        return found

    def _note_break(self, found: dynamo.Break) -> None:
        if found in self.breaks:
            return
        self.breaks.append(found)
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
        if reason not in self.fallbacks:
            self.fallbacks.append(reason)

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
        """Report a region for which no graph was built; called after the model ran once."""
        if self.graphs or self.fallbacks:
            return
        instances = ", ".join(self.region.instances[:3]) + (", ..." if len(self.region.instances) > 3 else "")
        self.policy.handle(
            "region_not_compiled",
            RegionNotCompiled(
                f"Region {self.region.kind} ({instances or 'the whole model'}) built no graph in the first forward: "
                "either it did not run, or PyTorch skipped its code. Exclude it, or try another placement."
            ),
        )


class ObservedBackend:
    """The backend of one prepare: counts graphs and their runs, and falls back to eager where asked.

    Args:
        inner: The backend itself, with mode and options already in it.
        policy: What to do when it raises.
    """

    def __init__(self, inner: Callable[..., Any], policy: Policy) -> None:
        self._inner = inner
        self._policy = policy
        self.__name__ = policy.backend  # what Dynamo names in its own messages

    def __call__(self, graph: Any, example_inputs: Any) -> Callable[..., Any]:
        """Compile one graph, as Dynamo asks a backend to."""
        record, conversion = dynamo.current() or (None, None)
        if not isinstance(record, KindRecord) or conversion is None:
            return self._inner(graph, example_inputs)  # type: ignore[no-any-return]
        found = dynamo.break_of(graph)
        if found is not None:
            conversion.breaks.append(found)
        try:
            compiled = self._inner(graph, example_inputs)
        except Exception as error:
            if self._policy.on_failure != "eager":
                raise
            # Giving the traced graph back, rather than refusing the frame, keeps Dynamo from trying each inner frame.
            record.backend_failed(error)
            return graph.forward  # type: ignore[no-any-return]
        conversion.graphs += 1
        return _counted(compiled, record)

    def get_compiler_config(self) -> Any:
        """What the backend's own ``get_compiler_config`` says; Dynamo asks for it."""
        inner = getattr(self._inner, "get_compiler_config", None)
        return None if inner is None else inner()

    def reset(self) -> None:
        """Pass on ``torch._dynamo.reset``: the CUDA graph trees of Inductor listen to it."""
        inner = getattr(self._inner, "reset", None)
        if inner is not None:
            inner()


def _counted(compiled: Callable[..., Any], record: KindRecord) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        record.calls += 1
        return compiled(*args)

    return run


class Observation:
    """All that is seen of one prepared model.

    Args:
        backend: The one backend object.
        policy: What to do about problems.
        kwargs: The arguments for ``torch.compile``.
        regions: The region kinds.
    """

    def __init__(
        self, backend: ObservedBackend, policy: Policy, kwargs: Mapping[str, Any], regions: Iterable[Region]
    ) -> None:
        self.backend = backend
        self.records = {region.kind: KindRecord(region, policy, kwargs) for region in regions}

    def record(self, region: Region) -> KindRecord:
        """The record of a region kind."""
        return self.records[region.kind]

    def adopt(self, region: Region, record: KindRecord, whole: bool) -> bool:
        """Show a record made before, in place of the kind's own where that has no instances left.

        Returns:
            Whether it was compiled with the same settings; nothing is adopted otherwise.
        """
        own = self.records[region.kind]
        if (record.policy, record.kwargs) != (own.policy, own.kwargs):
            return False
        self.records[region.kind if whole else f"{region.kind} (prepared before)"] = record
        return True

    def backend_of(self, region: Region) -> Callable[..., Any]:
        """The backend for a plugin that calls ``torch.compile`` itself: what it compiles counts for this kind.

        The same object each time, so that the kind's instances share their graph.
        """
        return self.record(region).backend(self.backend)

    def check_compiled(self) -> None:
        """Report each region for which no graph was built."""
        for record in self.records.values():
            record.check_compiled()


def _backend_text(error: Exception) -> str:
    cause = _cause(error)
    return f"{type(cause).__name__}: {first_line(str(cause))}"


def _cause(error: Exception) -> Exception:
    """What the backend raised, under Dynamo's own wrapping."""
    return getattr(error, "inner_exception", None) or error
