"""Warm-up compiles every mode ahead, and leaves nothing behind but compiled code."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from torch import nn
from toys import Stack

import torchrig


class Block(nn.Module):
    """Batch norm, dropout, a counter buffer, and attributes that a forward changes."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return torch.relu(self.norm(self.drop(self.linear(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.seen, self.count = [], 0
        self.table = torch.zeros(1)

    def forward(self, x, scale=1.0):
        self.seen.append(x)
        self.count += 1
        self.table += random.random() + numpy.random.rand()
        x = self.first(x) * scale
        for layer in self.layers:
            x = layer(x)
        return x


def everything(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(before, model):
    now = model.state_dict()
    return all(torch.equal(value, now[name]) for name, value in before.items())


@pytest.fixture
def x():
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_it_leaves_the_model_bit_for_bit_as_it_was(backend, x):
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    torchrig.prepare(model, optimizer, backend=backend)
    model(x).sum().backward()
    optimizer.step()
    model.layers[1].eval()
    model.first.weight.grad = None
    before, gradients = everything(model), [parameter.grad for parameter in model.parameters()]
    values = [None if each is None else each.clone() for each in gradients]
    state = {key: {name: torch.clone(value) for name, value in own.items()} for key, own in optimizer.state.items()}
    seen, table = list(model.seen), model.table.clone()
    randoms = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()

    torchrig.warmup(model, x)

    assert same(before, model)
    for parameter, gradient, value in zip(model.parameters(), gradients, values, strict=True):
        assert parameter.grad is gradient
        assert gradient is None or torch.equal(gradient, value)
    assert all(
        torch.equal(value, optimizer.state[key][name]) for key, own in state.items() for name, value in own.items()
    )
    assert [module.training for module in model.layers] == [True, False, True]
    assert model.count == 1 and len(model.seen) == len(seen) == 1 and torch.equal(model.table, table)
    assert torch.equal(torch.get_rng_state(), randoms[0])
    assert random.getstate() == randoms[1] and (numpy.random.get_state()[1] == randoms[2]).all()


def test_training_after_it_is_the_training_without_it(x):
    def losses(warm):
        torch.manual_seed(0)
        model = torchrig.prepare(Model(), backend="aot_eager")
        if warm:
            torchrig.warmup(model, x)
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(3):
            loss = model(x).pow(2).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    assert losses(True) == losses(False)


def test_the_loop_after_it_compiles_nothing_more(x):
    model = torchrig.prepare(Stack(), backend="aot_eager")
    report = torchrig.warmup(model, x)
    assert report["Block"].modes == {"train": 1, "eval, no_grad": 1} and report.ok
    model(x).sum().backward()
    model.eval()
    with torch.no_grad():
        model(x)
    assert torchrig.report(model)["Block"].graphs == 2


@pytest.mark.parametrize("modes", ["train", ("train",), iter(["train", "train"])], ids=str)
def test_one_mode_alone(modes, x):
    model = torchrig.prepare(Stack(), backend="eager")
    assert torchrig.warmup(model, x, modes=modes)["Block"].modes == {"train": 1}


def test_the_example_is_given_as_the_loop_gives_it_and_is_not_written_into():
    class Writing(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, batch, *, factor):
            batch["x"].mul_(factor)
            return {"loss": self.linear(batch["x"]).sum(), "logits": batch["x"]}

    model = torchrig.prepare(Writing(), backend="eager")
    batch = {"x": torch.ones(2, 4), "name": "a"}
    torchrig.warmup(model, batch, factor=3)
    assert torch.equal(batch["x"], torch.ones(2, 4)) and torchrig.report(model).graphs == 2


def test_an_optimizer_that_steps_in_the_backward_does_not(x):
    model = Stack()
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=1.0)

        def step(_, own=optimizer):
            own.step()

        parameter.register_post_accumulate_grad_hook(step)
    torchrig.prepare(model, backend="eager")
    before = everything(model)
    torchrig.warmup(model, x)
    assert same(before, model)
    model(x).sum().backward()
    assert not same(before, model)


