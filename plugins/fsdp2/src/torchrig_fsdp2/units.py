"""A model -> its units: the modules whose parameters are gathered at one time. Pure.

They are the repeated blocks, whether or not anything is compiled, so that memory and traffic do not depend on the
backend. What is not in a block belongs to the root. One thing is otherwise: a model that is compiled in one piece is
one unit, as a graph cannot hold the hooks that gather and free the units in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchrig import Plan, Region, RegionError
from torchrig.regions import find_blocks, resolve

from . import settings


def find(model: nn.Module, plan: Plan) -> tuple[str, ...]:
    """The names of the units, the root (``""``) last; those inside others first.

    A module that shares a parameter with one outside of it is no unit of its own: a parameter is gathered and
    freed by one unit, and so is left to the one that has all its places, the root.

    Args:
        model: The model.
        plan: Its plan.
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):  # the user's own units
        return () if isinstance(model, FSDPModule) else ("",)
    kind = settings.of(plan).units
    blocks = [] if kind == "root" else [name for region in _regions(model, plan) for name in region.instances]
    names = list(blocks)
    if kind == "large" and blocks:
        names += _large(model, set(blocks))
    return (*_without_shared(model, names), "")


def _regions(model: nn.Module, plan: Plan) -> Iterator[Region]:
    found = plan.regions
    if not found:  # nothing is compiled
        try:
            found = find_blocks(model, plan.settings.regions)
        except RegionError:
            found = ()
    for region in found:
        if not region.whole and any(True for name in region.instances for _ in resolve(model, name).parameters()):
            yield region


def _large(model: nn.Module, blocks: set[str]) -> Iterator[str]:
    """The modules outside the blocks that have, by themselves, as many parameters as the smallest block."""
    least = min(_count(resolve(model, name).parameters()) for name in blocks)
    for name, module in _outside(model, blocks):
        if name and _count(module.parameters(recurse=False)) >= least:
            yield name


def _outside(module: nn.Module, blocks: set[str], name: str = "") -> Iterator[tuple[str, nn.Module]]:
    if name in blocks:
        return
    yield name, module
    for own, child in module.named_children():
        yield from _outside(child, blocks, f"{name}.{own}" if name else own)


def _count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(each.numel() for each in parameters)


def _without_shared(model: nn.Module, names: list[str]) -> list[str]:
    modules = {name: resolve(model, name) for name in names}
    places: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            places[id(parameter)] = places.get(id(parameter), 0) + 1
    return [name for name, module in modules.items() if not _shares(module, places)]


def _shares(module: nn.Module, places: dict[int, int]) -> bool:
    inside: dict[int, int] = {}
    for each in module.modules():
        for parameter in each.parameters(recurse=False):
            inside[id(parameter)] = inside.get(id(parameter), 0) + 1
    return any(places[key] > count for key, count in inside.items())
