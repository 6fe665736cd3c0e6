"""What was compiled, counted while it happens.

One :class:`Observation` belongs to one prepared model. It holds the one backend object of that prepare, which counts
graphs and their runs, and a :class:`~torchrig.records.KindRecord` for each region kind, which Dynamo's conversions are
told to. Nothing here runs on a step that compiles nothing, save one addition for each run of a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from . import dynamo
from .hookspecs import Region
from .problems import Policy
from .records import KindRecord
from .shield import Shielded


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
        if found is not None and record.kwargs["fullgraph"]:
            record.give_up(found)
        if record.gave_up:
            return graph.forward  # type: ignore[no-any-return]
        try:
            compiled = self._inner(graph, example_inputs)
        except Exception as error:
            again = dynamo.is_control_flow(error) or (conversion.daring and dynamo.is_data_dependent(error))
            if again or self._policy.on_failure != "eager":
                raise
            # Giving the traced graph back, rather than refusing the frame, keeps Dynamo from trying each inner frame.
            record.backend_failed(error)
            return graph.forward  # type: ignore[no-any-return]
        conversion.graphs += 1
        if self._policy.on_failure == "eager" and not any(True for _ in graph.parameters()):
            compiled = Shielded(compiled, graph.forward, record.backend_failed)
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


def _counting_for(record: KindRecord, backend: ObservedBackend) -> Callable[..., Any]:
    def compile_graph(graph: Any, example_inputs: Any) -> Callable[..., Any]:
        conversion = dynamo.unwatched(record.region.kind)
        with dynamo.attributed(record, conversion):
            compiled = backend(graph, example_inputs)
        record.converted(conversion)
        return compiled

    return compile_graph


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
        regions: The region kinds of the model.
        besides: What is compiled besides it.
    """

    def __init__(
        self,
        backend: ObservedBackend,
        policy: Policy,
        kwargs: Mapping[str, Any],
        regions: Iterable[Region],
        besides: Iterable[Region] = (),
    ) -> None:
        self.backend = backend
        self._backends: dict[str, Callable[..., Any]] = {}
        self.records = {region.kind: KindRecord(region, policy, kwargs) for region in regions}
        self.besides = {region.kind: KindRecord(region, policy, kwargs) for region in besides}

    def record(self, region: Region) -> KindRecord:
        """The record of a region kind."""
        return self.records.get(region.kind) or self.besides[region.kind]

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
        if region.kind not in self._backends:
            self._backends[region.kind] = _counting_for(self.record(region), self.backend)
        return self._backends[region.kind]

    def check_compiled(self) -> None:
        """Report each region of the model for which no graph was built."""
        for record in self.records.values():
            record.check_compiled()
