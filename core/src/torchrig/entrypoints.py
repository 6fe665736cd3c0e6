"""The installed entry points of torchrig's groups, read without importing anything and one distribution at a time.

``importlib.metadata.entry_points()`` raises for everybody when one distribution's file cannot be parsed;
here such a distribution is set aside as a :class:`Fault` and the others stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

BACKENDS = "torchrig.backends"
STRATEGIES = "torchrig.strategies"
TRANSFORMS = "torchrig.transforms"
GROUPS = (BACKENDS, STRATEGIES, TRANSFORMS)

_VALUE = re.compile(r"^(?P<module>\w+(\.\w+)*)\s*(:\s*(?P<attribute>\w+(\.\w+)*))?\s*(\[.*\])?$")


def normalise(name: str) -> str:
    """The one spelling of a name: ``" AOT-Eager "`` is ``"aot_eager"``."""
    return name.strip().casefold().replace("-", "_")


@dataclass(frozen=True)
class Entry:
    """One entry point: a name, where its plugin is, and the distribution that says so.

    Args:
        name: The name, normalised.
        group: The entry-point group.
        value: ``module`` or ``module:attribute``.
        distribution: The name of the distribution that declares it.
        version: That distribution's version.
    """

    name: str
    group: str
    value: str
    distribution: str
    version: str

    def target(self) -> tuple[str, str]:
        """The module and the attribute (``""`` for the module itself) that the value names.

        Raises:
            ValueError: The value is not of the form ``module`` or ``module:attribute``.
        """
        match = _VALUE.match(self.value.strip())
        if match is None:
            raise ValueError(f"{self.value!r} is not of the form module or module:attribute")
        return match["module"], match["attribute"] or ""


@dataclass(frozen=True)
class Fault:
    """A distribution that mentions torchrig's groups and cannot be read, or a line of it that cannot."""

    distribution: str
    reason: str


def scan() -> tuple[tuple[Entry, ...], tuple[Fault, ...]]:
    """Every entry of torchrig's groups, and the distributions and lines that could not be read.

    Of two copies of one distribution on ``sys.path``, the first is the one that counts, as it is for imports.
    """
    entries: list[Entry] = []
    faults: list[Fault] = []
    seen: set[str] = set()
    for distribution, text in _mentioning_torchrig():
        try:
            name, version = (_stated(distribution, field) for field in ("Name", "Version"))
        except Exception as error:  # another project's metadata: anything may be in it
            faults.append(Fault(_place(distribution), f"its metadata cannot be read: {error}"))
            continue
        if not name:
            faults.append(Fault(_place(distribution), "it has no name, for its METADATA is missing or states none"))
        elif normalise(name) not in seen:
            seen.add(normalise(name))
            lines = tuple(_entries(text, name, version))
            entries += (line for line in lines if isinstance(line, Entry))
            faults += (line for line in lines if isinstance(line, Fault))
    return tuple(entries), tuple(faults)


def _stated(distribution: metadata.Distribution, field: str) -> str:
    stated = distribution.metadata
    return str(stated[field]).strip() if field in stated else ""  # asking for one that is missing is deprecated


def _mentioning_torchrig() -> Iterator[tuple[metadata.Distribution, str]]:
    for distribution in metadata.distributions():
        try:
            text = distribution.read_text("entry_points.txt") or ""
        except (OSError, UnicodeDecodeError):
            continue  # whose it is cannot be told: not known to be ours
        if any(group in text for group in GROUPS):
            yield distribution, text


def _place(distribution: metadata.Distribution) -> str:
    path = getattr(distribution, "_path", None)
    return str(getattr(path, "name", None) or distribution)


def _entries(text: str, distribution: str, version: str) -> Iterator[Entry | Fault]:
    """Parse ``entry_points.txt``; the standard library's parser gives no way past one bad line."""
    group = ""
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if line.startswith("[") and line.endswith("]"):
            group = line[1:-1].strip()
        elif group in GROUPS and line and line[0] not in "#;":
            name, _, value = line.partition("=")
            if name.strip():
                yield Entry(normalise(name), group, value.strip(), distribution, version)
            else:
                yield Fault(distribution, f"line {number} of its entry_points.txt names no plugin: {line!r}")
