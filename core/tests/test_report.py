"""What is told of compiled regions: counts, breaks, recompiles, fall-backs, and what the settings make of each."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from toys import Block, Stack

import torchrig


class Breaks(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        torch._dynamo.graph_break()
        return x + 1


class BreaksFirst(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return self.linear(x)


class BreaksInLoop(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.linear(x)
            if x.sum() > 0:
                x = x + 1
        return x


class Varies(Block):
    """For one test alone: PyTorch remembers for each function of the process which of its dimensions varied."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x)) * 2


class Waiting(Stack):
    """Never calls its blocks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.ones(2, 4)


def prepare(model: nn.Module, **settings: Any) -> Any:
    return torchrig.prepare(model, **{"backend": "eager", **settings})


def test_a_report_counts_graphs_calls_and_seconds(x: torch.Tensor) -> None:
    model = prepare(Stack())
    assert (torchrig.report(model).graphs, torchrig.report(model).ok) == (0, False)
    model(x)
    model(x)
    report = torchrig.report(model)
    kind = report["Block"]
    assert (kind.instances, kind.graphs, kind.calls, kind.modes, kind.compiled) == (3, 1, 6, {"train": 1}, True)
    assert kind.compile_seconds > 0 and (report.graphs, report.recompiles, report.breaks, report.ok) == (1, 0, 0, True)
    assert report.backend == "eager" and report.strategy == "single"
    assert "Block" in str(report) and "yes" in str(report) and "\x1b" not in str(report)
    told = json.loads(report.to_json())
    assert told["graphs"] == 1 and told["ok"] is True and told["kinds"][0]["compiled"] is True


def test_a_model_that_is_not_prepared_has_no_report() -> None:
    with pytest.raises(torchrig.TorchrigError, match="not prepared"):
        torchrig.report(Stack())


def test_a_report_of_a_copy_is_that_of_the_shared_code(x: torch.Tensor) -> None:
    model = prepare(Stack())
    model(x)
    copied = copy.deepcopy(model)
    copied(x)
    assert torchrig.report(copied)["Block"].calls == torchrig.report(model)["Block"].calls == 6


def test_no_backend_reports_that_nothing_is_compiled(x: torch.Tensor) -> None:
    model = prepare(Stack(), backend="no")
    model(x)
    report = torchrig.report(model)
    assert not report.kinds and report.ok and "nothing is compiled" in str(report)


@pytest.mark.parametrize("block", [Breaks, BreaksFirst])
def test_a_break_is_warned_about_once_and_reported(block: type[Block], x: torch.Tensor) -> None:
    model = prepare(Stack(block))
    with pytest.warns(torchrig.CompileProblemWarning, match=f"GraphBreak: Region {block.__name__} breaks at") as caught:
        model(x)
        model(x)
    assert len(caught) == 1
    report = torchrig.report(model)
    (found,) = report[block.__name__].breaks
    assert found.where.startswith(f"{__file__}:") and "graph_break" in found.reason
    assert not report.ok and report.breaks == 1 and found.where in str(report)


def test_a_region_that_falls_back_whole_says_so(x: torch.Tensor) -> None:
    model = prepare(Stack(BreaksInLoop), on_problem="ignore")
    torch.testing.assert_close(model(x), torchrig.unwrap(copy.deepcopy(model), keep_compile=False)(x))
    kind = torchrig.report(model)["BreaksInLoop"]
    assert not kind.compiled and len(kind.breaks) == 1 and "runs eager" in kind.fallbacks[0]


@pytest.mark.parametrize("how", ["warn", "raise", "ignore"])
def test_a_region_that_builds_no_graph_is_never_silent_unless_asked(how: str, x: torch.Tensor) -> None:
    model = prepare(Waiting(), on_problem={"region_not_compiled": how})
    if how == "raise":
        with pytest.raises(torchrig.RegionNotCompiled, match="Block"):
            model(x)
    elif how == "warn":
        with pytest.warns(
            torchrig.CompileProblemWarning, match=r"RegionNotCompiled: Region Block \(layers.0, layers.1"
        ):
            model(x)
    model(x)
    assert not torchrig.report(model).ok


def test_a_break_raises_where_the_settings_say_so(x: torch.Tensor) -> None:
    with pytest.raises(torchrig.GraphBreak, match=__file__):
        prepare(Stack(Breaks), on_problem="raise")(x)
    with pytest.raises(torchrig.GraphBreak, match="fullgraph=True"):
        prepare(Stack(Breaks), fullgraph=True)(x)


def failing(graph: Any, example_inputs: Any) -> Any:
    raise ZeroDivisionError("no such kernel")


def test_a_failing_backend_raises_naming_region_and_backend(x: torch.Tensor) -> None:
    model = prepare(Stack(), backend=failing)
    with pytest.raises(torchrig.RegionCompileError, match=r"'failing'.*Block.*no such kernel") as caught:
        model(x)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("placement", ["forward", "inplace", "wrap"])
def test_a_failing_backend_runs_eager_where_asked_and_trains_on(placement: str, x: torch.Tensor) -> None:
    bare = Stack()
    model = prepare(copy.deepcopy(bare), backend=failing, on_failure="eager", placement=placement)
    with pytest.warns(torchrig.CompileProblemWarning, match=r"Region Block runs eager.*no such kernel") as caught:
        model(x).sum().backward()
        model(x).sum().backward()
    assert len(caught) == 1
    for _ in range(2):
        bare(x).sum().backward()
    torch.testing.assert_close(model.first.weight.grad, bare.first.weight.grad)
    kind = torchrig.report(model)["Block"]
    assert not kind.compiled and kind.graphs == 0 and "no such kernel" in kind.fallbacks[0]


@pytest.mark.parametrize("placement", ["forward", "inplace", "wrap"])
def test_a_break_under_fullgraph_runs_eager_where_asked(placement: str, x: torch.Tensor) -> None:
    model = Stack(Breaks)
    expected = model(x)
    prepare(model, fullgraph=True, on_failure="eager", placement=placement)
    with pytest.warns(torchrig.CompileProblemWarning, match=r"on_failure='eager'.*fullgraph=True"):
        torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(model(x), expected)
    kind = torchrig.report(model)["Breaks"]
    assert not kind.compiled and "fullgraph" in kind.fallbacks[0]


def test_an_error_of_the_models_own_stays_what_it_is() -> None:
    model = prepare(Stack(), on_failure="eager", on_problem="ignore")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(2, 3))


@pytest.mark.parametrize("how", ["warn", "raise"])
def test_case_16_nine_static_shapes_reach_the_limit_naming_region_and_guard(how: str) -> None:
    model = prepare(Stack(), dynamic=False, on_problem={"recompile_limit": how})

    def run() -> None:
        for size in range(2, 11):
            model(torch.ones(size, 4))

    with pytest.warns(torchrig.CompileProblemWarning) as caught:
        if how == "raise":
            with pytest.raises(torchrig.RecompileLimitReached, match=r"Block.*size mismatch"):
                run()
        else:
            run()
    assert "size mismatch" in str(caught[0].message) and "dynamic=True" in str(caught[0].message)
    assert len(caught) == (2 if how == "warn" else 1)
    report = torchrig.report(model)
    assert report.recompiles == 7 and "recompile limit" in report["Block"].fallbacks[0]


def test_case_16_the_limit_is_ignored_where_the_settings_say_so_and_still_reported() -> None:
    model = prepare(Stack(), dynamic=False, on_problem="ignore")
    for size in range(2, 11):
        model(torch.ones(size, 4))
    assert "recompile limit" in torchrig.report(model)["Block"].fallbacks[0]


def test_recompiles_are_told_with_their_guard() -> None:
    model = prepare(Stack(Varies))
    for size in (2, 3, 4, 5):
        model(torch.ones(size, 4))
    report = torchrig.report(model)
    (recompile,) = report["Varies"].recompiles
    assert "size mismatch" in recompile.guard and recompile.mode == "train" and "dynamic=True" in recompile.hint
    assert report.graphs == 2 and report.ok


def test_one_backend_object_serves_every_block() -> None:
    seen: list[int] = []

    def counting(graph: Any, example_inputs: Any) -> Any:
        seen.append(len(example_inputs))
        return graph.forward

    model = prepare(Stack(), backend=counting)
    model(torch.ones(2, 4))
    assert len(seen) == 1


def test_two_models_of_one_class_are_counted_apart(x: torch.Tensor) -> None:
    one, other = prepare(Stack()), prepare(Stack())
    one(x)
    one(x)
    other(x)
    assert torchrig.report(one)["Block"].calls == 6
    assert torchrig.report(other)["Block"].calls == 3
