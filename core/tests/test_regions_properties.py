"""What holds for the regions of any tree of modules."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchrig import Region, RegionError
from torchrig.regions import find_regions, resolve


class A(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class B(A):
    pass


class C(nn.Module):
    _no_split_modules = ["A", "Linear"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class D(nn.Module):
    _repeated_blocks = ["B"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


NAMES = ["layer0", "layer1", "layer2", "encoder", "decoder", "0", "1", "norm1", "norm2"]


@st.composite
def trees(draw: st.DrawFn) -> nn.Module:
    """A random tree, some of whose modules stand in several places."""
    made: list[nn.Module] = []

    def tree(depth: int) -> nn.Module:
        if made and draw(st.integers(0, 9)) == 0:
            return draw(st.sampled_from(made))
        module = _leaf(draw) if depth == 0 else _parent(draw, tree, depth)
        made.append(module)
        return module

    return _parent(draw, tree, draw(st.integers(1, 3)))


def _leaf(draw: st.DrawFn) -> nn.Module:
    module = draw(st.sampled_from([A, B, nn.Identity, nn.ReLU]))()
    if draw(st.booleans()):
        module.register_parameter("weight", nn.Parameter(torch.empty(draw(st.integers(1, 2)), device="meta")))
    return module


def _parent(draw: st.DrawFn, tree: Any, depth: int) -> nn.Module:
    cls = draw(st.sampled_from([A, B, C, D, nn.ModuleList, nn.Sequential, nn.ModuleDict]))
    children = [tree(depth - 1) for _ in range(draw(st.integers(0, 4)))]
    if cls in (nn.ModuleList, nn.Sequential):
        return cls(children) if cls is nn.ModuleList else cls(*children)
    module = cls()
    for name, child in zip(draw(st.permutations(NAMES)), children, strict=False):
        module.add_module(name, child)
    return module


def snapshot(model: nn.Module) -> list[Any]:
    return [(name, type(part), list(vars(part)), list(part._modules)) for name, part in model.named_modules()]


def regions_of(model: nn.Module, spec: Any) -> tuple[Region, ...]:
    try:
        return find_regions(model, spec)
    except RegionError:
        return ()


SPECS = st.sampled_from(["auto", "repeated", "whole", ["A"], ["*1"], [B, "layer*"]])


@settings(max_examples=150, deadline=None)
@given(model=trees(), spec=SPECS)
def test_any_tree(model: nn.Module, spec: Any) -> None:
    before = snapshot(model)
    keys = list(model.state_dict())
    regions = regions_of(model, spec)

    assert (snapshot(model), list(model.state_dict())) == (before, keys)
    assert regions_of(model, spec) == regions
    assert len({region.kind for region in regions}) == len(regions)
    names = [name for region in regions for name in region.instances]
    assert not [
        (outer, inner)
        for outer in names
        for inner in names
        if outer != inner and (outer == "" or inner.startswith(f"{outer}."))
    ]
    parts = [resolve(model, name) for name in names]
    assert len({id(part) for part in parts}) == len(parts)
    assert all(isinstance(resolve(model, name), region.cls) for region in regions for name in region.instances)
    assert all(type(part).forward is not nn.Module.forward for part in parts)
    assert set(names) <= {name for name, _ in model.named_modules()}


@settings(max_examples=50, deadline=None)
@given(model=trees())
def test_auto_always_finds_something_to_run(model: nn.Module) -> None:
    if type(model).forward is not nn.Module.forward:
        assert find_regions(model, "auto")


@settings(max_examples=50, deadline=None)
@given(count=st.integers(2, 6), depth=st.integers(0, 3))
def test_blocks_are_found_under_any_prefix(count: int, depth: int) -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2, device="meta"), nn.ReLU())

    model: nn.Module = nn.ModuleList(block() for _ in range(count))
    for _ in range(depth):
        outer = C()
        outer.body = model
        model = outer
    (region,) = find_regions(model, "auto")
    prefix = "body." * depth
    assert region.instances == tuple(f"{prefix}{number}" for number in range(count))
