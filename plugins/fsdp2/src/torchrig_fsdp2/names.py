"""A sharded module keeps its class's name.

``fully_shard`` gives a module a class of its own, ``FSDPBlock`` for ``Block``, that inherits from both. ``isinstance``
holds, but libraries also choose by name (an RMS norm is told by ``"RMSNorm" in type(module).__name__``; a region by
its class's name; a checkpoint names the architecture). So the class PyTorch made is called what the original is.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule


def keep(module: nn.Module) -> None:
    """Call the class of a sharded module what its original is called."""
    made = type(module)
    original = original_class(made)
    made.__name__, made.__qualname__, made.__module__ = original.__name__, original.__qualname__, original.__module__


def original_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that a sharded module had before; the class itself, for one that is not sharded."""
    if not issubclass(cls, FSDPModule):
        return cls
    after = cls.__mro__.index(FSDPModule) + 1
    return cls.__mro__[after]
