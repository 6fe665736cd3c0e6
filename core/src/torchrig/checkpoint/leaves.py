"""Part a tree of values into its tensors and the rest, and put it together again.

The rest is kept with ``torch.save`` and read back with ``weights_only=True``, which builds plain values alone. What
would need code of its own to be read is refused when it is saved, by its place in the tree.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from torchrig.arguments import kind_of
from torchrig.errors import CheckpointError

MARK = "torchrig.tensor"  # {MARK: key} stands where a tensor was
_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device, torch.Size, torch.layout}
)
_MAPPINGS = (dict, collections.OrderedDict, collections.Counter)
_SEQUENCES = (list, tuple)


@dataclass
class Parted:
    """Collects the tensors of trees.

    Args:
        tensors: Every tensor met, detached, by a key of its own; one that was met in several places once.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    _keys: dict[int, tuple[torch.Tensor, str]] = field(default_factory=dict)

    def part(self, value: Any, place: str) -> Any:
        """``value`` with a mark in the place of every tensor.

        Args:
            value: Plain values and tensors in dicts, lists, tuples and sets.
            place: What the value is called, in keys and in messages.

        Raises:
            CheckpointError: Something in it is neither.
        """
        if isinstance(value, torch.Tensor):
            return {MARK: self._key(value, place)}
        if type(value) in _MAPPINGS:
            return self._mapping(value, place)
        if type(value) in _SEQUENCES:
            return type(value)(self.part(each, f"{place}.{index}") for index, each in enumerate(value))
        if type(value) in (set, frozenset):
            return {_plain(each, f"an element of {place}") for each in value}
        return _plain(value, place)

    def _mapping(self, value: dict[Any, Any], place: str) -> Any:
        if MARK in value:
            raise CheckpointError(f"The key {MARK!r} in {place} is torchrig's own; use another.")
        kept = {_plain(key, f"a key of {place}"): self.part(each, f"{place}.{key}") for key, each in value.items()}
        return kept if type(value) is dict else type(value)(kept)

    def _key(self, tensor: torch.Tensor, place: str) -> str:
        known = self._keys.get(id(tensor))
        if known is None:
            _check(tensor, place)
            key = place
            while key in self.tensors:
                key += "'"
            self.tensors[key] = tensor.detach()
            known = self._keys[id(tensor)] = (tensor, key)  # holds the tensor, so that its id stays its own
        return known[1]


def join(tree: Any, tensor_of: Callable[[str], Any]) -> Any:
    """A tree of :meth:`Parted.part` with ``tensor_of(key)`` in the place of every mark."""
    if isinstance(tree, dict):
        if MARK in tree:
            return tensor_of(tree[MARK])
        joined = {key: join(each, tensor_of) for key, each in tree.items()}
        return joined if type(tree) is dict else type(tree)(joined)
    if isinstance(tree, _SEQUENCES):
        return type(tree)(join(each, tensor_of) for each in tree)
    return tree


def tensors(tree: Any, layout: Any = None) -> Iterable[tuple[str, Any]]:
    """The key of each mark with what stands in the same place of ``layout``, a tree like it; ``None`` where nothing."""
    if isinstance(tree, dict) and MARK in tree:
        yield tree[MARK], layout
    elif isinstance(tree, dict):
        for key, each in tree.items():
            yield from tensors(each, layout.get(key) if isinstance(layout, dict) else None)
    elif isinstance(tree, _SEQUENCES):
        alike = isinstance(layout, _SEQUENCES) and len(layout) == len(tree)
        for index, each in enumerate(tree):
            yield from tensors(each, layout[index] if alike else None)


def _plain(value: Any, place: str) -> Any:
    if type(value) in _PLAIN:
        return value
    if type(value) is tuple:
        return tuple(_plain(each, place) for each in value)
    if type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return _plain(value.item(), place)
    raise CheckpointError(
        f"{place} is {kind_of(value)}, which cannot be read back without running code. A checkpoint holds tensors, "
        "plain values (numbers, strings, bytes, lists, tuples, sets, dicts) and objects with state_dict and "
        "load_state_dict; convert it to one of these."
    )


def _check(tensor: torch.Tensor, place: str) -> None:
    if tensor.is_meta:
        raise CheckpointError(f"{place} is on the meta device: it has no values to save. Materialise the model first.")
    if tensor.layout is not torch.strided:
        raise CheckpointError(f"{place} is a sparse tensor, which cannot be saved; save its dense form.")
