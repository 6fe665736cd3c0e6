"""What is given to prepare, report and the others: sorted, or refused with what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchrig
from torchrig.arguments import sort

MODEL = nn.Linear(4, 4)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)
DATA = TensorDataset(torch.ones(4, 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((OPTIMIZER, MODEL), "an nn.Module first, and was given an instance of SGD: the model comes first."),
        ((DataLoader(DATA), MODEL), "given an instance of DataLoader: the model comes first."),
        ((None,), "given None."),
        ((3,), "given an int."),
        ((nn.Linear,), "given the class Linear: pass an instance, Linear()."),
        ((nn.Linear, MODEL), "given the class Linear: pass an instance, Linear()."),
        (("inductor",), "given a str: settings are given by name, such as backend='inductor'."),
        (((MODEL, OPTIMIZER),), "given a tuple: pass each thing in it by itself."),
        ((MODEL, "inductor"), "argument 2 is a str: settings are given by name, such as backend='inductor'."),
        ((MODEL, OPTIMIZER, MODEL.parameters()), "argument 3 is a generator: pass the optimizer itself"),
        ((MODEL, iter(DataLoader(DATA))), "the DataLoader itself rather than its iterator."),
        ((MODEL, DATA), "argument 2 is an instance of TensorDataset: wrap it in a DataLoader."),
        ((MODEL, nn.MSELoss), "argument 2 is the class MSELoss: pass an instance, MSELoss()."),
        ((MODEL, [OPTIMIZER]), "argument 2 is a list: pass each thing in it by itself."),
        ((MODEL, 3), "argument 2 is an int."),
    ],
)
def test_a_refusal_says_what_it_was_given_and_what_to_do(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(torchrig.ArgumentError) as caught:
        torchrig.prepare(*arguments)
    assert message in str(caught.value)


def test_a_compile_of_a_compiled_model_is_told_from_a_function() -> None:
    twice = torch.compile(torch.compile(MODEL, backend="eager"), backend="eager")
    with pytest.raises(
        torchrig.ArgumentError, match=r"torch.compile of a compiled module gives a plain function\. Pass"
    ):
        torchrig.prepare(twice)


def test_what_is_given_twice_counts_once() -> None:
    loader = DataLoader(DATA)
    sorted_ = sort(MODEL, (OPTIMIZER, MODEL, loader, OPTIMIZER, loader))
    assert sorted_.models == (MODEL,) and sorted_.optimizers == (OPTIMIZER,) and sorted_.loaders == (loader,)
    assert len(sorted_.given) == 6


def test_a_model_given_twice_is_prepared_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    assert torchrig.prepare(model, model, backend="eager") == (model, model)
    model(torch.ones(2, 4))
    assert torchrig.report(model).graphs == 1


@pytest.mark.parametrize(
    "function", [torchrig.report, torchrig.unwrap, torchrig.is_compiled, torchrig.has_compiled_regions]
)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((MODEL, OPTIMIZER), "a tuple; unpack what prepare returned."),
        ([MODEL], "a list; unpack what prepare returned."),
        (None, "None."),
        ("x", "a str"),
        (nn.Linear, "the class Linear: pass an instance"),
    ],
)
def test_what_takes_a_model_takes_nothing_else(function: Callable[[Any], Any], value: Any, message: str) -> None:
    with pytest.raises(torchrig.ArgumentError) as caught:
        function(value)
    assert f"{function.__name__} takes the model, and was given {message}" in str(caught.value)
