"""Give a model without values (on the meta device) its initial values, each process its own part of the same ones.

The model is sharded first, so that no process ever holds all of it. Then each module in turn is given whole parameters,
initialised as its own code does it, and cut again. All processes draw from one seed, so that the values are the same
however many processes there are.

A module is initialised by its ``reset_parameters`` (``_reset_parameters`` in some of PyTorch's), as its constructor
would, then by the nearest ``_init_weights(module)`` around it, as the transformers library and many others have it,
and last by the outermost ``init_weights()`` around it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchrig import StrategyError, dtensors

from .drawing import Whole


@dataclass(frozen=True)
class Way:
    """How one module is initialised, or with ``init_weights`` a module and all in it."""

    module: nn.Module
    calls: tuple[Callable[[], Any], ...]


def ways(model: nn.Module) -> list[Way]:
    """How to initialise the modules that have parameters or buffers without values, in order; empty where none has.

    Raises:
        StrategyError: Some have no way; names them all.
    """
    if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return []
    found: list[Way] = []
    outermost: dict[int, Way] = {}
    lost: list[str] = []
    for name, module, around in _children_first(model):
        lacking = [own for own, tensor in _own(module) if tensor.is_meta]
        if not lacking:
            continue
        calls = tuple(_calls(module, around))
        found += [Way(module, calls)] if calls else []
        holder = next((each for each in around if _takes_nothing(each, "init_weights")), None)
        if holder is not None and not _calls_init_weights(around):
            outermost[id(holder)] = Way(holder, (holder.init_weights,))  # type: ignore[arg-type]
        elif not calls:
            lost.append(f"{name or 'the model itself'} ({type(module).__name__}: {', '.join(lacking)})")
    if lost:
        raise StrategyError(
            f"This {type(model).__name__} is on the meta device, and nothing says what values to start with in "
            f"{'; '.join(lost)}. Give these modules a reset_parameters(), or the model an init_weights()."
        )
    return [*found, *outermost.values()]


def _children_first(
    module: nn.Module, name: str = "", around: tuple[nn.Module, ...] = (), seen: set[int] | None = None
) -> Iterator[tuple[str, nn.Module, tuple[nn.Module, ...]]]:
    """Every module once, with its name and those around it, itself included, from the root inwards."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    around = (*around, module)
    for own, child in module.named_children():
        yield from _children_first(child, f"{name}.{own}" if name else own, around, seen)
    yield name, module, around


def _own(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def _calls(module: nn.Module, around: tuple[nn.Module, ...]) -> Iterator[Callable[[], Any]]:
    for name in ("reset_parameters", "_reset_parameters"):
        if _takes_nothing(module, name):
            yield getattr(module, name)
            break
    initialiser = _nearest(around)
    if initialiser is not None:
        yield lambda: initialiser._init_weights(module)  # type: ignore[operator]


def _nearest(around: tuple[nn.Module, ...]) -> nn.Module | None:
    return next((each for each in reversed(around) if callable(getattr(each, "_init_weights", None))), None)


def _calls_init_weights(around: tuple[nn.Module, ...]) -> bool:
    """Whether ``init_weights`` only does what ``_init_weights`` was called for, as in the transformers library."""
    return _nearest(around) is not None


def _takes_nothing(module: nn.Module, name: str) -> bool:
    """Whether the module has a method of that name that can be called without arguments."""
    method = getattr(module, name, None)
    if not callable(method):
        return False
    needed = (each for each in inspect.signature(method).parameters.values() if each.default is each.empty)
    return all(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in needed)


def carry_out(model: nn.Module, found: list[Way], memory: torch.device, device: torch.device) -> None:
    """Give the sharded model memory, and its values.

    Args:
        model: The sharded model.
        found: What :func:`ways` found, before it was sharded.
        memory: Where the parameters go.
        device: Where the buffers go.

    Raises:
        StrategyError: A parameter or buffer was left without values; names all.
    """
    # FSDP2 has an _apply of its own, which takes note of new shards; to_empty would empty what has values as well.
    model._apply(lambda tensor: _unset(tensor, memory) if tensor.is_meta else tensor)  # type: ignore[no-untyped-call]
    done: set[int] = set()
    with _one_seed(device), torch.no_grad():
        for way in found:
            with _whole(way.module, done), Whole():
                for call in way.calls:
                    call()
    _refuse_unset(model, device)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer if buffer is None else buffer.to(device)


def _unset(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory for a tensor, filled with what no initialisation leaves there."""
    made = torch.empty_like(tensor, device=device)
    with torch.no_grad():
        return made.fill_(_mark(tensor.dtype))


def _mark(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype is torch.bool else torch.iinfo(dtype).max


@contextmanager
def _whole(module: nn.Module, done: set[int]) -> Iterator[None]:
    """Give a module whole parameters in place of its shards, and cut them again at the end.

    A parameter that stands in several modules takes its values from the first, as the constructors of such models
    have it; ``done`` remembers.
    """
    shards: dict[str, Any] = {
        name: each for name, each in module._parameters.items() if each is not None and dtensors.is_sharded(each)
    }
    for name, shard in shards.items():
        module._parameters[name] = nn.Parameter(shard.full_tensor().clone(), requires_grad=shard.requires_grad)
    try:
        yield
    finally:
        wholes = {name: module._parameters[name] for name in shards}
        module._parameters.update(shards)
    for name, shard in shards.items():
        if id(shard) not in done:
            shard.copy_(dtensors.cut_like(wholes[name], shard))
        done.add(id(shard))


@contextmanager
def _one_seed(device: torch.device) -> Iterator[None]:
    """Draw from the first process's generator; the processes' own are as before afterwards, but for one draw."""
    seed = torch.randint(2**62, ()).to(device)
    dist.broadcast(seed, 0)
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type):
        torch.manual_seed(int(seed))
        yield


def _refuse_unset(model: nn.Module, device: torch.device) -> None:
    """Name what was left without values, on whichever process; all must know, or the others would wait for ever."""
    named = [*model.named_parameters(), *model.named_buffers()]
    unset = torch.tensor([_is_unset(tensor) for _, tensor in named], dtype=torch.int32, device=device)
    dist.all_reduce(unset, dist.ReduceOp.MAX)
    left = [name for (name, _), bad in zip(named, unset.tolist(), strict=True) if bad]
    if left:
        raise StrategyError(
            f"This {type(model).__name__} was on the meta device, and its own initialisation left no values in "
            f"{', '.join(left)}. Set them in a reset_parameters() of their module, or in the model's init_weights()."
        )


def _is_unset(tensor: Any) -> bool:
    local = tensor.to_local() if dtensors.is_sharded(tensor) else tensor
    if local.dtype is torch.bool or not local.numel():
        return False
    mark = _mark(local.dtype)
    return bool((local.isnan() if math.isnan(mark) else local == mark).any())
