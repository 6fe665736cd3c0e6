"""A ``DistributedDataParallel`` whose ``state_dict`` has the keys of the model inside.

PyTorch's own puts ``module.`` before each key, so that a checkpoint of it loads nowhere else. The functions of
``torch.distributed.checkpoint.state_dict`` take that prefix off themselves, and insist on it: to them, and to a module
around this one, it answers as PyTorch's own does. They ask for the method, look whether it is one of those that they
put in place themselves (``_patched_state_dict``), and take the class's instead if so. That set is the one private name
here; run on torch 2.13.0, and read in the sources of 2.9.0.
"""

from __future__ import annotations

import sys
from typing import Any, cast

from torch.nn.parallel import DistributedDataParallel

_ASKING = "torch.distributed.checkpoint.state_dict"


class _OfTheModel:
    """A method of the model inside, which ``torch.distributed.checkpoint`` does not see.

    Args:
        name: The method.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, wrapper: DistributedDataParallel | None, cls: type) -> Any:
        own = getattr(DistributedDataParallel, self._name)
        if wrapper is None:
            return own
        asking: Any = sys.modules.get(_ASKING)
        if asking is not None:
            asking._patched_state_dict.add(_Call(None, self._name))
        return _Call(wrapper, self._name)


class _Call:
    """The method of one wrapper; all of one name are equal, so that one entry in a set stands for all."""

    def __init__(self, wrapper: DistributedDataParallel | None, name: str) -> None:
        self._wrapper = wrapper
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        wrapper = cast(DistributedDataParallel, self._wrapper)
        if kwargs.get("destination") is not None:  # from a module around it, which loads by the names of its modules
            return getattr(DistributedDataParallel, self._name)(wrapper, *args, **kwargs)
        return getattr(wrapper.module, self._name)(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Call) and self._name == other._name

    def __hash__(self) -> int:
        return hash(self._name)


class Replicated(DistributedDataParallel):
    """What strategy ``ddp`` puts around a model: ``DistributedDataParallel``, with the model's own state-dict keys."""

    state_dict = _OfTheModel("state_dict")
    load_state_dict = _OfTheModel("load_state_dict")

    def detach(self) -> None:
        """Take off the hooks by which gradients are averaged; the model is as before it was wrapped."""
        for name in ("logger", "reducer"):  # the first holds the second, and its end is that of the hooks
            self.__dict__.pop(name, None)
