"""Each touch of PyTorch's private surface, so that a torch without it fails here first, and by name."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

from torchrig import dynamo


@dataclass
class Heard:
    """A listener that keeps what it hears, and runs eager what fails where asked."""

    conversions: list[dynamo.Conversion] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    go_on: bool = False

    def converted(self, conversion: dynamo.Conversion) -> None:
        self.conversions.append(conversion)

    def failed(self, conversion: dynamo.Conversion, error: Exception) -> bool:
        self.errors.append(error)
        return self.go_on


def counting(graph: Any, example_inputs: Any) -> Any:
    now = dynamo.current()
    assert now is not None
    now[1].graphs += 1
    found = dynamo.break_of(graph)
    if found is not None:
        now[1].breaks.append(found)
    return graph.forward


def watched(function: Any, heard: Heard, backend: Any = counting, **more: Any) -> Any:
    settings = {"fullgraph": False, "dynamic": None, **more}
    return dynamo.watched_context(heard, backend=backend, **settings)(function)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


def test_a_conversion_tells_function_line_mode_and_seconds() -> None:
    heard, module = Heard(), Plain()
    compiled = watched(Plain.forward, heard)
    compiled(module, torch.ones(2, 4))
    module.eval()
    with torch.no_grad():
        compiled(module, torch.ones(2, 4))
    train, evaluation = heard.conversions
    assert (train.function, train.mode, train.graphs) == ("forward", "train", 1)
    assert train.where.startswith(__file__) and train.seconds > 0 and train.recompile_reason is None
    assert evaluation.mode == "eval, no_grad" and "grad_mode" in (evaluation.recompile_reason or "")


def test_a_compiled_call_is_not_heard_again() -> None:
    heard = Heard()
    compiled = watched(Plain.forward, heard)
    for _ in range(3):
        compiled(Plain(), torch.ones(2, 4))
    assert len(heard.conversions) == 1


class Breaks(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        torch._dynamo.graph_break()
        return x + 1


class BreaksFirst(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return self.linear(x)


class BreaksInLoop(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.linear(x)
            if x.sum() > 0:
                x = x + 1
        return x


def test_a_break_after_a_graph_has_its_line_and_reason() -> None:
    heard = Heard()
    watched(Breaks.forward, heard)(Breaks(), torch.ones(2, 4))
    first, resumed = heard.conversions
    (found,) = first.breaks
    assert found.where.startswith(f"{__file__}:") and "graph_break" in found.reason
    assert resumed.resumed and resumed.function == "forward" and resumed.where == found.where


def test_a_break_before_any_graph_shows_as_a_restart() -> None:
    heard = Heard()
    watched(BreaksFirst.forward, heard)(BreaksFirst(), torch.ones(2, 4))
    first, resumed = heard.conversions
    assert first.graphs == 0 and "graph_break" in first.restarts[0]
    assert resumed.graphs == 1


def test_a_frame_that_is_not_compiled_says_why_and_where() -> None:
    heard = Heard()
    watched(BreaksInLoop.forward, heard)(BreaksInLoop(), torch.ones(2, 4))
    first = heard.conversions[0]
    assert first.graphs == 0 and "Data-dependent branching" in (first.skip_reason or "")
    assert first.breaks[0].where.startswith(f"{__file__}:")


def failing(graph: Any, example_inputs: Any) -> Any:
    raise ZeroDivisionError("no such kernel")


@pytest.mark.parametrize("go_on", [False, True])
def test_a_failing_backend_is_told_and_may_run_eager(go_on: bool) -> None:
    heard, module, x = Heard(go_on=go_on), Plain(), torch.ones(2, 4)
    compiled = watched(Plain.forward, heard, failing)
    if go_on:
        torch.testing.assert_close(compiled(module, x), module(x))
        torch.testing.assert_close(compiled(module, x), module(x))
    else:
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
            compiled(module, x)
    assert [dynamo.family_of(error) for error in heard.errors] == ["backend"]


def test_a_break_under_fullgraph_is_a_break() -> None:
    heard = Heard()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        watched(Breaks.forward, heard, fullgraph=True)(Breaks(), torch.ones(2, 4))
    assert [dynamo.family_of(error) for error in heard.errors] == ["break"]


def test_the_recompile_limit_is_told() -> None:
    heard = Heard()
    compiled = watched(Plain.forward, heard, dynamic=False)
    for size in range(2, 2 + dynamo.recompile_limit() + 1):
        compiled(Plain(), torch.ones(size, 4))
    assert [each.limit_reached for each in heard.conversions[-2:]] == [False, True]
    assert "size mismatch" in (heard.conversions[-1].recompile_reason or "")


def test_the_recompile_limit_under_fullgraph_is_told() -> None:
    heard = Heard()
    compiled = watched(Plain.forward, heard, dynamic=False, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        for size in range(2, 2 + dynamo.recompile_limit() + 1):
            compiled(Plain(), torch.ones(size, 4))
    assert [dynamo.family_of(error) for error in heard.errors] == ["limit"]


def test_two_contexts_on_one_function_count_their_recompiles_apart() -> None:
    for heard in (Heard(), Heard()):
        compiled = watched(Plain.forward, heard, dynamic=False)
        for size in range(2, 2 + dynamo.recompile_limit()):
            compiled(Plain(), torch.ones(size, 4))
        assert not any(each.limit_reached for each in heard.conversions)


def values_of(flags: Iterable[dynamo.Flag]) -> dict[str, Any]:
    return {flag.name: getattr(flag.config, flag.name) for flag in flags if hasattr(flag.config, flag.name)}


@pytest.mark.parametrize("training", [True, False])
def test_the_flags_hold_while_a_frame_is_traced_and_only_then(training: bool) -> None:
    seen: list[dict[str, Any]] = []

    def looking(graph: Any, example_inputs: Any) -> Any:
        seen.append(values_of(dynamo.FLAGS))
        return graph.forward

    before = values_of(dynamo.FLAGS)
    watched(Plain.forward, Heard(), looking)(Plain().train(training), torch.ones(2, 4))
    wanted = {flag.name: flag.value for flag in dynamo.FLAGS if flag.name in before and (training or not flag.training)}
    assert seen == [{**before, **wanted}] and seen != [before]
    assert values_of(dynamo.FLAGS) == before


def test_every_flag_has_a_reason_and_is_one_of_this_torch() -> None:
    assert all(flag.reason for flag in dynamo.FLAGS)
    assert set(values_of(dynamo.FLAGS)) == {flag.name for flag in dynamo.FLAGS}


def test_a_dimension_that_varies_is_traced_dynamic_and_its_tensors_are_left_unmarked() -> None:
    heard, x = Heard(), torch.ones(8, 4)
    compiled = watched(Plain.forward, heard, varies=lambda size: size == 8)
    for each in (x, torch.ones(7, 4), torch.ones(3, 4)):
        compiled(Plain(), each)
    assert len(heard.conversions) == 1
    assert not vars(x)


def test_what_the_user_marked_stays_marked() -> None:
    heard, x = Heard(), torch.ones(8, 4)
    torch._dynamo.maybe_mark_dynamic(x, 0)
    marks = dict(vars(x))
    watched(Plain.forward, heard, varies=lambda size: True)(Plain(), x)
    assert vars(x) == marks


def test_the_guard_told_is_one_of_the_same_mode() -> None:
    heard = Heard()
    compiled = watched(Plain.forward, heard, dynamic=False)
    module = Plain()
    compiled(module, torch.ones(8, 4))
    with torch.no_grad():
        compiled(module, torch.ones(8, 4))
    compiled(module, torch.ones(7, 4))
    reason = heard.conversions[-1].recompile_reason
    assert reason is not None and reason.startswith("tensor 'x' size mismatch at index 0. expected 8, actual 7")


def test_a_configured_backend_is_what_torch_compile_would_call() -> None:
    heard: list[dict[str, Any]] = []

    def taking(graph: Any, example_inputs: Any, **more: Any) -> Any:
        heard.append(more)
        return graph.forward

    options = {"width": 3}
    backend = dynamo.configured_backend({"backend": taking, "options": options})
    torch.compile(Plain(), backend=backend)(torch.ones(2, 4))
    assert heard == [{"options": {"width": 3}}] and options == {"width": 3}


def test_a_wrapped_region_keeps_its_keys_and_its_module_unmarked() -> None:
    module = Plain()
    before = set(vars(module))
    wrapped = dynamo.wrap(dynamo.watched_context(Heard(), backend=counting, fullgraph=True, dynamic=None), module)
    assert isinstance(wrapped, torch._dynamo.eval_frame.OptimizedModule) and wrapped._orig_mod is module
    assert set(vars(module)) == before
    assert list(wrapped.state_dict()) == list(module.state_dict())
    wrapped.load_state_dict(Plain().state_dict(), strict=True)
    nn.Sequential(wrapped).load_state_dict(nn.Sequential(Plain()).state_dict(), strict=True)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        wrapped.load_state_dict({**module.state_dict(), "other": torch.ones(1)})


def test_a_copy_of_a_wrapped_region_shares_its_graph() -> None:
    heard = Heard()
    wrapped = dynamo.wrap(dynamo.watched_context(heard, backend=counting, fullgraph=True, dynamic=None), Plain())
    wrapped(torch.ones(2, 4))
    copied = copy.deepcopy(wrapped)
    assert copied._orig_mod is not wrapped._orig_mod
    copied(torch.ones(2, 4))
    assert len(heard.conversions) == 1


def test_nothing_here_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        watched(Plain.forward, Heard())(Plain(), torch.ones(2, 4))


def test_what_the_doctor_asks_is_there() -> None:
    assert dynamo.unsupported() is None
    assert dynamo.switches() == {"disable": False, "suppress_errors": False}
    assert all(hasattr(torch._dynamo.config, name) for name in dynamo.switches())