def test_a_model_that_raises_is_left_as_it_was(x):
    class Raising(Stack):
        def forward(self, x):
            self.first.weight.data  # noqa: B018
            super().forward(x).sum().backward()
            raise KeyError("from the user's forward")

    model = torchrig.prepare(Raising(), backend="eager").eval()
    before, state = everything(model), torch.get_rng_state()
    with pytest.raises(KeyError, match="from the user's forward"):
        torchrig.warmup(model, x)
    assert same(before, model) and not model.training and torch.equal(state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_cannot_be_warmed_up_is_refused(x):
    with pytest.raises(torchrig.ArgumentError, match="warmup takes the model"):
        torchrig.warmup((Stack(),), x)
    with pytest.raises(torchrig.TorchrigError, match="not prepared"):
        torchrig.warmup(Stack(), x)
    model = torchrig.prepare(Stack(), backend="eager")
    with pytest.raises(torchrig.ArgumentError, match="'test'"):
        torchrig.warmup(model, x, modes=("train", "test"))
    assert torchrig.report(model).graphs == 0


def test_where_nothing_is_compiled_nothing_runs():
    model = torchrig.prepare(Stack())
    assert torchrig.warmup(model, "no tensor at all").kinds == ()


def test_loss_scaling_is_as_before(x):
    from torchrig.precision import scaling_of

    model = torchrig.prepare(Stack(), backend="eager", mixed_precision="fp16")
    before = scaling_of(model).state_dict()
    torchrig.warmup(model, x)
    assert scaling_of(model).state_dict() == before


def test_plain_lines_where_nobody_watches_and_none_when_quiet(x, capsys, monkeypatch):
    torchrig.warmup(torchrig.prepare(Stack(), backend="eager"), x)
    told = capsys.readouterr().err.splitlines()
    assert [line.rpartition(",")[0] for line in told] == [
        "warm-up, train: Block x3: 1 graph",
        "warm-up, eval: Block x3: 2 graphs",
    ]
    monkeypatch.setenv("TORCHRIG_QUIET", "1")
    torchrig.warmup(torchrig.prepare(Stack(), backend="eager"), x)
    assert capsys.readouterr().err == ""


def test_a_bar_for_each_kind_on_a_terminal(x, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    torchrig.warmup(torchrig.prepare(Stack(), backend="eager"), x)
    told = capsys.readouterr().err
    assert "Block x3" in told and "2 graphs" in told and "warm-up" not in told


def test_problems_come_out_in_the_warm_up_already(x):
    class Breaking(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            x = self.linear(x)
            torch._dynamo.graph_break()
            return self.linear(x)

    model = torchrig.prepare(Stack(Breaking), backend="eager", on_problem={"graph_break": "raise"})
    with pytest.raises(torchrig.GraphBreak):
        torchrig.warmup(model, x)


def test_inference_mode_is_a_mode_of_its_own(x):
    model = torchrig.prepare(Stack(), backend="eager")
    assert torchrig.warmup(model, x, modes=("train", "eval", "inference")).ok
    graphs = torchrig.report(model).graphs
    model.eval()
    with torch.inference_mode():
        model(x)
    assert torchrig.report(model).graphs == graphs


def test_parts_in_a_mode_of_their_own_are_warmed_up_in_it(x):
    model = torchrig.prepare(Model(), backend="eager")
    model.layers[1].norm.eval()
    for modes in (("train", "eval"), ("eval", "train")):
        torchrig.warmup(model, x, modes=modes)
    graphs = torchrig.report(model).graphs
    model(x).sum().backward()
    assert torchrig.report(model).graphs == graphs and not model.layers[1].norm.training


def test_a_warm_up_inside_inference_mode_compiles_for_training_too(x):
    model = torchrig.prepare(Stack(), backend="eager")
    with torch.inference_mode():
        torchrig.warmup(model, x, modes="train")
    model(x).sum().backward()
    assert torchrig.report(model).graphs == 1


class Odd(nn.Module):
    """Writes into parameters, and into what stands in plain attributes, however deep."""

    def __init__(self):
        super().__init__()
        self.block = nn.Linear(4, 4)
        self.average = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("wide", torch.zeros(1).expand(8))
        with torch.inference_mode():
            self.register_buffer("inferred", torch.zeros(2))
        self.kept = {"averages": [torch.zeros(4)], "log": {"losses": []}}
        self.hidden = [nn.BatchNorm1d(4)]
        self.array, self.generator, self.random = numpy.zeros(3), torch.Generator(), random.Random(0)
        self.numpys = numpy.random.default_rng(0)

    def forward(self, x):
        with torch.no_grad():
            self.block.weight.clamp_(-0.01, 0.01)
            self.average.weight.lerp_(self.block.weight, 0.5)
            self.kept["averages"][0].add_(1)
        self.kept["log"]["losses"].append(float(torch.rand((), generator=self.generator)) + self.random.random())
        self.array += self.numpys.random()
        return self.hidden[0](self.block(x))


def test_what_a_forward_writes_anywhere_comes_back(x):
    model = torchrig.prepare(Odd(), backend="eager", regions="whole", on_problem="ignore")
    hidden = {name: value.clone() for name, value in model.hidden[0].state_dict().items()}
    before, states = everything(model), (model.generator.get_state(), model.random.getstate())
    bits = model.numpys.bit_generator.state
    torchrig.warmup(model, x)
    assert same(before, model)
    assert all(torch.equal(value, model.hidden[0].state_dict()[name]) for name, value in hidden.items())
    assert not model.kept["averages"][0].any() and model.kept["log"]["losses"] == [] and not model.array.any()
    assert torch.equal(model.generator.get_state(), states[0]) and model.random.getstate() == states[1]
    assert model.numpys.bit_generator.state == bits


def test_a_backward_that_is_pending_still_works(x):
    class Keeping(Stack):
        def forward(self, x):
            self.last = super().forward(x)
            return self.last

    model = torchrig.prepare(Keeping(), backend="eager")
    loss = model(x).square().sum()
    torchrig.warmup(model, x)
    loss.backward()
    assert model.first.weight.grad is not None
