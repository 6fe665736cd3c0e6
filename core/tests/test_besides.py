"""Losses and optimizer steps, compiled beside the model and proved alike."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from toys import Stack

import torchrig

X, TARGETS = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4), torch.arange(6) % 4
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
}


@pytest.fixture
def models():
    torch.manual_seed(0)
    model = Stack().double()
    return model, copy.deepcopy(model)


def train(model, loss, optimizer, scheduler=None, steps=6):
    losses = []
    for _ in range(steps):
        value = loss(model(X), TARGETS)
        value.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def decay(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


@pytest.mark.parametrize("late", [False, True], ids=["scheduler before", "scheduler after"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_compiled_step_trains_as_eager_does_and_a_scheduler_costs_no_graph(models, make, late):
    eager, model = models
    optimizer = make(model.parameters())
    scheduler = None if late else decay(optimizer)
    model, optimizer = torchrig.prepare(model, optimizer, backend="aot_eager", compile_optimizer=True)
    found = train(model, cross_entropy, optimizer, scheduler or decay(optimizer))
    own = make(eager.parameters())
    torch.testing.assert_close(found, train(eager, cross_entropy, own, decay(own)), rtol=1e-5, atol=1e-5)
    assert optimizer.param_groups[0]["lr"] == own.param_groups[0]["lr"]
    report = torchrig.report(model)
    step = report[f"{type(optimizer).__name__}.step"]
    assert report.ok and step.graphs == (2 if step.kind == "SGD.step" else 1)  # SGD has no momentum at first


@pytest.mark.parametrize("loss", [cross_entropy, nn.CrossEntropyLoss()], ids=["function", "module"])
def test_a_compiled_loss(models, loss):
    eager, model = models
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, compiled = torchrig.prepare(model, optimizer, loss, backend="aot_eager", compile_loss=True)
    found = train(model, compiled, optimizer)
    assert found == train(eager, cross_entropy, torch.optim.SGD(eager.parameters(), lr=0.1))
    name = f"loss {getattr(loss, '__name__', type(loss).__name__)}"
    report = torchrig.report(model)
    assert report[name].graphs == 1 and report[name].calls == 6 and report.ok
    assert (compiled is loss) == isinstance(loss, nn.Module)


def test_without_the_settings_both_stay_as_they_are(models):
    _, model = models
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, given, loss = torchrig.prepare(model, optimizer, cross_entropy, backend="eager")
    assert loss is cross_entropy and "step" not in vars(given)


def test_a_ragged_loader_opens_the_loss_too(models):
    _, model = models
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, TARGETS), batch_size=4)
    model, loss, data = torchrig.prepare(model, cross_entropy, data, backend="aot_eager", compile_loss=True)
    for x, targets in data:
        loss(model(x), targets).backward()
    assert torchrig.report(model)["loss cross_entropy"].graphs == 1


def test_a_loss_that_is_not_compiled_is_reported(models):
    def loss(output, targets):
        return torch.compiler.disable(cross_entropy)(output, targets)

    _, model = models
    model, loss = torchrig.prepare(model, loss, backend="eager", compile_loss=True)
    output = model(X)
    with pytest.warns(torchrig.CompileProblemWarning, match="Region loss loss breaks at"):
        loss(output, TARGETS)
    assert not torchrig.report(model).ok


def test_a_closure_runs_the_step_as_it_is(models):
    optimizers = [torch.optim.LBFGS(each.parameters(), max_iter=3) for each in models]
    torchrig.prepare(models[1], optimizers[1], backend="eager", compile_optimizer=True, on_problem="ignore")
    losses = []
    for each, optimizer in zip(models, optimizers, strict=True):

        def closure(each=each, optimizer=optimizer):
            optimizer.zero_grad()
            loss = cross_entropy(each(X), TARGETS)
            loss.backward()
            return loss

        losses.append([optimizer.step(closure).item() for _ in range(2)])
    assert losses[0] == losses[1]
    assert "called with a closure" in torchrig.report(models[1])["LBFGS.step"].fallbacks[0]


def test_a_fused_optimizer_is_left_alone_and_the_plan_says_so(models):
    _, model = models
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    made = torchrig.plan(model, optimizer, backend="eager", compile_optimizer=True)
    assert made.notes == ("AdamW has fused=True: its step is one kernel already, and is not compiled.",)
    torchrig.prepare(model, optimizer, backend="eager", compile_optimizer=True)
    assert "step" not in vars(optimizer)


def test_two_alike_are_told_apart_and_the_plan_has_a_step_for_each(models):
    _, model = models
    parameters = list(model.parameters())
    optimizers = [torch.optim.SGD(parameters[:2], lr=0.1), torch.optim.SGD(parameters[2:], lr=0.1)]
    made = torchrig.plan(model, *optimizers, cross_entropy, backend="eager", compile_loss=True, compile_optimizer=True)
    targets = [(step.action, step.target) for step in made.steps if step.action.startswith("compile ")]
    assert targets == [
        ("compile loss", "loss cross_entropy"),
        ("compile optimizer", "SGD.step"),
        ("compile optimizer", "SGD 2.step"),
    ]


def test_asked_for_and_not_given_is_noted():
    made = torchrig.plan(Stack(), backend="eager", compile_loss=True, compile_optimizer=True)
    assert made.notes == (
        "compile_loss=True, and no loss was given.",
        "compile_optimizer=True, and no optimizer was given.",
    )


def test_a_prepare_that_fails_takes_it_off_again(models):
    class Static(nn.Module):
        @staticmethod
        def forward(x):
            return x

    _, model = models
    optimizer, loss, other = torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), Static()
    other.weight = nn.Parameter(torch.ones(1))
    given = {"backend": "eager", "compile_loss": True, "compile_optimizer": True, "placement": "forward"}
    with pytest.raises(torchrig.RegionError, match="no plain method"):
        torchrig.prepare(model, other, optimizer, loss, **given)
    assert "step" not in vars(optimizer) and "forward" not in vars(loss)


def test_a_step_that_the_user_replaced_is_kept(models):
    _, model = models
    optimizer, calls = torch.optim.SGD(model.parameters(), lr=0.1), []
    inner = optimizer.step

    def counted(closure=None):
        calls.append(closure)
        return inner(closure)

    optimizer.step = counted
    torchrig.prepare(model, optimizer, backend="eager", compile_optimizer=True)
    train(model, cross_entropy, optimizer, steps=2)
    assert len(calls) == 2 and torchrig.report(model)["SGD.step"].graphs >= 1


def test_hooks_around_the_step_run_each_time(models):
    _, model = models
    optimizer, seen = torch.optim.AdamW(model.parameters()), []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    torchrig.prepare(model, optimizer, backend="aot_eager", compile_optimizer=True, fullgraph=True)
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train(model, cross_entropy, optimizer, steps=2)
    assert seen == ["before", "after"] * 2 and torchrig.report(model).ok


def test_a_step_with_loss_scaling_is_still_skipped_on_overflow(models):
    _, model = models
    model = model.float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torchrig.prepare(model, optimizer, backend="eager", compile_optimizer=True, mixed_precision="fp16")
    before = [parameter.clone() for parameter in model.parameters()]
    model(X.float()).sum().mul(float("inf")).backward()
    optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_foreach_asked_for_steps_as_eager_does(models, make):
    losses = []
    for each, compiled in zip(models, (False, True), strict=True):
        optimizer = make(each.parameters(), lr=0.01, foreach=True)
        torchrig.prepare(each, optimizer, backend="aot_eager", compile_optimizer=compiled)
        losses.append(train(each, cross_entropy, optimizer, decay(optimizer), steps=3))
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
