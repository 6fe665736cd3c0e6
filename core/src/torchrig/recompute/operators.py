"""Names of operators -> the policy that keeps their results, and has everything else computed again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torchrig.errors import SettingsError
from torchrig.spelling import nearest

if TYPE_CHECKING:
    from torchrig.settings import Settings

SETTING = "activation_checkpointing_save"

# Matrix products and attention: most of the arithmetic of a block, and a small part of what it would keep.
COSTLY = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_mm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)

Contexts = Callable[[], tuple[Any, Any]]


def contexts(saved: frozenset[Any]) -> Contexts:
    """What ``torch.utils.checkpoint`` takes as ``context_fn``; a partial, as Dynamo asks for one."""
    return functools.partial(create_selective_checkpoint_contexts, functools.partial(_policy, saved))


def _policy(saved: frozenset[Any], context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE


def asked(settings: Settings) -> frozenset[Any] | None:
    """The operators whose results are kept; ``None`` where none are.

    Raises:
        SettingsError: PyTorch has no operator of a name that is asked for.
    """
    if settings.activation_checkpointing != "selective":
        return None
    given = settings.activation_checkpointing_save
    names: Iterable[str] = (name for name in COSTLY if _exists(name)) if given is None else given
    return frozenset(overload for name in names for overload in _overloads(name, settings))


def _exists(name: str) -> bool:
    return hasattr(torch.ops.aten, name)


def _overloads(name: str, settings: Settings) -> Iterator[Any]:
    space, _, plain = name.rpartition(".")
    found = getattr(getattr(torch.ops, space or "aten"), plain, None) if plain.isidentifier() else None
    if found is None:
        known = [each for each in dir(torch.ops.aten) if not each.startswith("__")]
        raise SettingsError(
            f"{SETTING} names {name!r}, and PyTorch has no such operator. Write it as in torch.ops.aten, such as 'mm', "
            "or with its namespace, such as 'mylibrary.attention'.",
            setting=SETTING,
            origin=settings.origin(SETTING),
            nearest=nearest(plain, (*COSTLY, *known)),
        )
    overloads = getattr(found, "overloads", None)
    if overloads is None:  # a higher-order operator has none
        yield found
    else:
        yield from (getattr(found, each) for each in overloads())
