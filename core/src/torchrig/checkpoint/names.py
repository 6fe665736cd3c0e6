"""The bare model's names for what a live model holds.

Wrappers inside a model (``torch.compile``'s, ``DistributedDataParallel``, activation checkpointing) stand between a
module and its parent and give their child a name. Told apart by what a module is, never by what it is called: a user's
own ``module`` or ``_orig_mod`` keeps its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from torchrig.placement import inside_compile

_ACTIVATION_CHECKPOINT = "_checkpoint_wrapped_module"


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by the bare model's names; a shared one under its first name."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for prefix, module in _modules(model, "", set()):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), (prefix + name, parameter))
    return dict(found.values())


def state_dict(model: nn.Module) -> dict[str, tuple[str, Any]]:
    """The state dict by the bare model's keys: each with the live model's own key, and the live value.

    Tensors that are one in the model are one object here.
    """
    live = model.state_dict(keep_vars=True)
    return {bare_key(model, key): (key, value) for key, value in live.items()}


def bare_key(model: nn.Module, key: str) -> str:
    """A state dict's key without what wrappers inside the model put into it."""
    parts, kept, module = key.split("."), [], model
    while parts:
        module = _past_wrappers(module, parts)
        if not parts:
            break
        kept.append(parts.pop(0))
        child = module._modules.get(kept[-1])
        if child is None:
            break
        module = child
    return ".".join(kept + parts)


def _past_wrappers(module: nn.Module, parts: list[str]) -> nn.Module:
    """The module inside any wrappers; takes their names off ``parts``."""
    while (name := _wrapped(module)) is not None:
        if parts and parts[0] == name and not _gives_bare_keys(module):
            parts.pop(0)
        inner = module._modules[name]
        assert inner is not None
        module = inner
    return module


def _wrapped(module: nn.Module) -> str | None:
    """Under which name a wrapper has its module; ``None`` for what is no wrapper."""
    if inside_compile(module) is not None:
        return "_orig_mod"
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return "module"
    return _ACTIVATION_CHECKPOINT if _is_checkpoint_wrapper(module) else None


def _is_checkpoint_wrapper(module: nn.Module) -> bool:
    return type(module).__name__ == "CheckpointWrapper" and _ACTIVATION_CHECKPOINT in module._modules


def _gives_bare_keys(wrapper: nn.Module) -> bool:
    """Whether a wrapper's state dict has its module's keys already: torchrig's own, and activation checkpointing."""
    return _is_checkpoint_wrapper(wrapper) or type(wrapper).state_dict is not nn.Module.state_dict


def _modules(module: nn.Module, prefix: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Every module that is no wrapper, once, with the prefix of its bare name, in the order of ``named_modules``."""
    module = _past_wrappers(module, [])
    if id(module) in seen:
        return
    seen.add(id(module))
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _modules(child, f"{prefix}{name}.", seen)
