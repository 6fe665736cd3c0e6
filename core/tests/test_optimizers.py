"""Optimizers own the live parameters, with their state."""

from __future__ import annotations

import collections
import copy

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from torchrig.errors import StrategyError
from torchrig.optimizers import owns_any, parameters_by_name, rebind

META = torch.device("meta")

MAKES = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "fused": lambda parameters: torch.optim.Adam(parameters, lr=0.1, fused=True),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3),
}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4)
        self.third = nn.Linear(4, 4)
        self.third.weight = self.first.weight
        self.second.bias.requires_grad_(requires_grad=False)

    def forward(self, x):
        return self.third(torch.tanh(self.second(self.first(x))))


def tied():
    torch.manual_seed(0)
    return Tied()


def train(model, optimizer, steps):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 4, generator=generator)

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - x).pow(2).mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


def replace_parameters(model):
    """New Parameter objects of the same values, ties kept, as sharding makes them; by name."""
    made = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None:
                made.setdefault(id(old), (old, nn.Parameter(old.detach().clone(), requires_grad=old.requires_grad)))
                module._parameters[name] = made[id(old)][1]
    return parameters_by_name(model)


@pytest.mark.parametrize("name", MAKES)
def test_training_goes_on_as_if_nothing_had_been_replaced_case_22(name):
    model, reference = tied(), tied()
    optimizer, expected = MAKES[name](model.parameters()), MAKES[name](reference.parameters())
    train(model, optimizer, 2)
    train(reference, expected, 5)
    rebind(optimizer, parameters_by_name(model), replace_parameters(model))
    train(model, optimizer, 3)
    for key, value in reference.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key
    torch.testing.assert_close(optimizer.state_dict(), expected.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("name", MAKES)
def test_undo_is_exact(name):
    model = tied()
    optimizer = MAKES[name](model.parameters())
    train(model, optimizer, 2)
    groups = [(group, group["params"], list(group["params"])) for group in optimizer.param_groups]
    state = dict(optimizer.state)
    content = copy.deepcopy(optimizer.state_dict())
    undo = rebind(optimizer, parameters_by_name(model), replace_parameters(model))
    undo()
    for group, (same, its_list, parameters) in zip(optimizer.param_groups, groups, strict=True):
        assert group is same
        assert group["params"] is its_list
        assert all(left is right for left, right in zip(group["params"], parameters, strict=True))
    assert all(optimizer.state[key] is value for key, value in state.items())
    assert len(optimizer.state) == len(state)
    torch.testing.assert_close(optimizer.state_dict(), content, rtol=0, atol=0)


def test_the_state_stays_the_same_defaultdict():
    model = tied()
    optimizer = MAKES["adam"](model.parameters())
    train(model, optimizer, 1)
    state = optimizer.state
    rebind(optimizer, parameters_by_name(model), replace_parameters(model))
    assert optimizer.state is state
    assert isinstance(state, collections.defaultdict)
    assert optimizer.state[nn.Parameter(torch.ones(1))] == {}


def test_groups_keep_their_order_and_their_extra_keys():
    model = tied()
    optimizer = torch.optim.SGD(
        [
            {"params": [("second", model.second.weight)], "lr": 0.5, "tag": "a"},
            {"params": [("first", model.first.weight)]},
        ],
        lr=0.1,
    )
    rebind(optimizer, parameters_by_name(model), replace_parameters(model))
    assert optimizer.param_groups[0]["params"][0] is model.second.weight
    assert optimizer.param_groups[1]["params"][0] is model.first.weight
    assert optimizer.param_groups[0]["tag"] == "a"
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    assert [group["param_names"] for group in optimizer.param_groups] == [["second"], ["first"]]


def test_a_scheduler_built_before_still_drives_it():
    model = tied()
    optimizer = MAKES["sgd"](model.parameters())
    scheduler = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    rebind(optimizer, parameters_by_name(model), replace_parameters(model))
    train(model, optimizer, 1)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_parameters_of_another_model_are_left_alone_with_their_state():
    model, other = tied(), nn.Linear(4, 4)
    optimizer = MAKES["adam"]([*model.parameters(), *other.parameters()])
    train(nn.Sequential(model, other), optimizer, 1)
    kept = {parameter: optimizer.state[parameter] for parameter in other.parameters()}
    rebind(optimizer, parameters_by_name(model), replace_parameters(model))
    assert all(optimizer.state[parameter] is state for parameter, state in kept.items())
    stepped = {id(parameter) for parameter in optimizer.param_groups[0]["params"]}
    assert stepped == {id(parameter) for parameter in (*model.parameters(), *other.parameters())}


@pytest.mark.parametrize(("name", "counter"), [("adam", "cpu"), ("fused", "meta"), ("foreach", "cpu")])
def test_state_moves_with_its_parameter_and_counters_where_pytorch_wants_them(name, counter):
    model = tied()
    optimizer = MAKES[name](model.parameters())
    train(model, optimizer, 1)
    before = parameters_by_name(model)
    model.to(META)
    rebind(optimizer, before, parameters_by_name(model))
    assert {parameter.device for parameter in optimizer.param_groups[0]["params"]} == {META}
    assert len(optimizer.state) == 3  # all but the frozen one; the tied one once
    for state in optimizer.state.values():
        assert state["exp_avg"].device == META
        assert state["step"].device.type == counter


def test_state_in_lists_moves_too():
    model = tied()
    optimizer = MAKES["lbfgs"](model.parameters())
    train(model, optimizer, 3)
    before = parameters_by_name(model)
    model.to(META)
    rebind(optimizer, before, parameters_by_name(model))
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    assert state["old_dirs"]
    assert {each.device for each in (*state["old_dirs"], state["d"])} == {META}


def test_a_parameter_that_got_lost_is_an_error_and_nothing_is_changed():
    model = tied()
    optimizer = MAKES["adam"](model.parameters())
    train(model, optimizer, 1)
    before = parameters_by_name(model)
    parameters, state = list(optimizer.param_groups[0]["params"]), dict(optimizer.state)
    with pytest.raises(StrategyError, match=r"Adam steps parameter 'first\.weight'"):
        rebind(optimizer, before, {f"module.{name}": value for name, value in before.items()})
    assert all(left is right for left, right in zip(optimizer.param_groups[0]["params"], parameters, strict=True))
    assert dict(optimizer.state) == state


def test_owning_is_by_identity():
    model = tied()
    optimizer = MAKES["sgd"]([model.third.weight])
    assert owns_any(optimizer, model.first.parameters())  # tied
    assert not owns_any(optimizer, model.second.parameters())
    assert not owns_any(optimizer, copy.deepcopy(model).parameters())
