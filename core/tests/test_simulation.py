"""A run on many processes, reckoned on one; what fsdp2 reckons is compared with real processes in its own tests."""

from __future__ import annotations

import json
import re

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import nn
from toys import Stack

import torchrig
from torchrig import ArgumentError, SettingsError, StrategyError, StrategyUnavailable
from torchrig.cli import main
from torchrig.simulation import simulate

ELEMENTS = 4 * (4 * 4 + 4)  # of a Stack: four linear layers


class Frozen(Stack):
    """A stack with a layer that is not trained, and a buffer."""

    def __init__(self):
        super().__init__()
        self.first.requires_grad_(False)
        self.register_buffer("table", torch.zeros(100, dtype=torch.int64))


@pytest.mark.parametrize(
    ("strategy", "processes", "reduced", "workspace"),
    [("single", 1, 0, 0), ("ddp", 1, 0, 240), ("ddp", 8, 240, 240)],
)
def test_what_is_kept_whole(strategy, processes, reduced, workspace):
    simulated = simulate(Frozen(), processes, strategy=strategy)
    assert (simulated.parameters, simulated.gradients, simulated.buffers) == (320, 240, 800)
    assert simulated.optimizer_state == 2 * 240 + 6 * 4  # two moments, and a step counter for each parameter
    assert (simulated.gathered, simulated.reduced, simulated.workspace) == (0, reduced, workspace)
    assert simulated.kept == 320 + 240 + 504 + 800 + workspace


def test_settings_are_heard_and_auto_is_what_so_many_processes_take():
    assert simulate(Stack(), 4, ddp={"gradient_as_bucket_view": True}).workspace == 0
    assert simulate(Stack(), 4).plan.strategy == "ddp"
    assert simulate(Stack(), 1).plan.strategy == "single"


def test_it_is_what_a_real_step_makes():
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = sum(value.nbytes for each in optimizer.state.values() for value in each.values())
    simulated = simulate(model, 1, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    assert (simulated.optimizer, simulated.optimizer_state) == ("SGD", state)
    assert simulate(model, 1, optimizer="sgd").optimizer_state == 0
    assert simulated.parameters == sum(each.nbytes for each in model.parameters())


def test_nothing_is_changed_or_left_behind():
    model = Stack()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    simulate(model, 1000)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not dist.is_initialized()
    assert not torchrig.has_compiled_regions(model)


def test_a_huge_model_takes_no_memory():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1 << 16, 1 << 16, bias=False) for _ in range(10)))
    simulated = simulate(model, 8, strategy="ddp", backend="eager")
    assert simulated.parameters == 10 * (1 << 34)
    assert "parameters        160.00 GiB" in str(simulated)


def test_a_model_that_is_not_trained_has_no_optimizer():
    assert simulate(Stack().requires_grad_(False), 1).optimizer_state == 0


def test_what_cannot_be_reckoned_is_told(install):
    with pytest.raises(ArgumentError, match="simulate takes the model"):
        simulate({}, 4)
    with pytest.raises(ArgumentError, match="at least 1 process"):
        simulate(Stack(), 0)
    with pytest.raises(ArgumentError, match=r"'adamm' is no optimizer of torch\.optim\. It has: .*Adam, AdamW"):
        simulate(Stack(), 1, optimizer="adamm")
    with pytest.raises(ArgumentError, match="must return an optimizer, and returned 3"):
        simulate(Stack(), 1, optimizer=lambda parameters: 3)
    with pytest.raises(ArgumentError, match="LBFGS cannot step parameters without values"):
        simulate(Stack(), 1, optimizer="lbfgs")
    with pytest.raises(StrategyUnavailable, match="'single' is for one process, and there are 2"):
        simulate(Stack(), 2, strategy="single")
    with pytest.raises(SettingsError, match="backend"):
        simulate(Stack(), 2, backend="indctor")
    assert not dist.is_initialized()


def test_a_strategy_that_does_not_tell(install):
    source = """
from torchrig import StrategyInfo, Wrapped, hookimpl
@hookimpl
def describe():
    return StrategyInfo(name="silent", summary="a test's strategy")
@hookimpl
def wrap_strategy(model, optimizers, plan):
    return Wrapped(model, optimizers)
"""
    install("acme", {"silent": "acme_silent"}, {"acme_silent": source}, group="torchrig.strategies")
    with pytest.raises(StrategyError, match="Strategy 'silent' does not tell what a process keeps"):
        simulate(Stack(), 2, strategy="silent")
    assert not dist.is_initialized()


FACTORY = """
import torch
from torch import nn
def build():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1 << 15, 1 << 15), nn.ReLU()) for _ in range(100)))
    assert next(model.parameters()).is_meta
    return model
"""


@pytest.fixture
def call(tmp_path, monkeypatch):
    (tmp_path / "giant.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)

    def call(*arguments, code=0):
        done = CliRunner().invoke(main, ["plan", "giant:build", *arguments])
        assert done.exit_code == code, done.output
        return done.output

    return call


def test_the_command_shows_plan_and_simulation(call):
    shown = call("--world-size", "64", "--strategy", "ddp", "--backend", "eager")
    assert "Sequential x100" in shown
    assert "Sequential on 64 processes, ddp: what each of them has" in shown
    assert re.search(r"optimizer state +800\.02 GiB +AdamW, for its part", shown)
    told = json.loads(call("--world-size", "64", "--optimizer", "sgd", "--json"))
    assert (told["processes"], told["optimizer"], told["optimizer_state"]) == (64, "SGD", 0)
    assert told["plan"]["strategy"] == "ddp"
    assert told["units"][0]["kept"]["0.0.weight"] == [1 << 15, 1 << 15]
    assert told["kept"] == told["parameters"] + told["gradients"] + told["workspace"]


def test_the_command_tells_what_is_wrong(call):
    assert "is no optimizer of torch.optim" in call("--world-size", "2", "--optimizer", "x", code=1)
    assert "'single' is for one process" in call("--world-size", "2", "--strategy", "single", code=1)
    call("--world-size", "0", code=2)
