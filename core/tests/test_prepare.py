"""prepare gives back what it was given, made ready, and refuses to be called twice with different wishes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchrig


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def squared(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def test_everything_comes_back_in_the_order_given() -> None:
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(TensorDataset(torch.ones(4, 4)))
    given = (model, squared, optimizer, loader, scheduler, nn.MSELoss())
    assert torchrig.prepare(*given, backend="eager") == given
    assert torchrig.prepare(model, backend="eager") is model


def test_two_models_are_both_prepared_with_the_optimizers_they_own() -> None:
    generator, critic = Stack(), Stack()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (generator, critic)]
    got = torchrig.prepare(generator, critic, *optimizers, backend="eager")
    assert got == (generator, critic, *optimizers)
    critic(generator(torch.ones(2, 4))).sum().backward()
    for each in (generator, critic):
        assert torchrig.report(each).ok and torchrig.report(each)["Block"].calls == 3


def test_again_with_the_same_settings_is_no_work() -> None:
    model = Stack()
    torchrig.prepare(model, backend="eager")
    forward = vars(model.layers[0])["forward"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert torchrig.prepare(model, optimizer, backend="eager") == (model, optimizer)
    assert vars(model.layers[0])["forward"] is forward


def test_again_with_other_settings_is_refused_naming_them() -> None:
    model = torchrig.prepare(Stack(), backend="eager")
    with pytest.raises(torchrig.AlreadyPreparedError, match=r"fullgraph was False and is True.*keep_compile=False"):
        torchrig.prepare(model, backend="eager", fullgraph=True)
    torchrig.prepare(torchrig.unwrap(model, keep_compile=False), backend="eager", fullgraph=True)


def test_a_wrapped_model_given_again_is_no_work() -> None:
    model = Stack()
    settings = {"backend": "eager", "regions": "whole", "placement": "wrap"}
    wrapped = torchrig.prepare(model, **settings)
    assert wrapped is not model
    assert torchrig.prepare(wrapped, **settings) is wrapped
    assert torchrig.prepare(model, **settings) is wrapped
    assert torchrig.unwrap(wrapped) is model


def test_a_model_is_moved_with_its_optimizers_state_and_its_batches() -> None:
    model = Stack()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    loader = DataLoader(TensorDataset(torch.ones(4, 4)), batch_size=2)
    model, optimizer, loader = torchrig.prepare(model, optimizer, loader, device="meta")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert owned == {id(parameter) for parameter in model.parameters()}
    assert {state["exp_avg"].device.type for state in optimizer.state.values()} == {"meta"}
    assert [batch.device.type for (batch,) in loader] == ["meta", "meta"]


def test_tied_parameters_stay_tied_when_moved() -> None:
    model = Stack()
    model.layers[2].linear.weight = model.first.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torchrig.prepare(model, optimizer, device="meta")
    assert model.layers[2].linear.weight is model.first.weight
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))


def test_a_mode_for_a_backend_that_has_none_is_refused_even_where_nothing_is_compiled() -> None:
    with pytest.raises(torchrig.SettingsError, match=r"'no' takes no mode.*argument"):
        torchrig.prepare(Stack(), mode="max-autotune")


def test_a_failed_move_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    parameters = list(model.parameters())

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("torchrig.precision.apply", fail)
    with pytest.raises(ZeroDivisionError):
        torchrig.prepare(model, optimizer, device="meta", backend="eager")
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    torch.testing.assert_close(model.state_dict(), before)
    torch.testing.assert_close(optimizer.state_dict()["state"], state["state"])
    assert not torchrig.has_compiled_regions(model)


def test_compile_regions_on_its_own() -> None:
    model = Stack().bfloat16()
    assert torchrig.compile_regions(model, backend="aot_eager", fullgraph=True) is model
    assert model(torch.ones(2, 4, dtype=torch.bfloat16)).dtype is torch.bfloat16
    assert torchrig.report(model).graphs == 1
    assert all(torchrig.is_compiled(layer) for layer in model.layers)
    assert not torchrig.is_compiled(model.first)


def test_is_compiled_knows_every_way() -> None:
    bare = Stack()
    assert not torchrig.is_compiled(bare)
    assert torchrig.is_compiled(torch.compile(Stack(), backend="eager"))
    in_place = Stack()
    in_place.compile(backend="eager")
    assert torchrig.is_compiled(in_place)
    for placement in ("forward", "inplace", "wrap"):
        whole = torchrig.prepare(Stack(), backend="eager", regions="whole", placement=placement)
        assert torchrig.is_compiled(whole)
        parts = torchrig.prepare(Stack(), backend="eager", placement=placement)
        assert not torchrig.is_compiled(parts) and torchrig.has_compiled_regions(parts)


def test_bf16_runs_in_bf16_and_gives_float32_back() -> None:
    seen = []
    model = Stack()
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model = torchrig.prepare(model, backend="eager", mixed_precision="bf16")
    output = model(torch.ones(2, 4))
    assert output.dtype is torch.float32 and set(seen) == {torch.bfloat16}
    assert torchrig.report(model).graphs == 1
    assert torchrig.unwrap(model, keep_compile=False) is model and "forward" not in vars(model)
