"""Every plugin there is or could be, one row each: what ``torchrig plugins`` and ``torchrig backends`` show.

Unlike a prepare, it imports every plugin, each in isolation, so that a broken one is a row and no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torchrig import entrypoints
from torchrig.catalogue import ALIASES, BACKENDS, CORE, DISTRIBUTIONS, REMOVED, DynamoBackend, normalise
from torchrig.entrypoints import Entry, Fault
from torchrig.errors import PluginLoadError
from torchrig.hookspecs import BackendInfo

from .loading import KINDS, load, unavailable_reason
from .selection import ambiguous, switched_off


@dataclass(frozen=True)
class PluginRow:
    """One plugin, installed or not.

    Args:
        name: The name it is selected by.
        kind: ``"backend"``, ``"strategy"`` or ``"transform"``; ``""`` for a distribution that cannot be read.
        status: ``"ok"``, ``"unavailable"``, ``"broken"``, ``"disabled"``, ``"ambiguous"``, ``"removed"`` or
            ``"not installed"``.
        distribution: The distribution that brings it, or would.
        version: The installed version.
        summary: What it says of itself.
        modes: The modes it takes, if it is a backend.
        reason: Why its status is not ``"ok"``, and what to do.
    """

    name: str
    kind: str
    status: str
    distribution: str
    version: str = ""
    summary: str = ""
    modes: tuple[str, ...] = ()
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The row as plain values."""
        return {**asdict(self), "modes": list(self.modes)}


def catalogue_rows() -> list[PluginRow]:
    """A row for every installed plugin, every distribution that cannot be read, and every name of the catalogue."""
    entries, faults = entrypoints.scan()
    rows = [_row(entry, entries) for entry in entries]
    rows += [_fault_row(fault) for fault in faults]
    rows += _absent(rows)
    kinds = [kind.word for kind in KINDS.values()]
    return sorted(rows, key=lambda row: (kinds.index(row.kind) if row.kind else len(kinds), row.name, row.distribution))


def installed_rows() -> list[PluginRow]:
    """The rows of what is installed, broken or not."""
    return [row for row in catalogue_rows() if row.status not in ("removed", "not installed")]


@dataclass(frozen=True)
class PluginDetail:
    """What an installed plugin says of its own tools.

    Args:
        name: The plugin, with its kind: ``"backend inductor"``.
        facts: What its ``facts`` says; what went wrong, where asking failed.
        cache_dirs: The folders it keeps compiled code in.
    """

    name: str
    facts: Mapping[str, str]
    cache_dirs: tuple[str, ...] = ()


def details() -> list[PluginDetail]:
    """The details of every plugin that loads and has some to tell, whether it can run here or not."""
    entries, _ = entrypoints.scan()
    found = [_detail(entry) for entry in entries if switched_off(entry) is None]
    return [each for each in found if each is not None and (each.facts or each.cache_dirs)]


def backend_rows() -> list[PluginRow]:
    """The rows of backends: every :class:`DynamoBackend` in its order, then every other that is installed."""
    rows = [row for row in catalogue_rows() if row.kind == "backend"]
    known = [member.value for member in DynamoBackend]
    first = sorted((row for row in rows if row.name in known), key=lambda row: known.index(row.name))
    return first + [row for row in rows if row.name not in known and row.status != "not installed"]


def _row(entry: Entry, entries: Iterable[Entry]) -> PluginRow:
    off = switched_off(entry)
    if off is not None:
        return _entry_row(entry, "disabled", reason=f"switched off by {off}")
    rivals = [each for each in entries if (each.group, each.name) == (entry.group, entry.name)]
    here = [each for each in rivals if switched_off(each) is None]
    if len(here) > 1:
        return _entry_row(entry, "ambiguous", reason=str(ambiguous(here)))
    try:
        plugin = load(entry)
        reason = unavailable_reason(entry, plugin)
    except PluginLoadError as error:
        return _entry_row(entry, "broken", reason=str(error))
    status = "ok" if reason is None else "unavailable"
    return _entry_row(entry, status, summary=plugin.info.summary, modes=_modes(plugin.info), reason=reason or "")


def _entry_row(
    entry: Entry, status: str, *, summary: str = "", modes: tuple[str, ...] = (), reason: str = ""
) -> PluginRow:
    word = KINDS[entry.group].word
    return PluginRow(entry.name, word, status, entry.distribution, entry.version, summary, modes, reason)


def _fault_row(fault: Fault) -> PluginRow:
    return PluginRow("", "", "broken", fault.distribution, reason=fault.reason)


def _detail(entry: Entry) -> PluginDetail | None:
    name = f"{KINDS[entry.group].word} {entry.name}"
    try:
        info = load(entry).info
    except PluginLoadError:  # it has a row of its own
        return None
    if normalise(info.name) != entry.name:  # an alias, of which all is told under its name
        return None
    try:
        facts = {str(key): str(value) for key, value in info.facts().items()}
        folders = tuple(map(str, info.cache_dirs())) if isinstance(info, BackendInfo) else ()
    except (Exception, SystemExit) as error:
        return PluginDetail(name, {"facts": f"asking for them raised {type(error).__name__}: {error}"})
    return PluginDetail(name, facts, folders)


def _modes(info: object) -> tuple[str, ...]:
    return info.modes if isinstance(info, BackendInfo) else ()


def _absent(rows: Iterable[PluginRow]) -> list[PluginRow]:
    """Rows for the catalogue's names that nothing installed has."""
    there = {(row.kind, row.name): row for row in rows}
    absent = [
        PluginRow(name, KINDS[group].word, "not installed", distribution, reason=_advice(distribution))
        for group, names in DISTRIBUTIONS.items()
        for name, distribution in names.items()
        if (KINDS[group].word, name) not in there
    ]
    known = there | {(row.kind, row.name): row for row in absent}
    aliases = [name for name in ALIASES if ("backend", name) not in there]
    absent += [_alias_row(name, known["backend", ALIASES[name]]) for name in aliases]
    return absent + [_removed_row(name) for name in REMOVED if ("backend", name) not in there]


def _advice(distribution: str) -> str:
    return "not part of this torchrig yet" if distribution == CORE else f"pip install {distribution}"


def _alias_row(name: str, row: PluginRow) -> PluginRow:
    reason = f"another name of {row.name}" + (f"; {row.reason}" if row.reason else "")
    return PluginRow(name, row.kind, row.status, row.distribution, row.version, row.summary, row.modes, reason)


def _removed_row(name: str) -> PluginRow:
    removed = REMOVED[name]
    brings = DISTRIBUTIONS[BACKENDS][removed.successor]
    reason = f"PyTorch {removed.since} removed it: {removed.why}; its successor is {removed.successor} ({brings})"
    return PluginRow(name, "backend", "removed", "", reason=reason)
