"""Bind an optimizer to the parameters its model lives with now.

Moving a model to some devices, or sharding it, replaces its ``Parameter`` objects; an optimizer built before would go
on stepping the old ones. Its parameter groups and its state are re-keyed here, in place, so that schedulers and the
user's own references to the optimizer stay right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from . import dtensors
from .errors import StrategyError
from .nested import map_tensors


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter with its name; a shared one under its first name."""
    return dict(model.named_parameters())


def owns_any(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> bool:
    """Whether the optimizer steps at least one of the parameters."""
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return any(id(parameter) in stepped for parameter in parameters)


def rebind(
    optimizer: Optimizer, before: Mapping[str, nn.Parameter], after: Mapping[str, nn.Parameter]
) -> Callable[[], None]:
    """Make the optimizer own ``after``'s parameters where it owned ``before``'s, matched by name.

    Parameters of the optimizer that are not in ``before`` are left alone, and so is their state. The optimizer, its
    groups, its lists of parameters and its ``state`` stay the same objects: schedulers hold them, LBFGS keeps its list.

    Tensors of the state go to the device of their parameter, and where a parameter became a ``DTensor``, those of its
    shape are cut as it is. A step counter goes only where the group says ``fused`` or
    ``capturable``, as ``Optimizer.load_state_dict`` has it: elsewhere PyTorch wants it on the CPU.

    Args:
        optimizer: The optimizer.
        before: The model's parameters by name, when the optimizer was built.
        after: The live parameters by name. The same objects, where only their data moved.

    Returns:
        A function that undoes it.

    Raises:
        StrategyError: The optimizer steps a parameter that ``after`` does not name. Nothing was changed.
    """
    new_of = _counterparts(optimizer, before, after)
    undo = _put_back(optimizer)
    on_device = _device_counters(optimizer)
    state = dict(optimizer.state)
    for group in optimizer.param_groups:
        group["params"][:] = [new_of.get(id(old), old) for old in group["params"]]
    optimizer.state.clear()
    for old, values in state.items():
        new = new_of.get(id(old))
        if new is None:
            optimizer.state[old] = values
        else:
            moved = _on_device_of(new, values, move_step=id(old) in on_device)
            optimizer.state[new] = _cut_like(new, moved)
    return undo


def _counterparts(
    optimizer: Optimizer, before: Mapping[str, nn.Parameter], after: Mapping[str, nn.Parameter]
) -> dict[int, nn.Parameter]:
    """The live parameter for each that the optimizer steps, by the identity of the old one."""
    name_of = {id(parameter): name for name, parameter in before.items()}
    owned = [name_of[id(old)] for group in optimizer.param_groups for old in group["params"] if id(old) in name_of]
    lost = [name for name in owned if name not in after]
    if lost:
        raise StrategyError(
            f"{type(optimizer).__name__} steps parameter {lost[0]!r}, which the model does not have under that name "
            f"after it was wrapped ({len(lost)} such in all). The strategy must keep the names of the model."
        )
    return {id(before[name]): after[name] for name in owned}


def _device_counters(optimizer: Optimizer) -> set[int]:
    groups = (group for group in optimizer.param_groups if group.get("fused") or group.get("capturable"))
    return {id(parameter) for group in groups for parameter in group["params"]}


def _on_device_of(parameter: nn.Parameter, values: Any, *, move_step: bool) -> Any:
    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(parameter.device)

    if not isinstance(values, dict) or move_step or "step" not in values:
        return map_tensors(values, move)
    moved = map_tensors({name: value for name, value in values.items() if name != "step"}, move)
    return {name: moved.get(name, value) for name, value in values.items()}


def _cut_like(parameter: nn.Parameter, values: Any) -> Any:
    """State of the parameter's shape, element for element its own, cut as the parameter is."""
    if not dtensors.is_sharded(parameter):
        return values

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return dtensors.cut_like(tensor, parameter) if tensor.shape == parameter.shape else tensor

    if not isinstance(values, dict):
        return map_tensors(values, cut)
    return {name: value if name == "step" else map_tensors(value, cut) for name, value in values.items()}


def _put_back(optimizer: Optimizer) -> Callable[[], None]:
    """How to bring groups and state back to what they are now."""
    parameters = [list(group["params"]) for group in optimizer.param_groups]
    state = dict(optimizer.state)

    def undo() -> None:
        for group, own in zip(optimizer.param_groups, parameters, strict=True):
            group["params"][:] = own
        optimizer.state.clear()
        optimizer.state.update(state)

    return undo
