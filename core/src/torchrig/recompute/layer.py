"""Checkpointing as a layer on a block's ``forward``: no wrapper, so the block's type, keys and hooks stay.

The block's own hooks run outside of the layer, and so once; those of FSDP2 gather the parameters for the second
computation as for any backward. A model's ``forward`` that is traced by a compiler takes the layer along.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchrig.errors import AlreadyPreparedError, ArgumentError
from torchrig.placement import CHECKPOINT, Forward, Layer, layers, put_layer, under, with_self
from torchrig.tree import Undo

from . import operators
from .buffers import Again
from .buffers import Forward as First

# What torch.utils.checkpoint takes for itself, and a block's forward may take as well.
_TAKEN = frozenset({"use_reentrant", "context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state"})


class Checkpointer:
    """Puts checkpointing on the blocks of one model. Blocks of one class share the function, and so a graph.

    Args:
        saved: The operators whose results are kept; ``None`` where none are.
    """

    def __init__(self, saved: frozenset[Any] | None) -> None:
        self._saved = saved
        self._functions: dict[Forward, Forward] = {}

    def put(self, block: nn.Module) -> Undo:
        """Checkpoint one block; one that is checkpointed already, as a copy is, stays as it is.

        Raises:
            AlreadyPreparedError: It is checkpointed already, in another way.
        """
        for layer in layers(block):
            if layer.name == CHECKPOINT:
                self._compare(block, layer)
                return lambda: None
        lying = under(block)
        inner = type(block).forward if lying is None else lying.function
        if lying is not None and not lying.bound:
            function = _checkpointed(with_self(inner), self._saved)
        else:
            function = self._functions.setdefault(inner, _checkpointed(inner, self._saved))
        return put_layer(block, function, Layer(CHECKPOINT, lying, self._saved))

    def _compare(self, block: nn.Module, layer: Layer) -> None:
        if layer.record != self._saved:
            raise AlreadyPreparedError(
                f"A {type(block).__name__} of this model is checkpointed already, in another way. Take that off first: "
                "torchrig.unwrap(model, keep_compile=False)."
            )


def _checkpointed(inner: Forward, saved: frozenset[Any] | None) -> Forward:
    selective: dict[str, Any] = {} if saved is None else {"context_fn": operators.contexts(saved)}

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():  # nothing would be kept
            return inner(self, *args, **kwargs)
        call, own = (inner, kwargs) if _TAKEN.isdisjoint(kwargs) else (functools.partial(inner, **kwargs), {})
        if torch.compiler.is_compiling():  # the graph takes care of buffers
            return checkpoint(call, self, *args, use_reentrant=False, **selective, **own)
        _refuse_cache(self, (*args, *kwargs.values()))
        context_fn = _contexts(self, selective.get("context_fn"))
        return checkpoint(call, self, *args, use_reentrant=False, context_fn=context_fn, **own)

    # Not the attributes: those of a compiled function would make Dynamo take this one for compiled.
    functools.update_wrapper(forward, inner, updated=())
    return forward


def _refuse_cache(block: nn.Module, given: tuple[Any, ...]) -> None:
    """Refuse a cache of keys and values, as transformers' models fill; the second computation would add to it again."""
    for each in given:
        if hasattr(each, "get_seq_length") and hasattr(each, "update"):
            raise ArgumentError(
                f"This {type(block).__name__} is checkpointed, and was given a {type(each).__name__}, which would be "
                "filled again in the backward. Train without: model.config.use_cache = False."
            )


def _contexts(block: nn.Module, selective: operators.Contexts | None) -> Callable[[], tuple[Any, Any]]:
    def make() -> tuple[Any, Any]:
        first = First(block)
        if selective is None:
            return first, Again(first, contextlib.nullcontext())
        caching, cached = selective()
        stack = _Both(first, caching)
        return stack, Again(first, cached)

    return make


class _Both:
    """Two contexts as one."""

    def __init__(self, outer: Any, inner: Any) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> Any:
        try:
            return self._inner.__exit__(*error)
        finally:
            self._outer.__exit__(*error)
