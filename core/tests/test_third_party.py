"""Plugins of other people: a strategy that wraps, a transform, and a region compiled in a plugin's own way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toys
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


class Block(toys.Block):
    """With a module for its activation, which a transform can replace."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.linear(x))


def Stack() -> toys.Stack:
    return toys.Stack(Block)


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


SWAPPING = """
import copy
import torch
from torch import nn
from torchrig import TransformInfo, hookimpl

class Halved(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.linear = block.linear
    def forward(self, x):
        return self.linear(x) * 0.5

@hookimpl
def describe():
    return TransformInfo(name={name!r}, summary="replaces blocks")

@hookimpl
def transform(model, plan):
    if {name!r} == "copied":
        model = copy.deepcopy(model)
    for index, block in enumerate(model.layers):
        model.layers[index] = Halved(block)
    return model.to(torch.float64) if {name!r} == "doubled" else model
"""


def test_what_a_transform_put_there_is_what_is_compiled(install: Any, x: torch.Tensor) -> None:
    install(
        "acme-swap", {"swapped": "acme_swap"}, {"acme_swap": SWAPPING.format(name="swapped")}, "torchrig.transforms"
    )
    bare, model = Stack(), Stack()
    model.load_state_dict(bare.state_dict())
    torchrig.prepare(bare, transforms=["swapped"])
    torchrig.prepare(model, transforms=["swapped"], backend="eager")
    torch.testing.assert_close(model(x), bare(x))
    report = torchrig.report(model)
    assert report.ok and [kind.kind for kind in report.kinds] == ["Halved"] and report["Halved"].calls == 3


def test_an_optimizer_owns_the_parameters_of_a_model_that_a_transform_returned(install: Any) -> None:
    install("acme-swap", {"copied": "acme_swap"}, {"acme_swap": SWAPPING.format(name="copied")}, "torchrig.transforms")
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live, optimizer = torchrig.prepare(model, optimizer, transforms=["copied"], backend="eager")
    assert live is not model
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert owned == {id(parameter) for parameter in live.parameters()}


def test_a_transform_that_converts_is_taken_back(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install(
        "acme-swap", {"doubled": "acme_swap"}, {"acme_swap": SWAPPING.format(name="doubled")}, "torchrig.transforms"
    )

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("torchrig.precision.apply", fail)
    model = Stack()
    with pytest.raises(ZeroDivisionError):
        torchrig.prepare(model, transforms=["doubled"])
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {type(layer).__name__ for layer in model.layers} == {"Block"}


@pytest.mark.parametrize("regions", ["auto", "whole"])
def test_a_strategy_that_has_regions_compiled_after_wrapping(install: Any, regions: str, x: torch.Tensor) -> None:
    late = WRAPPING.replace("in_place=False", "in_place=False, compile_after_wrap=True")
    install("acme-boxed", {"boxed": "acme_boxed"}, {"acme_boxed": late}, group="torchrig.strategies")
    model = Stack()
    expected = model(x)
    wrapped = torchrig.prepare(model, strategy="boxed", backend="eager", regions=regions)
    torch.testing.assert_close(wrapped(x), expected)
    assert torchrig.report(wrapped).ok and torchrig.unwrap(wrapped) is model
    actions = [step.action for step in torchrig.plan(Stack(), strategy="boxed", backend="eager").steps]
    assert actions == ["wrap", "compile"]


def test_an_optimizer_that_a_strategy_made_anew_is_given_back(install: Any) -> None:
    anew = WRAPPING.replace(
        "Wrapped(Wrapper(model), optimizers,",
        "Wrapped(Wrapper(model), tuple(type(each)(model.parameters(), lr=0.5) for each in optimizers),",
    )
    install("acme-boxed", {"boxed": "acme_boxed"}, {"acme_boxed": anew}, group="torchrig.strategies")
    model = Stack()
    _, optimizer = torchrig.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy="boxed")
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("returned", "message"),
    [("None", "NoneType"), ("model", "Stack"), ("Wrapped(Wrapper(model), (1, 2))", "0 optimizers and gave back 2")],
)
def test_a_strategy_that_returns_the_wrong_thing_is_named(install: Any, returned: str, message: str) -> None:
    wrong = WRAPPING.replace(
        "return Wrapped(Wrapper(model), optimizers, lambda: undone.append(type(model).__name__))", f"return {returned}"
    )
    install("acme-boxed", {"boxed": "acme_boxed"}, {"acme_boxed": wrong}, group="torchrig.strategies")
    with pytest.raises((torchrig.PluginLoadError, torchrig.StrategyError), match=f"boxed.*{message}"):
        torchrig.prepare(Stack(), strategy="boxed")


def test_a_backends_arguments_are_its_own_and_not_a_strategys(install: Any) -> None:
    both = (
        WRAPPING
        + """
@hookimpl
def torch_compile_kwargs(request):
    return {"backend": "aot_eager"}
"""
    )
    install("acme-boxed", {"boxed": "acme_boxed"}, {"acme_boxed": both}, group="torchrig.strategies")
    assert torchrig.plan(Stack(), strategy="boxed", backend="eager").compile_kwargs["backend"] == "eager"


@pytest.mark.parametrize(("returned", "message"), [("None", "NoneType"), ('{"speed": 1}', "speed")])
def test_a_backend_that_returns_the_wrong_arguments_is_named(install: Any, returned: str, message: str) -> None:
    wrong = OWN_WAY.format(name="own_way").replace('return {"backend": "eager"}', f"return {returned}")
    install("acme-own", {"own_way": "acme_own"}, {"acme_own": wrong})
    with pytest.raises(torchrig.PluginLoadError, match=f"own_way.*{message}"):
        torchrig.prepare(Stack(), backend="own_way")


def test_a_region_that_a_plugin_compiled_in_place_is_taken_back(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install("acme-own", {"own_way": "acme_own"}, {"acme_own": OWN_WAY.format(name="own_way")})

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("torchrig.precision.apply", fail)
    model = Stack()
    with pytest.raises(ZeroDivisionError):
        torchrig.prepare(model, backend="own_way")
    assert not torchrig.has_compiled_regions(model)
