"""One module sharded by ``fully_shard``, under the name of its class, and what that put on it.

``fully_shard`` gives a module a class of its own, ``FSDPBlock`` for ``Block``, that inherits from both. ``isinstance``
holds, but libraries also choose by name (an RMS norm is told by ``"RMSNorm" in type(module).__name__``, a region by its
class's name; a checkpoint names the architecture). So the class that PyTorch made is called what the original is. A
class of our own under that one would be registered a second time by an ``__init_subclass__`` of the user's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from . import beside

_SHARDING = ("torch.distributed.fsdp", __name__.partition(".")[0])  # the modules whose hooks belong to it


def shard(module: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Shard one module, and remember how.

    Args:
        module: The module; those in it that are units of their own are sharded already.
        arguments: What ``fully_shard`` takes besides.
    """
    before = [(each, set(vars(each))) for each in module.modules()]
    fully_shard(module, **arguments)
    for each, names in before:
        came = tuple(vars(each).keys() - names)
        if each is module or came:
            beside.remember(each, beside.Sharded(came, arguments if each is module else None))
    _adjust_class(type(module), original_class(module))


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that a sharded module had before; its class, for one that is no unit."""
    classes = type(module).__mro__
    return classes[classes.index(FSDPModule) + 1] if FSDPModule in classes else type(module)


def _adjust_class(made: type[nn.Module], original: type[nn.Module]) -> None:
    made.__name__, made.__qualname__, made.__module__ = original.__name__, original.__qualname__, original.__module__
    made.__deepcopy__ = _deepcopy  # type: ignore[attr-defined]
    made.__reduce_ex__ = _reduce  # type: ignore[method-assign,assignment]


def _deepcopy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    from . import copies

    return copies.deepcopy(module, memo)


def _reduce(module: nn.Module, protocol: Any) -> Any:
    from . import copies

    return copies.reduce(module, protocol)


def strip(module: nn.Module) -> None:
    """Take off one module what sharding put on it, but for its parameters."""
    module.__class__ = original_class(module)
    known = beside.recall(module)
    for name in () if known is None else known.attributes:
        vars(module).pop(name, None)
    for name, hooks in vars(module).items():
        if name.endswith("_hooks") and isinstance(hooks, dict):
            for key in [key for key, hook in hooks.items() if _is_ours(hook)]:
                del hooks[key]
                for flags in (f"{name}_with_kwargs", f"{name}_always_called"):
                    vars(module).get(flags, {}).pop(key, None)


def _is_ours(hook: Any) -> bool:
    function = getattr(hook, "hook", hook)
    return str(getattr(function, "__module__", "")).startswith(_SHARDING)
