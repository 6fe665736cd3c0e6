"""Plugins of other people: a strategy that wraps, a transform, and a region compiled in a plugin's own way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torchrig

WRAPPING = """
from torch import nn
from torchrig import StrategyInfo, Wrapped, hookimpl

class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)

undone = []

@hookimpl
def describe():
    return StrategyInfo(name="boxed", summary="puts the model in a box", in_place=False)

@hookimpl
def wrap_strategy(model, optimizers, plan):
    return Wrapped(Wrapper(model), optimizers, lambda: undone.append(type(model).__name__))

@hookimpl
def unwrap(model, keep_compile):
    return model.inner if isinstance(model, Wrapper) else None
"""

TRANSFORM = """
from torch import nn
from torchrig import TransformInfo, hookimpl

@hookimpl
def describe():
    return TransformInfo(name="silu", summary="every ReLU becomes a SiLU")

@hookimpl
def transform(model, plan):
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU):
                setattr(module, name, nn.SiLU())
    return model
"""

OWN_WAY = """
import torch
from torchrig import BackendInfo, hookimpl

@hookimpl
def describe():
    return BackendInfo(name={name!r}, summary="compiles regions itself")

@hookimpl
def torch_compile_kwargs(request):
    return {{"backend": "eager"}}

@hookimpl
def compile_region(module, region, kwargs, plan):
    if region.kind != "Block":
        return None
    torch.nn.Module.compile(module, **kwargs)
    return module
"""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.linear(x))


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


@pytest.fixture
def x() -> torch.Tensor:
    return torch.ones(2, 4)


def test_a_strategy_that_wraps(install: Any, x: torch.Tensor) -> None:
    install("acme-boxed", {"boxed": "acme_boxed"}, {"acme_boxed": WRAPPING}, group="torchrig.strategies")
    model = Stack()
    expected = model(x)
    settings = {"strategy": "boxed", "backend": "aot_eager"}
    wrapped = torchrig.prepare(model, **settings)
    assert type(wrapped).__name__ == "Wrapper" and torchrig.unwrap(wrapped) is model
    torch.testing.assert_close(wrapped(x), expected)
    assert torchrig.report(wrapped).ok and torchrig.report(model)["Block"].calls == 3
    assert torchrig.prepare(model, **settings) is wrapped
    assert torchrig.unwrap(wrapped, keep_compile=False) is model
    assert not torchrig.has_compiled_regions(model)
    with pytest.raises(torchrig.TorchrigError, match="not prepared"):
        torchrig.report(wrapped)


def test_a_wrapping_is_undone_when_a_later_step_raises(
    install: Any, monkeypatch: pytest.MonkeyPatch, x: torch.Tensor
) -> None:
    install("acme-boxed", {"boxed": "acme_boxed"}, {"acme_boxed": WRAPPING}, group="torchrig.strategies")
    loader = torch.utils.data.DataLoader(range(2))

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("torchrig.loaders.place", fail)
    with pytest.raises(ZeroDivisionError):
        torchrig.prepare(Stack(), loader, strategy="boxed", backend="eager")
    import acme_boxed

    assert acme_boxed.undone == ["Stack"]


def test_a_transform_comes_before_compile_and_is_taken_back_on_failure(
    install: Any, monkeypatch: pytest.MonkeyPatch, x: torch.Tensor
) -> None:
    install("acme-silu", {"silu": "acme_silu"}, {"acme_silu": TRANSFORM}, group="torchrig.transforms")
    model = Stack()
    settings = {"transforms": ["silu"], "backend": "eager"}
    assert [step.action for step in torchrig.plan(model, **settings).steps] == ["transform", "compile", "wrap"]

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr("torchrig.precision.apply", fail)
        with pytest.raises(ZeroDivisionError):
            torchrig.prepare(model, **settings)
    assert {type(layer.act) for layer in model.layers} == {nn.ReLU}
    assert not torchrig.has_compiled_regions(model)
    torchrig.prepare(model, **settings)
    model(x)
    assert {type(layer.act) for layer in model.layers} == {nn.SiLU}
    assert torchrig.report(model).ok


def test_a_region_compiled_in_a_plugins_own_way_is_counted(install: Any, x: torch.Tensor) -> None:
    install("acme-own", {"own_way": "acme_own"}, {"acme_own": OWN_WAY.format(name="own_way")})
    model = Stack()
    expected = model(x)
    torchrig.prepare(model, backend="own_way")
    torch.testing.assert_close(model(x), expected)
    report = torchrig.report(model)
    assert report.ok and report["Block"].calls == 3 and report.graphs == 1
    assert "forward" not in vars(model.layers[0]), "torchrig compiled it as well"
    assert torchrig.unwrap(model, keep_compile=False) is model and not torchrig.has_compiled_regions(model)


def test_two_plugins_that_compile_one_region_are_refused(install: Any) -> None:
    install("acme-own", {"own_way": "acme_own"}, {"acme_own": OWN_WAY.format(name="own_way")})
    strategy = WRAPPING + OWN_WAY[OWN_WAY.index("@hookimpl\ndef compile_region") :].replace("torch.nn", "nn")
    install("acme-boxed", {"boxed": "acme_boxed"}, {"acme_boxed": strategy}, group="torchrig.strategies")
    model = Stack()
    with pytest.raises(torchrig.AmbiguousPluginError, match=r"own_way.*boxed.*Block"):
        torchrig.prepare(model, backend="own_way", strategy="boxed")
