"""Change the tensors inside a value, and give back a value of the same make.

PyTorch's own tree utilities know registered types only; batches and outputs also come as dataclasses and as ``dict``
subclasses of a library's own.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

Leaf = Callable[[Any], Any]


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with ``function`` applied to every tensor in it; see :func:`map_leaves`."""
    return map_leaves(value, lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf)


def _never(value: Any) -> bool:
    return False


def map_leaves(value: Any, function: Leaf, is_leaf: Callable[[Any], bool] = _never) -> Any:
    """``value`` with ``function`` applied to everything in it that is not a container.

    Containers are lists, tuples, named tuples, dicts and dataclass instances, subclasses included (such as the outputs
    of the transformers library). Those in which something changed are copied, and the given ones left as they are;
    where nothing changed, the given object itself comes back.

    Args:
        value: Anything.
        function: Takes what is not a container, and returns what stands in its place.
        is_leaf: Says of a container that it is to be given to ``function`` as a whole.
    """
    if isinstance(value, torch.Tensor) or is_leaf(value):
        return function(value)

    def each(item: Any) -> Any:
        return map_leaves(item, function, is_leaf)

    if isinstance(value, dict):
        return _map_dict(value, each)
    if isinstance(value, (list, tuple)):
        return _map_sequence(value, each)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(value, each)
    return function(value)


def _map_dict(value: dict[Any, Any], each: Leaf) -> Any:
    changes = _changes(value.items(), each)
    if not changes:
        return value
    copied = copy.copy(value)  # keeps a defaultdict's factory, and a subclass's own attributes
    for key, new in changes.items():
        copied[key] = new
    return copied


def _map_sequence(value: Any, each: Leaf) -> Any:
    changes = _changes(enumerate(value), each)
    if not changes:
        return value
    items = [changes.get(place, item) for place, item in enumerate(value)]
    if isinstance(value, list):
        copied = copy.copy(value)
        copied[:] = items
        return copied
    # A named tuple, and torch's own named results, take their fields one by one or as one sequence.
    return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)


def _map_dataclass(value: Any, each: Leaf) -> Any:
    own = (
        (field.name, getattr(value, field.name)) for field in dataclasses.fields(value) if hasattr(value, field.name)
    )
    changes = _changes(own, each)
    if not changes:
        return value
    copied = copy.copy(value)
    for name, new in changes.items():
        object.__setattr__(copied, name, new)  # goes past frozen
    return copied


def _changes(items: Any, each: Leaf) -> dict[Any, Any]:
    mapped = ((key, item, each(item)) for key, item in items)
    return {key: new for key, item, new in mapped if new is not item}
