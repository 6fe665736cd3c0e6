"""Bind an optimizer to the parameters its model lives with now.

Moving a model to some devices, or sharding it, replaces its ``Parameter`` objects; an optimizer built before would go on
stepping the old ones. Its parameter groups and its state are re-keyed here, in place, so that schedulers and the user's
own references to the optimizer stay right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


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

    Tensors of its state go to the device of their parameter; one-element step counters stay where they are, as
    PyTorch's own ``load_state_dict`` leaves them.

    Returns:
        A function that undoes it.
    """
    groups = [list(group["params"]) for group in optimizer.param_groups]
    state = dict(optimizer.state)
    new_of = {id(old): after[name] for name, old in before.items() if name in after}
    for group in optimizer.param_groups:
        group["params"] = [new_of.get(id(old), old) for old in group["params"]]
    optimizer.state.clear()
    for old, values in state.items():
        parameter = new_of.get(id(old), old)
        optimizer.state[parameter] = _on_device_of(parameter, values)
    return lambda: _put_back(optimizer, groups, state)


def _on_device_of(parameter: Any, values: Any) -> Any:
    if not isinstance(values, dict) or not isinstance(parameter, torch.Tensor):
        return values
    return {
        name: value.to(parameter.device) if isinstance(value, torch.Tensor) and value.dim() else value
        for name, value in values.items()
    }


def _put_back(optimizer: Optimizer, groups: list[list[nn.Parameter]], state: dict[Any, Any]) -> None:
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = parameters
    optimizer.state.clear()
    optimizer.state.update(state)
