"""Write into a sharded tensor as if it were whole.

A random number drawn into a shard depends on how many shards there are. So whatever initialises a model in place,
``normal_`` for one, is done on a whole tensor here, by every process alike, and each keeps its own part.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torchrig import dtensors
from torchrig.nested import map_tensors

_WRITING = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"})


class Whole(TorchFunctionMode):
    """While it is entered, what is written into a ``DTensor`` is written into the whole tensor, and cut again.

    Every process must make the same calls. Writing into a part of one (``weight[0].zero_()``) is not seen.
    """

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do one call."""
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")  # torch.nn.init hands over keywords alone
        if not _writes(func) or not isinstance(target, torch.Tensor) or not dtensors.is_sharded(target):
            return func(*args, **kwargs)
        whole = _whole(target)
        args, kwargs = map_tensors((args, kwargs), lambda each: whole if each is target else _whole(each))
        result = func(*args, **kwargs)
        target.copy_(dtensors.cut_like(whole, target))
        return target if result is whole else result


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name in _WRITING or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_")


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if dtensors.is_sharded(tensor) else tensor  # type: ignore[no-any-return]
