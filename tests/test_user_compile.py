"""A model that the user compiled before prepare: what was asked for is read back, and applied again at its step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import compile as imported_before
from torch import nn
from toys import Stack

import torchrig


def in_place(model: nn.Module, **kwargs: Any) -> nn.Module:
    model.compile(**kwargs)
    return model


def each_layer(compiler: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def compile_layers(model: Stack, **kwargs: Any) -> nn.Module:
        for index in range(3):
            model.layers[index] = compiler(model.layers[index], **kwargs)
        return model

    return compile_layers


WAYS: dict[str, Callable[..., nn.Module]] = {
    "positional": torch.compile,
    "keyword": lambda model, **kwargs: torch.compile(model=model, **kwargs),
    "imported by name": imported_before,
    "decorator": lambda model, **kwargs: torch.compile(**kwargs)(model),
    "in place": in_place,
    "each layer": each_layer(torch.compile),
    "each layer in place": each_layer(in_place),
}
LAYERWISE = {"each layer", "each layer in place"}


@pytest.fixture
def x() -> torch.Tensor:
    return torch.ones(2, 4)


@pytest.mark.parametrize("way", WAYS)
def test_what_was_asked_for_is_applied_again(way: str, x: torch.Tensor) -> None:
    model = Stack()
    expected, keys = model(x), list(model.state_dict())
    compiled = WAYS[way](model, backend="aot_eager", fullgraph=True, dynamic=False)
    prepared = torchrig.prepare(compiled)
    assert prepared is model and torchrig.unwrap(prepared) is model
    torch.testing.assert_close(prepared(x), expected)
    report = torchrig.report(prepared)
    assert report.backend == "aot_eager" and report.ok and report.graphs == 1
    assert list(prepared.state_dict()) == keys
    made = torchrig.state.recall(prepared).plan
    assert made.compile_kwargs["fullgraph"] is True and made.compile_kwargs["dynamic"] is False
    assert made.regions[0].whole is (way not in LAYERWISE)
    assert torchrig.prepare(compiled) is prepared, "once more is no work"


def test_a_region_setting_given_to_prepare_is_kept(x: torch.Tensor) -> None:
    prepared = torchrig.prepare(torch.compile(Stack(), backend="aot_eager"), regions="auto")
    prepared(x)
    assert torchrig.report(prepared)["Block"].calls == 3


def test_a_callable_and_its_options_are_kept(x: torch.Tensor) -> None:
    heard: list[dict[str, Any]] = []

    def taking(graph: Any, example_inputs: Any, **more: Any) -> Any:
        heard.append(more)
        return graph.forward

    prepared = torchrig.prepare(torch.compile(Stack(), backend=taking, options={"width": 3}))
    prepared(x)
    assert heard == [{"options": {"width": 3}}] and torchrig.report(prepared).backend == "taking"


def test_another_callable_than_the_one_compiled_with_is_refused() -> None:
    def other(graph: Any, example_inputs: Any) -> Any:
        return graph.forward

    for compiled in (torch.compile(Stack()), torch.compile(Stack(), backend="eager")):
        with pytest.raises(torchrig.SettingsError, match="compiled with backend="):
            torchrig.prepare(compiled, backend=other)
    assert torchrig.plan(torch.compile(Stack(), backend=other), backend=other).backend == "other"


def test_inductors_mode_is_read_back() -> None:
    compiled = torch.compile(Stack(), mode="max-autotune-no-cudagraphs")
    made = torchrig.plan(compiled, mode="max-autotune-no-cudagraphs")
    assert made.backend == "inductor" and made.regions[0].whole
    with pytest.raises(torchrig.SettingsError, match=r"mode=.*max_autotune.*mode='reduce-overhead'.*argument"):
        torchrig.plan(compiled, mode="reduce-overhead")


@pytest.mark.parametrize(
    ("settings", "naming"),
    [
        ({"backend": "eager"}, ["backend='aot_eager'", "backend='eager'"]),
        ({"fullgraph": True}, ["fullgraph=False", "fullgraph=True"]),
        ({"dynamic": True}, ["dynamic=None", "dynamic=True"]),
    ],
)
@pytest.mark.parametrize("way", ["positional", "in place", "each layer"])
def test_asking_for_something_else_is_refused_and_changes_nothing(
    way: str, settings: dict[str, Any], naming: list[str], x: torch.Tensor
) -> None:
    compiled = WAYS[way](Stack(), backend="aot_eager")
    before = {name: id(module) for name, module in compiled.named_modules()}
    with pytest.raises(torchrig.SettingsError) as caught:
        torchrig.prepare(compiled, **settings)
    for part in [*naming, "argument", "unwrap"]:
        assert part in str(caught.value)
    assert {name: id(module) for name, module in compiled.named_modules()} == before
    assert torchrig.has_compiled_regions(compiled)


def test_the_same_again_is_no_conflict(x: torch.Tensor) -> None:
    prepared = torchrig.prepare(torch.compile(Stack(), backend="aot_eager"), backend="aot_eager", fullgraph=False)
    prepared(x)
    assert torchrig.report(prepared).ok


def test_submodules_compiled_in_different_ways_are_refused() -> None:
    model = Stack()
    model.layers[0] = torch.compile(model.layers[0], backend="eager")
    model.layers[1].compile(backend="aot_eager")
    with pytest.raises(
        torchrig.SettingsError, match=r"'layers.0' and 'layers.1'.*different ways.*reapply_compile=False"
    ):
        torchrig.prepare(model)


@pytest.mark.parametrize("way", WAYS)
def test_a_plan_leaves_the_users_compile_where_it_is(way: str, x: torch.Tensor) -> None:
    compiled = WAYS[way](Stack(), backend="aot_eager")
    before = {name: id(module) for name, module in compiled.named_modules()}
    in_place_before = [name for name, module in compiled.named_modules() if module._compiled_call_impl is not None]
    assert torchrig.plan(compiled).backend == "aot_eager"
    assert {name: id(module) for name, module in compiled.named_modules()} == before
    after = [name for name, module in compiled.named_modules() if module._compiled_call_impl is not None]
    assert after == in_place_before


@pytest.mark.parametrize("way", ["positional", "in place", "each layer in place"])
def test_a_failing_prepare_puts_the_users_compile_back(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = WAYS[way](Stack(), backend="aot_eager")
    before = {name: sorted(vars(module)) for name, module in compiled.named_modules()}

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("torchrig.precision.apply", fail)
    with pytest.raises(ZeroDivisionError):
        torchrig.prepare(compiled)
    assert {name: sorted(vars(module)) for name, module in compiled.named_modules()} == before


def test_reapply_compile_false_leaves_it_in_place(x: torch.Tensor) -> None:
    compiled = torch.compile(Stack(), backend="aot_eager")
    prepared = torchrig.prepare(compiled, reapply_compile=False)
    assert prepared is compiled and torchrig.is_compiled(prepared)


def test_a_prepared_copy_is_not_taken_for_the_users_compile(x: torch.Tensor) -> None:
    prepared = torchrig.prepare(Stack(), backend="aot_eager", placement="inplace")
    copied = copy.deepcopy(prepared)
    copied(x)
    assert torchrig.report(copied).ok
