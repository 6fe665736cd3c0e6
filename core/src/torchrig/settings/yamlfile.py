"""YAML text -> plain values, and the line of every key.

Scalars are read as YAML 1.2's core schema reads them, not as PyYAML does by default: there ``backend: no`` is the
boolean false, ``1e-4`` is text, and ``12:30`` is the number 750.
Parsing stops at the node graph (``yaml.compose``), for that is where the lines still are; no tag constructs an object.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from torchrig.errors import SettingsError

from .values import shown

_DEEPEST = 32  # levels; no configuration nests so deep
_LARGEST = 10_000  # values; a few nested aliases can stand for billions
_TAG = "tag:yaml.org,2002:"

_WORDS: dict[str, Any] = {"true": True, "false": False, "": None, "~": None, "null": None}


class _CoreLoader(yaml.SafeLoader):
    """PyYAML's parser with the implicit types of YAML 1.2's core schema."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 -- PyYAML's own attribute


for _name, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("merge", r"<<", "<"),
):
    _CoreLoader.add_implicit_resolver(_TAG + _name, re.compile(rf"^(?:{_pattern})$"), list(_first))


def _integer(text: str) -> int:
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


def _float(text: str) -> float:
    return float(re.sub(r"\.(inf|nan)$", r"\1", text.lower()))


_SCALARS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "merge": str,
    "bool": lambda text: _WORDS[text.lower()],
    "null": lambda text: _WORDS[text.lower()],
    "int": _integer,
    "float": _float,
}


def read(path: str, named_by: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Read a file of settings.

    Args:
        path: The file.
        named_by: Where the path came from, for the error when it cannot be read.

    Returns:
        The values; and for every key and list item, by its dotted name, where it stands: ``"train.yaml:3"``.

    Raises:
        SettingsError: The file cannot be read, is no YAML, is no mapping, or holds a key twice.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is not UTF-8 text: {error.reason}.", origin=f"{path}:1") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SettingsError(f"The file of settings {shown(path)} cannot be read: {reason}.", origin=named_by) from None
    return parse(text, path)


def parse(text: str, path: str) -> tuple[dict[str, Any], dict[str, str]]:
    """As :func:`read`, from text; ``path`` is what origins call the file."""
    root = _compose(text, path)
    if root is None:
        return {}, {}
    builder = _Builder(path)
    values = builder.value(root, ())
    if values is None:
        return {}, {}
    if not isinstance(values, dict):
        raise builder.error("the file must be a mapping from settings to values", root)
    return values, builder.origins


def parse_value(text: str, origin: str) -> Any:
    """One value, read as it would be in a file.

    Args:
        text: The value as YAML.
        origin: Where the text came from.

    Raises:
        SettingsError: It is no YAML.
    """
    try:
        root = _compose(text, origin)
        return None if root is None else _Builder(origin).value(root, ())
    except SettingsError as error:
        error.origin = origin  # without the line
        raise


def _compose(text: str, path: str) -> yaml.Node | None:
    try:
        root: yaml.Node | None = yaml.compose(text, Loader=_CoreLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 1
        what = error.problem or error.context or "it cannot be parsed"
        raise SettingsError(f"{path} is no valid YAML: {what}.", origin=f"{path}:{line}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise SettingsError(f"{path} is no valid YAML: {error.reason}.", origin=f"{path}:{line}") from None
    except (RecursionError, ValueError, IndexError) as error:
        # PyYAML recurses once a level, and its scanner lets some malformed escapes through as these.
        raise SettingsError(f"{path} is no valid YAML: {type(error).__name__}.", origin=f"{path}:1") from None
    return root


class _Builder:
    """Walks the node graph once, noting where each value stands."""

    def __init__(self, path: str) -> None:
        self.origins: dict[str, str] = {}
        self._path = path
        self._count = 0

    def error(self, message: str, node: yaml.Node) -> SettingsError:
        """The error for something that stands at ``node``."""
        return SettingsError(f"{self._path}: {message}.", origin=self._where(node))

    def value(self, node: yaml.Node, at: tuple[str, ...]) -> Any:
        """The value of a node; ``at`` is the path of keys that leads to it."""
        self._count += 1
        if len(at) > _DEEPEST:
            raise self.error(f"values are nested more than {_DEEPEST} levels deep", node)
        if self._count > _LARGEST:
            raise self.error(f"there are more than {_LARGEST:,} values, aliases counted where they are used", node)
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self._mapping(node, at)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [self._item(item, (*at, str(index))) for index, item in enumerate(node.value)]
        return self._scalar(node)

    def _item(self, node: yaml.Node, at: tuple[str, ...]) -> Any:
        self.origins[".".join(at)] = self._where(node)
        return self.value(node, at)

    def _mapping(self, node: yaml.MappingNode, at: tuple[str, ...]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, (key, inner) in self._entries(node, len(at)).items():
            self.origins[".".join((*at, name))] = self._where(key)
            made[name] = self.value(inner, (*at, name))
        return made

    def _entries(self, node: yaml.MappingNode, depth: int) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """The mapping's own entries, over those that ``<<`` merges into it."""
        own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, inner in node.value:
            if key.tag == _TAG + "merge":
                for base in self._bases(inner, depth):
                    merged = {**self._entries(base, depth + 1), **merged}
                continue
            name = self._key(key)
            if name in own:
                raise self.error(f"the key {shown(name)} is there twice, first in line {_line(own[name][0])}", key)
            own[name] = (key, inner)
        return {**merged, **own}

    def _bases(self, node: yaml.Node, depth: int) -> Iterator[yaml.MappingNode]:
        for base in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            self._count += 1
            if not isinstance(base, yaml.MappingNode):
                raise self.error("'<<' merges mappings only", base)
            if depth > _DEEPEST or self._count > _LARGEST:
                raise self.error("'<<' merges too many mappings", base)
            yield base

    def _key(self, node: yaml.Node) -> str:
        key = self._scalar(node) if isinstance(node, yaml.ScalarNode) else None
        if isinstance(key, str):
            return key
        given = shown(node.value) if isinstance(node, yaml.ScalarNode) else "a list or a mapping"
        raise self.error(f"a key must be text, and is {given}", node)

    def _scalar(self, node: yaml.Node) -> Any:
        kind = node.tag.removeprefix(_TAG)
        if not isinstance(node, yaml.ScalarNode) or kind not in _SCALARS:
            raise self.error(f"the tag {shown(node.tag)} cannot be used here", node)
        try:
            return _SCALARS[kind](node.value)
        except (ValueError, KeyError):
            raise self.error(f"{shown(node.value)} is no valid {kind}", node) from None

    def _where(self, node: yaml.Node) -> str:
        return f"{self._path}:{_line(node)}"


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
