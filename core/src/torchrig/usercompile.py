"""A compile that the user applied before ``prepare``: read it back, take it off, and have it applied at its step.

``torch.compile(model)``, ``model.compile()``, and either of them on submodules. What was asked for is read from what
the call left on the module, so that it does not matter how ``torch.compile`` was imported, or when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from . import placement
from .errors import SettingsError
from .tree import Places, Undo

if TYPE_CHECKING:
    from .dynamo import Asked
    from .settings import Settings


@dataclass(frozen=True)
class Taken:
    """A model with the user's compile taken off.

    Args:
        model: What was inside the wrapper; the model itself where there was none.
        settings: The settings with what the user had asked of ``torch.compile`` in them.
    """

    model: nn.Module
    settings: Settings


@dataclass(frozen=True)
class _Found:
    """One module that the user compiled: where it is, itself, what is inside it, and what was asked for."""

    name: str
    module: nn.Module
    asked: Asked


def take_off(model: nn.Module, settings: Settings, undos: list[Undo]) -> Taken:
    """Take the user's compile off a model, and put what it asked for into the settings.

    Args:
        model: The model, perhaps compiled, perhaps with compiled submodules.
        settings: The settings of the call.
        undos: Gets how to put the compile back.

    Raises:
        SettingsError: The settings ask for something else than the user's own call, or the submodules were compiled in
            different ways. ``reapply_compile=False`` leaves the user's compile in place.
    """
    if not settings.reapply_compile or not any(_is_compiled(module) for module in model.modules()):
        return Taken(model, settings)
    found = list(_outermost(model))
    if not found:
        return Taken(model, settings)
    merged = _merged(found, settings)
    inner = _inside(model)
    _take_off_all(inner, undos)
    return Taken(inner, merged)


def _is_compiled(module: nn.Module) -> bool:
    own = placement.compile_layer(module) is not None
    return placement.is_compiled(module) and not own and not _is_sharded_around(module)


def _is_sharded_around(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on the wrapper of ``torch.compile``: what gathers the parameters is on it."""
    wraps = placement.inside_compile(module) is not None
    return wraps and any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__)


def _inside(module: nn.Module) -> nn.Module:
    while (inner := placement.inside_compile(module)) is not None:
        module = inner
    return module


def _outermost(model: nn.Module) -> Iterator[_Found]:
    """The compiled modules that no other compiled module holds; what they hold is compiled with them."""
    from . import dynamo

    todo = [("", model)]
    while todo:
        name, module = todo.pop()
        asked = dynamo.asked_of(module) if _is_compiled(module) else None
        if asked is not None:
            yield _Found(name, module, asked)
            continue
        children = [
            (f"{name}.{own}" if name else own, child) for own, child in module._modules.items() if child is not None
        ]
        todo.extend(reversed(children))


def _merged(found: list[_Found], settings: Settings) -> Settings:
    first = found[0].asked
    for other in found[1:]:
        difference = _difference(first, other.asked)
        if difference is not None:
            raise SettingsError(
                f"{found[0].name!r} and {other.name!r} were compiled in different ways ({difference}). Compile them "
                "alike, or leave them to themselves: reapply_compile=False.",
                setting="reapply_compile",
                origin=settings.origin("reapply_compile"),
            )
    _refuse_conflicts(first, settings)
    regions: dict[str, Any] = {}
    if settings.origin("regions") == "default":
        regions["regions"] = "whole" if found[0].name == "" else [each.name for each in found]
    return settings.replace(
        backend=_named(first), fullgraph=first.fullgraph, dynamic=first.dynamic, mode=None, options=None, **regions
    )


def _difference(one: Asked, other: Asked) -> str | None:
    for name in ("name", "extra", "fullgraph", "dynamic"):
        if getattr(one, name) != getattr(other, name):
            return f"{name}: {getattr(one, name)!r} and {getattr(other, name)!r}"
    return None


def _refuse_conflicts(asked: Asked, settings: Settings) -> None:
    was: dict[str, Any] = {"backend": asked.name, "fullgraph": asked.fullgraph, "dynamic": asked.dynamic}
    for name, before in was.items():
        now = getattr(settings, name)
        same = now == before or (name == "backend" and now is getattr(asked.backend, "compiler_fn", None))
        if settings.origin(name) != "default" and not same:
            raise _conflict(name, before, now, settings)
    for name in ("mode", "options"):
        now = getattr(settings, name)
        if settings.origin(name) != "default" and now is not None and not _within(name, now, asked):
            raise _conflict(name, dict(asked.extra), now, settings)


def _within(name: str, value: Any, asked: Asked) -> bool:
    """Whether a mode or options given to prepare are those the user had given to ``torch.compile``."""
    if name == "mode" and asked.name == "inductor":
        from . import dynamo

        options = {} if value == "default" else dynamo.mode_options(value, asked.dynamic)
        return bool(options == asked.extra.get("options", {}))
    if name == "options":
        return bool({key.replace("-", "_"): each for key, each in value.items()} == asked.extra.get("options", {}))
    return bool(value == asked.extra.get(name, "default"))


def _conflict(name: str, before: Any, now: Any, settings: Settings) -> SettingsError:
    return SettingsError(
        f"The model was compiled with {name}={before!r} before, and {name}={now!r} is asked for. Ask for one of them, "
        "or take the first off: model = torchrig.unwrap(model, keep_compile=False).",
        setting=name,
        origin=settings.origin(name),
    )


def _named(asked: Asked) -> Callable[..., Any]:
    """The user's backend as a callable with its name; mode and options are in it already."""

    def backend(graph: Any, example_inputs: Any) -> Any:
        return asked.backend(graph, example_inputs)

    for name in ("get_compiler_config", "reset"):  # what Dynamo asks of a backend besides
        if hasattr(asked.backend, name):
            setattr(backend, name, getattr(asked.backend, name))
    backend.__name__ = backend.__qualname__ = asked.name
    return backend


def _take_off_all(model: nn.Module, undos: list[Undo]) -> None:
    places = Places(model)
    for module in tuple(model.modules()):
        inner = _inside(module)
        if inner is not module and _is_compiled(module) and module is not model:
            undos.append(places.replace(module, inner))
    for module in model.modules():
        if _is_compiled(module):
            undos.append(placement.take_users_inplace(module))
