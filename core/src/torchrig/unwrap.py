"""Peel what was put around a model, and, where asked, what was put into it."""

from __future__ import annotations

import warnings

from torch import nn

from . import logs, placement, state
from .arguments import require_module
from .errors import RegionError, TorchrigWarning


def unwrap(model: nn.Module, *, keep_compile: bool = True) -> nn.Module:
    """Give back the original model.

    Peels, in any nesting: what a strategy put around it, ``torch.compile``'s wrapper, and PyTorch's own
    ``DataParallel`` and ``DistributedDataParallel``. A model that was not prepared is peeled alike.

    Args:
        model: A prepared model, or any other.
        keep_compile: ``True`` leaves the model's compiled regions in place and changes nothing that is alive.
            ``False`` also takes every compiled forward and every layer off the model, so that it runs as written, and
            can be prepared again with other settings.

    Returns:
        The original object; ``unwrap(prepare(model)) is model``.

    Raises:
        ArgumentError: It is no model.
    """
    require_module(model, "unwrap")
    original = _peel(model, keep_compile)
    if not keep_compile:
        _warn_of_patches(model, original)
        _strip(original)
        logs.unwrapped(type(original).__name__)
        for module in (model, original):
            state.forget(module)
    return original


def _warn_of_patches(model: nn.Module, original: nn.Module) -> None:
    """A ``forward`` that was patched over torchrig's since may call it, and nobody can take it from under there."""
    from .regions import resolve

    prepared = state.recall(model)
    for region in () if prepared is None else prepared.plan.regions:
        for name in region.instances:
            try:
                module = resolve(original, name)
            except RegionError:  # not there any more
                continue
            if not placement.is_compiled(module) and placement.under(module) is not None:
                warnings.warn(
                    f"The forward of {name or type(module).__name__!r} was replaced after prepare. What stands there "
                    "now is left alone; if it calls the forward that was there before, that one stays compiled.",
                    TorchrigWarning,
                    stacklevel=3,
                )


def _peel(model: nn.Module, keep_compile: bool) -> nn.Module:
    while True:
        inner = _inner(model, keep_compile)
        if inner is None or inner is model:
            return model
        model = inner


def _inner(model: nn.Module, keep_compile: bool) -> nn.Module | None:
    prepared = state.recall(model)
    if prepared is not None:
        for answer in reversed(prepared.hooks.hook.unwrap(model=model, keep_compile=keep_compile)):
            return answer  # type: ignore[no-any-return]
    return placement.inside_compile(model) or _inside_parallel(model)


def _inside_parallel(model: nn.Module) -> nn.Module | None:
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    return model.module if isinstance(model, parallel) else None


def _strip(model: nn.Module) -> None:
    for module in tuple(model.modules()):
        placement.take_layers(module)
        placement.take_inplace(module)
        for name, child in module._modules.items():
            if child is not None and (inner := placement.inside_compile(child)) is not None:
                module._modules[name] = inner
