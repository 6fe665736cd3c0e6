"""A plan says what prepare will do, in order and with reasons, and does nothing."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.data import DataLoader
from toys import Stack

import torchrig


def test_steps_come_in_order_each_with_a_reason() -> None:
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters())
    made = torchrig.plan(model, optimizer, DataLoader(range(4)), backend="eager", mixed_precision="bf16")
    assert [step.action for step in made.steps] == ["compile", "wrap", "optimizers", "loaders"]
    assert [step.target for step in made.steps] == ["Block x3", "Stack", "AdamW", "DataLoader"]
    assert [step.by for step in made.steps] == ["eager", "single", "single", "torchrig"]
    assert all(step.reason for step in made.steps)
    assert "bf16" in made.steps[1].reason


def test_a_plan_reads_as_a_table_and_as_json() -> None:
    made = torchrig.plan(Stack(), backend="eager", fullgraph=True)
    text = str(made)
    assert text.splitlines()[0] == "Stack: strategy single, backend eager, device cpu"
    assert "Block x3" in text and "because" in text and "\x1b" not in text
    told = json.loads(made.to_json())
    assert told["regions"][0]["kind"] == "Block" and len(told["regions"][0]["instances"]) == 3
    assert told["compile_kwargs"]["fullgraph"] is True and told["settings"]["backend"] == "eager"
    assert [step["action"] for step in told["steps"]] == ["compile", "wrap"]


def test_a_plan_touches_nothing() -> None:
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: sorted(vars(module)) for name, module in model.named_modules()}
    torchrig.plan(model, optimizer, backend="eager", mixed_precision="bf16", device="meta")
    assert {name: sorted(vars(module)) for name, module in model.named_modules()} == before
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    assert not torchrig.has_compiled_regions(model)


def test_no_backend_plans_no_compile() -> None:
    made = torchrig.plan(Stack())
    assert not made.regions and not made.compile_kwargs and [step.action for step in made.steps] == ["wrap"]


@pytest.mark.parametrize("how", ["setting", "environment"])
def test_compile_switched_off_is_noted(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "environment":
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    made = torchrig.plan(Stack(), backend="eager", disable=how == "setting")
    assert not made.regions and "nothing is compiled" in made.notes[0] and made.notes[0] in str(made)


@pytest.mark.parametrize("device", ["nonsense", "cuda:99"])
def test_a_device_that_is_not_there_is_refused_with_its_origin(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHRIG_DEVICE", device)
    with pytest.raises(torchrig.SettingsError, match=f"{device}.*TORCHRIG_DEVICE"):
        torchrig.plan(Stack())


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_what_cannot_be_prepared_is_refused() -> None:
    model = Stack()
    other = torch.optim.SGD(Stack().parameters(), lr=0.1)
    for arguments, message in [
        (("text",), "an nn.Module first.*a str"),
        ((model, 3), "argument 2 is an int"),
        ((model, Stack), "the class Stack"),
        ((model, other), "SGD steps no parameter of the model"),
        ((torch.jit.trace(model, torch.ones(1, 4)),), "TorchScript"),
    ]:
        with pytest.raises(torchrig.ArgumentError, match=message):
            torchrig.plan(*arguments)


def test_settings_of_the_wrong_kind_are_refused() -> None:
    with pytest.raises(torchrig.SettingsError, match=r"torchrig.Settings.*dict"):
        torchrig.plan(Stack(), settings={"backend": "eager"})


def test_more_than_one_process_needs_a_strategy_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert torchrig.plan(Stack()).strategy == "ddp"
    with pytest.raises(torchrig.StrategyUnavailable, match=r"'single' is for one process, and there are 2"):
        torchrig.plan(Stack(), strategy="single")
    assert torchrig.compile_regions(Stack(), backend="eager") is not None, "compiling alone asks for no strategy"


def test_a_block_for_a_plugin_that_takes_none_is_refused() -> None:
    with pytest.raises(torchrig.SettingsError, match=r"'eager' takes no settings of its own.*argument"):
        torchrig.plan(Stack(), backend="eager", **{"eager": {"speed": 3}})
