"""One layer of settings: values of one source, each with its origin, under the names that settings have.

A name that is no setting is refused here, where it is still known who wrote it. Values are checked in
:mod:`torchrig.settings`, once the layers are merged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from torchrig.catalogue import DISTRIBUTIONS, canonical, known_names
from torchrig.errors import SettingsError
from torchrig.spelling import nearest

from .values import PROBLEM_ACTIONS, Refused, flag, shown

BLOCKS = "blocks"  # the field that holds the plugins' own blocks; not a name that can be set
OLD_REGIONS = "use_regional_compilation"
PROBLEM_KINDS = ("region_not_compiled", "graph_break", "recompile_limit")
_DEEPEST = 32  # levels; no configuration nests so deep, and what holds itself has no end
_LARGEST = 10_000  # values


@dataclass
class Layer:
    """Values, and by dotted name where each came from.

    Args:
        values: By setting; plugins' blocks under their own names until :func:`tidy` puts them under :data:`BLOCKS`.
        origins: ``"argument"``, ``"variable TORCHRIG_MODE"``, ``"train.yaml:3"``, for every setting, key and list item.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)


class Copier:
    """Copies nested mappings and lists, and notes the origin of each of their members.

    Args:
        origin: The origin of all that is copied.
        origins: Where to note it.
    """

    def __init__(self, origin: str, origins: dict[str, str]) -> None:
        self._origin, self._origins = origin, origins
        self._count = 0

    def copy(self, value: Any, at: tuple[str, ...]) -> Any:
        """A copy of ``value``; ``at`` is the path of keys that leads to it."""
        self._count += 1
        if len(at) > _DEEPEST or self._count > _LARGEST:
            raise SettingsError(
                f"{at[0]} holds more than settings can: at most {_DEEPEST} levels and {_LARGEST:,} values.",
                setting=at[0],
                origin=self._origin,
            )
        if at:
            self._origins[".".join(at)] = self._origin
        if isinstance(value, Mapping):
            return {self._key(key, at): self.copy(inner, (*at, key)) for key, inner in value.items()}
        if isinstance(value, list) or type(value) is tuple:
            return type(value)(self.copy(item, (*at, str(index))) for index, item in enumerate(value))
        return value

    def _key(self, key: Any, at: tuple[str, ...]) -> str:
        if isinstance(key, str):
            return key
        raise SettingsError(f"{at[0]} has a key that is no text: {shown(key)}.", setting=at[0], origin=self._origin)


def put(layer: Layer, path: Sequence[str], value: Any, origin: str) -> None:
    """Set one value, making the mappings that lead to it.

    Args:
        layer: Where to.
        path: The setting, and the keys that lead into it.
        value: The value.
        origin: Where it came from.

    Raises:
        SettingsError: What the path leads through was set to a single value before.
    """
    inside = layer.values
    for index, key in enumerate(path[:-1]):
        inside = inside.setdefault(key, {})
        outer = ".".join(path[: index + 1])
        layer.origins.setdefault(outer, origin)
        if not isinstance(inside, dict):
            raise SettingsError(
                f"{path[-1]!r} is to be set in {outer}, which {layer.origins[outer]} sets to a single value.",
                setting=".".join(path),
                origin=origin,
            )
    spread = spread_on_problem(value) if list(path) == ["on_problem"] else value
    inside[path[-1]] = Copier(origin, layer.origins).copy(spread, tuple(path))


def tidy(layer: Layer, fields: Collection[str]) -> Layer:
    """Give every top-level name its place: a setting, the old name of one, or a plugin's block.

    Args:
        layer: As it was read.
        fields: The settings that have a name of their own.

    Raises:
        SettingsError: A name is none of these, or is there twice under two spellings.
    """
    made = Layer(origins=layer.origins)
    for name, value in layer.values.items():
        if name == "on_problem":
            _take_on_problem(made, value)
        elif name in fields:
            made.values[name] = value
        elif name == OLD_REGIONS:
            _take_old_regions(made, value, clash="regions" in layer.values)
        else:
            _take_block(made, name, value, fields)
    return made


def is_plugin(name: str) -> bool:
    """Whether a backend, strategy or transform is known by that name, installed or not."""
    plain = canonical(name)
    # Installed plugins are asked last: the scan of all metadata costs 20 ms.
    return any(plain in group for group in DISTRIBUTIONS.values()) or plain in known_names()


def spread_on_problem(value: Any) -> Any:
    """One action for all kinds of problem -> a mapping, so that a stronger layer can change one kind."""
    if isinstance(value, str) and value.strip().casefold() in PROBLEM_ACTIONS:
        return dict.fromkeys(PROBLEM_KINDS, value.strip().casefold())
    return value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value


def _take_on_problem(made: Layer, value: Any) -> None:
    spread = spread_on_problem(value)
    made.values["on_problem"] = spread
    for kind in spread if isinstance(spread, dict) else ():
        made.origins.setdefault(f"on_problem.{kind}", made.origins["on_problem"])


def _take_old_regions(made: Layer, value: Any, clash: bool) -> None:
    origin = made.origins[OLD_REGIONS]
    if clash:
        raise SettingsError(
            f"regions (from {made.origins['regions']}) and {OLD_REGIONS}, its old name, are both given. "
            "Give regions alone.",
            setting=OLD_REGIONS,
            origin=origin,
        )
    try:
        made.values["regions"] = "auto" if flag(value) else "whole"
    except Refused as error:
        raise refusal(error, OLD_REGIONS, origin) from None
    made.origins["regions"] = origin


def _take_block(made: Layer, name: str, value: Any, fields: Collection[str]) -> None:
    plugin, origin = canonical(name), made.origins[name]
    blocks = made.values.setdefault(BLOCKS, {})
    if plugin in fields or not is_plugin(plugin):
        raise _unknown_setting(name, value, origin, fields)
    if plugin in blocks:
        raise SettingsError(f"The block of plugin {plugin!r} is there twice.", setting=plugin, origin=origin)
    if value is not None and not isinstance(value, dict):
        raise SettingsError(
            f"{name} is the name of a plugin, so it must hold that plugin's own settings as a mapping, "
            f"and is {shown(value)}.",
            setting=plugin,
            origin=origin,
        )
    blocks[plugin] = value or {}
    if plugin != name:
        _rename_origins(made.origins, name, plugin)


def _rename_origins(origins: dict[str, str], name: str, plugin: str) -> None:
    for each, where in list(origins.items()):
        if each == name or each.startswith(f"{name}."):
            origins[plugin + each.removeprefix(name)] = where


def _unknown_setting(name: str, value: Any, origin: str, fields: Collection[str]) -> SettingsError:
    likely = nearest(name, fields)
    if likely is None and isinstance(value, dict):  # only a mapping can have been meant as a plugin's block
        likely = nearest(canonical(name), known_names())
    return SettingsError(
        f"There is no setting {shown(name)}.", setting=name, origin=origin, choices=sorted(fields), nearest=likely
    )


def refusal(error: Refused, setting: str, origin: str) -> SettingsError:
    """The error for a refused value, now that its setting and origin are known."""
    return SettingsError(
        f"{setting} {error.message}", setting=setting, origin=origin, choices=error.choices, nearest=error.nearest
    )
