"""An optimizer's state by the names of its parameters, so that it loads wherever the model does.

PyTorch numbers the parameters of an optimizer; the numbers depend on the groups and mean nothing under another
strategy. Saved is what ``optimizer.state_dict()`` gives, with names in the place of the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchrig.arguments import kind_of
from torchrig.errors import ArgumentError, CheckpointError

from .wording import listed

_OF_THE_OBJECT = frozenset({"params", "param_names"})  # what a group holds besides hyperparameters


def as_optimizers(given: Any, function: str) -> tuple[Optimizer, ...]:
    """The optimizers of a call: none, one, or a list of them.

    Raises:
        ArgumentError: Something is no optimizer.
    """
    optimizers = () if given is None else tuple(given) if isinstance(given, (list, tuple)) else (given,)
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise ArgumentError(f"{function} takes an optimizer, or a list of them, and was given {kind_of(each)}.")
    return optimizers


def capture(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """The state and the hyperparameters of an optimizer, by name.

    Args:
        optimizer: The optimizer.
        parameters: The live parameters of the model by name.

    Raises:
        CheckpointError: It steps a parameter that the model does not have.
    """
    names = _names(optimizer, parameters)
    native = optimizer.state_dict()
    numbered = [name for group in names for name in group]
    return {
        "kind": type(optimizer).__name__,
        "groups": [
            {"names": own, "values": {key: value for key, value in group.items() if key not in _OF_THE_OBJECT}}
            for own, group in zip(names, native["param_groups"], strict=True)
        ],
        "state": {numbered[key]: value for key, value in native["state"].items() if isinstance(key, int)},
        "other": {key: value for key, value in native["state"].items() if not isinstance(key, int)},
        "rest": {key: value for key, value in native.items() if key not in ("state", "param_groups")},
    }


def native_state(
    saved: Mapping[str, Any], optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Any]:
    """What ``optimizer.load_state_dict`` takes, from what :func:`capture` gave.

    Args:
        saved: What was captured; its tensors may still be marks.
        optimizer: The optimizer to load into.
        parameters: The live parameters of the model by name.

    Raises:
        CheckpointError: The optimizer is of another class, or steps other parameters, or groups them otherwise.
    """
    if saved["kind"] != type(optimizer).__name__:
        raise CheckpointError(
            f"The checkpoint's optimizer is {saved['kind']}, and the one to load into is {type(optimizer).__name__}: "
            "the state of one means nothing to the other. Build the same, or load the model alone."
        )
    names = _names(optimizer, parameters)
    groups = _matched(names, saved)
    number = {name: place for place, name in enumerate(name for own in names for name in own)}
    native = []
    for own, live, group in zip(names, optimizer.param_groups, groups, strict=True):
        of_the_object = {"param_names": live["param_names"]} if "param_names" in live else {}
        native.append({**group["values"], **of_the_object, "params": [number[name] for name in own]})
    state = {number[name]: value for name, value in saved["state"].items()}
    return {**saved["rest"], "state": {**state, **saved["other"]}, "param_groups": native}


def layout(saved: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """For each tensor of the saved state, the parameter whose sharding it shares; shaped as ``saved["state"]`` is.

    A step counter is not one: PyTorch keeps it whole, and on the CPU unless the group says otherwise.
    """
    return {
        name: {key: None if key == "step" else parameters.get(name) for key in state}
        for name, state in saved["state"].items()
        if isinstance(state, dict)
    }


def _names(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """The names of the parameters in each group."""
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    strangers = [each for group in optimizer.param_groups for each in group["params"] if id(each) not in name_of]
    if strangers:
        raise CheckpointError(
            f"{type(optimizer).__name__} steps {len(strangers)} parameters that the model does not have, the first of "
            f"shape {tuple(strangers[0].shape)}. Was it built before the model was wrapped or moved? Then give both to "
            "prepare. Does it also step another model? Then save it as an extra, where it is kept by position."
        )
    return [[name_of[id(each)] for each in group["params"]] for group in optimizer.param_groups]


def _matched(names: Sequence[Sequence[str]], saved: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The saved group for each group of an optimizer: the one of the same parameters."""
    kind, by_names = saved["kind"], {frozenset(group["names"]): group for group in saved["groups"]}
    here = [name for own in names for name in own]
    there = [name for group in saved["groups"] for name in group["names"]]
    missing, strange = [name for name in here if name not in there], [name for name in there if name not in here]
    if missing or strange:
        raise CheckpointError(
            f"The checkpoint's {kind} stepped other parameters than this one: not {listed(missing)} of this one's, "
            f"and {listed(strange)} besides. Build the optimizer from the same parameters."
        )
    if any(frozenset(own) not in by_names for own in names):
        raise CheckpointError(
            f"The checkpoint's {kind} had the same parameters grouped otherwise, in {len(by_names)} groups; this one "
            f"has {len(names)}. Build the optimizer with the same parameter groups."
        )
    return [by_names[frozenset(own)] for own in names]


def is_sharded(optimizer: Optimizer) -> bool:
    """Whether it steps parameters of which each rank has a part."""
    from torch.distributed.tensor import DTensor

    return any(isinstance(each, DTensor) for group in optimizer.param_groups for each in group["params"])


def fresh(like: torch.Tensor | None, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor to read into: sharded as ``like`` is where it has the same shape, whole on the CPU elsewhere."""
    if isinstance(like, torch.Tensor) and like.shape == size:
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    return torch.empty(size, dtype=dtype)
