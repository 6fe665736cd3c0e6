"""prepare gives back what it was given, made ready, and refuses to be called twice with different wishes."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from toys import Block, Stack

import torchrig


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


def test_a_model_given_twice_is_prepared_once() -> None:
    model = Stack()
    assert torchrig.prepare(model, model, backend="eager") == (model, model)
    model(torch.ones(2, 4))
    assert torchrig.report(model).ok and torchrig.report(model)["Block"].calls == 3


class Sharing(nn.Module):
    """Holds blocks that another model holds as well, and some of its own."""

    def __init__(self, shared: nn.ModuleList) -> None:
        super().__init__()
        self.shared = shared
        self.own = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.shared, *self.own):
            x = layer(x)
        return x


def test_two_models_that_share_blocks_compile_them_once() -> None:
    actor = Stack()
    critic = Sharing(actor.layers)
    torchrig.prepare(actor, critic, backend="eager", fullgraph=True)
    x = torch.ones(2, 4, requires_grad=True)
    actor(x)
    critic(x)
    assert torchrig.report(actor)["Block"].calls == 6
    report = torchrig.report(critic)
    assert report.ok and report.graphs == 2 and [kind.calls for kind in report.kinds] == [2, 6]


@pytest.mark.parametrize("first", ["part", "whole"])
def test_a_part_and_then_its_whole_or_the_reverse(first: str) -> None:
    model = Stack()
    part = nn.Sequential(*model.layers)
    for each in (part, model) if first == "part" else (model, part):
        torchrig.prepare(each, backend="eager")
    model(torch.ones(2, 4))
    assert torchrig.report(model).ok and torchrig.report(part)["Block"].calls == 3


def test_a_copy_of_a_prepared_model_may_be_prepared_with_the_same_settings() -> None:
    model = torchrig.prepare(Stack(), backend="eager")
    model(torch.ones(2, 4))
    copied = torchrig.prepare(copy.deepcopy(model), backend="eager")
    copied(torch.ones(2, 4))
    assert torchrig.report(copied).ok and torchrig.report(copied).graphs == 1
    with pytest.raises(torchrig.AlreadyPreparedError, match=r"Block.*'eager'.*keep_compile=False"):
        torchrig.prepare(copy.deepcopy(model), backend="aot_eager")


def test_a_loader_given_to_a_prepared_model_is_placed() -> None:
    model = torchrig.prepare(Stack(), device="meta")
    loader = DataLoader(TensorDataset(torch.ones(4, 4)))
    _, placed = torchrig.prepare(model, loader, device="meta")
    assert {batch.device.type for (batch,) in placed} == {"meta"}


def test_a_dropped_wrapper_is_made_anew() -> None:
    model, settings = Stack(), {"backend": "eager", "regions": "whole", "placement": "wrap"}
    torchrig.prepare(model, **settings)
    gc.collect()
    again = torchrig.prepare(model, **settings)
    assert again is not model and torchrig.unwrap(again) is model
    again(torch.ones(2, 4))
    assert torchrig.report(again).ok


@pytest.mark.parametrize("setting", [{"mixed_precision": "bf16"}, {"strategy": "single"}, {"device": "meta"}])
def test_compile_regions_refuses_what_goes_beyond_compiling(setting: dict[str, str]) -> None:
    with pytest.raises(torchrig.SettingsError, match=r"compile_regions does not take.*argument"):
        torchrig.compile_regions(Stack(), backend="eager", **setting)


def test_compile_regions_is_not_led_astray_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHRIG_TRANSFORMS", "float8")
    monkeypatch.setenv("TORCHRIG_MIXED_PRECISION", "bf16")
    model = torchrig.compile_regions(Stack(), backend="eager")
    model(torch.ones(2, 4))
    assert torchrig.report(model).ok


def test_an_undo_that_fails_hides_neither_the_error_nor_the_other_undos(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchrig import Wrapped
    from torchrig.strategies import single

    def undo() -> None:
        raise OSError("stuck")

    def wrap(model: nn.Module, optimizers: Any, plan: Any) -> Wrapped:
        return Wrapped(model, optimizers, undo)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(single, "wrap_strategy", torchrig.hookimpl(wrap))
    monkeypatch.setattr("torchrig.loaders.place", fail)
    model = Stack()
    with pytest.raises(ZeroDivisionError):
        torchrig.prepare(model, DataLoader(range(2)), backend="eager")
    assert not torchrig.has_compiled_regions(model)


@pytest.mark.parametrize("value", ["abc", "-2"])
def test_a_world_size_that_is_no_number_is_named(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", value)
    with pytest.raises(torchrig.SettingsError, match=f"WORLD_SIZE is '{value}'"):
        torchrig.prepare(Stack())
    monkeypatch.setenv("WORLD_SIZE", "")
    assert torchrig.plan(Stack()).strategy == "single"


def test_a_loader_goes_where_the_model_is_made_anew() -> None:
    model, settings = Stack(), {"backend": "eager", "regions": "whole", "placement": "wrap"}
    torchrig.prepare(model, **settings)
    gc.collect()
    _, placed = torchrig.prepare(model, DataLoader(TensorDataset(torch.ones(4, 4))), device="meta", **settings)
    assert {batch.device.type for (batch,) in placed} == {"meta"}
