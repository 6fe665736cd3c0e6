"""``TORCHRIG_*`` variables -> a layer of settings.

``TORCHRIG_MODE=max-autotune`` sets a value; ``__`` leads into a mapping, as in
``TORCHRIG_FSDP2__RESHARD_AFTER_FORWARD=true``.
Lists are JSON or words between commas, mappings are JSON. An empty variable counts as not set.
"""

from __future__ import annotations

import json
import os
from typing import Any

from torchrig.catalogue import known_names
from torchrig.errors import SettingsError
from torchrig.spelling import nearest

from .layers import OLD_REGIONS, Layer, is_plugin, put, tidy
from .sources import Source
from .values import REGION_WORDS, Spelled

PREFIX = "TORCHRIG_"
CONFIG_VARIABLE = "TORCHRIG_CONFIG"
# Variables that are read elsewhere, and are no settings.
OTHER_VARIABLES = frozenset(
    {CONFIG_VARIABLE, "TORCHRIG_PLUGINS", "TORCHRIG_DISABLE_PLUGINS", "TORCHRIG_STRICT_PLUGINS", "TORCHRIG_QUIET"}
)


class Environment(Source):
    """The variables of this process."""

    def layer(self) -> Layer:
        """Read every variable, those that set a whole mapping before those that set one key of it."""
        layer = Layer()
        ours = (name for name in os.environ if name.startswith(PREFIX) and name not in OTHER_VARIABLES)
        for name in sorted(ours, key=lambda each: (each.count("__"), each)):
            path = self._path(name)
            if os.environ[name].strip():
                put(layer, path, self._value(path, os.environ[name], name), _origin(name))
        return tidy(layer, self.fields)

    def _path(self, name: str) -> list[str]:
        path = name.removeprefix(PREFIX).lower().split("__")
        if name == name.upper() and all(path) and self._can_set(path):
            return path
        raise SettingsError(
            f"{_printable(name)} is no variable of torchrig's. Unset it, or correct its name.",
            origin=_origin(name),
            choices=sorted({*(PREFIX + each.upper() for each in (*self.fields, OLD_REGIONS)), *OTHER_VARIABLES}),
            nearest=self._nearest(name),
        )

    def _nearest(self, name: str) -> str | None:
        """The variable most like ``name``; the prefix, which all share, is left out of the comparison."""
        first, leads_on, inner = name.removeprefix(PREFIX).partition("__")
        others = (each.removeprefix(PREFIX) for each in OTHER_VARIABLES)
        likely = nearest(first, (*self.fields, OLD_REGIONS, *others))
        if likely is None and (leads_on or os.environ[name].lstrip().startswith("{")):  # meant as a plugin's block
            likely = nearest(first, known_names())
        if likely is None:
            return None
        takes_inner = inner and likely not in self.fields and is_plugin(likely)
        return PREFIX + likely.upper() + (f"__{inner}" if takes_inner else "")

    def _can_set(self, path: list[str]) -> bool:
        if path[0] in self.fields:
            return len(path) == 1 or self._spelled(path[0]).form == "mapping"
        return path == [OLD_REGIONS] or is_plugin(path[0])

    def _spelled(self, name: str) -> Spelled:
        if name not in self.fields:
            return Spelled() if name == OLD_REGIONS else Spelled("mapping")
        return next((each for each in self.fields[name].metadata if isinstance(each, Spelled)), Spelled())

    def _value(self, path: list[str], text: str, name: str) -> Any:
        if len(path) > 1:
            return _inner_value(text, name)
        spelled = self._spelled(path[0])
        if spelled.nullable and text.strip().lower() in ("none", "null"):
            return None
        if spelled.form == "list":
            return _list_value(text, name, REGION_WORDS if path[0] == "regions" else ())
        if spelled.form == "mapping" and path[0] != "on_problem":
            return _json(text, name)
        return _json(text, name) if text.lstrip().startswith("{") else text


def _list_value(text: str, name: str, words: tuple[str, ...]) -> Any:
    if text.lstrip().startswith("["):
        return _json(text, name)
    if text.strip().casefold() in words:
        return text
    return [item.strip() for item in text.split(",") if item.strip()]


def _inner_value(text: str, name: str) -> Any:
    """A key's value. Its type is not known here, so what JSON would read as a value is one, and the rest is text."""
    word = text.strip()
    if word.startswith(("{", "[")):
        return _json(word, name)
    if word in ("None", "null"):
        return None
    if word.casefold() in ("true", "false"):
        return word.casefold() == "true"
    try:
        return json.loads(word)
    except ValueError:
        return text


def _json(text: str, name: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{_printable(name)} is no valid JSON: {error}.", origin=_origin(name)) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key is there twice")
    return made


def _origin(name: str) -> str:
    return f"variable {_printable(name)}"


def _printable(name: str) -> str:
    """A variable's name with what cannot be printed escaped; the system lets a name be any bytes."""
    return name.encode("utf-8", "backslashreplace").decode()
