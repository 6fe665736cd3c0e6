"""All that was found, as a person and a program read it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrig.errors import SettingsError

from . import discreet, folders, machine, obstacles

if TYPE_CHECKING:
    from torchrig.plugins.inventory import PluginDetail, PluginRow
    from torchrig.settings import Settings

    from .folders import Folder


class SettingRow(NamedTuple):
    """A setting with its value, as text, and its origin."""

    name: str
    value: str
    origin: str


@dataclass(frozen=True)
class Examination:
    """What ``torchrig doctor`` found. The home folder and the user's name in paths are ``~``.

    Args:
        machine: PyTorch, devices, processor, Python, platform.
        packages: Versions of the packages that matter.
        plugins: Every installed plugin, with its status and reason.
        details: What plugins say of their own tools.
        settings: The settings, each with its origin; empty where they cannot be read.
        settings_error: Why they cannot be read, or ``None``.
        environment: The variables that steer PyTorch and torchrig.
        folders: Where compiled code is kept.
        backend: The backend that a compile was judged for.
        because: Why that one.
        stops: What would stop a compile; empty where nothing would.
        doubts: What would not stop it, and may hide or spoil it.
        tried: Whether a small model was really compiled.
    """

    machine: Mapping[str, str]
    packages: Mapping[str, str]
    plugins: tuple[PluginRow, ...]
    details: tuple[PluginDetail, ...]
    settings: tuple[SettingRow, ...]
    settings_error: str | None
    environment: Mapping[str, str]
    folders: tuple[Folder, ...]
    backend: str
    because: str
    stops: tuple[str, ...]
    doubts: tuple[str, ...]
    tried: bool

    @property
    def ok(self) -> bool:
        """Whether a compile would run."""
        return not self.stops

    def to_json(self) -> str:
        """The examination as a JSON object, with ``ok``."""
        plain = {**asdict(self), "ok": self.ok}
        plain["settings"] = [row._asdict() for row in self.settings]
        plain["plugins"] = [row.to_dict() for row in self.plugins]
        return json.dumps(plain, indent=2)

    def __str__(self) -> str:
        return "\n\n".join(f"{title}\n{body}" for title, body in _sections(self))


def examine(find_settings: Callable[[], Settings], *, try_it: bool = False) -> Examination:
    """Look at everything. What cannot be looked at is told, and stops nothing.

    Args:
        find_settings: Makes the settings to judge; a :class:`SettingsError` of it becomes part of the examination.
        try_it: Whether to compile a small model as well, where nothing else was found that stops it.
    """
    from torchrig.plugins import inventory

    environment = machine.environment()  # first: importing Inductor sets a variable
    settings, error = _settings(find_settings)
    details = tuple(inventory.details())
    looked_at = tuple(folders.look_at(path, detail.name) for detail in details for path in detail.cache_dirs)
    backend, because = obstacles.backend_to_judge(settings)
    stops, doubts = obstacles.stops(settings, backend, looked_at)
    if error is not None:
        stops.insert(0, f"The settings cannot be read: {error}")
    tried = try_it and settings is not None and not stops
    if tried and settings is not None:
        stops += obstacles.tried(settings, backend)
    found = Examination(
        machine=machine.summary(),
        packages=machine.packages(),
        plugins=tuple(inventory.installed_rows()),
        details=details,
        settings=() if settings is None else _setting_rows(settings),
        settings_error=error,
        environment=environment,
        folders=looked_at,
        backend=backend,
        because=because,
        stops=tuple(stops),
        doubts=tuple(doubts),
        tried=tried,
    )
    return discreet.shortened(found)


def _settings(find_settings: Callable[[], Settings]) -> tuple[Settings | None, str | None]:
    try:
        return find_settings(), None
    except SettingsError as error:
        return None, str(error)


def _setting_rows(settings: Settings) -> tuple[SettingRow, ...]:
    from torchrig.settings.values import plain

    return tuple(SettingRow(row.name, _text(row.name, plain(row.value)), row.origin) for row in settings.rows())


def _text(name: str, value: Any) -> str:
    if discreet.hides(name) and value is not None:
        return discreet.HIDDEN
    return value if isinstance(value, str) else json.dumps(value)


def _sections(found: Examination) -> list[tuple[str, str]]:
    from torchrig.render import table

    plugins = [
        (row.name, row.kind, row.status, f"{row.distribution} {row.version}".strip(), row.reason)
        for row in found.plugins
    ]
    said = [
        (detail.name.partition(" ")[2], name, value) for detail in found.details for name, value in detail.facts.items()
    ]
    sections = [
        ("Machine", _listed({**found.machine, **found.packages})),
        ("Plugins", table(("name", "kind", "status", "distribution", "reason"), plugins)),
        ("Their tools", table(("plugin", "tool", "found"), said) if said else "  none told"),
        ("Compiled code is kept in", "\n".join(map(_folder_line, found.folders)) or "  no folder"),
        ("Variables", _listed(found.environment) or "  none set"),
        ("Settings", found.settings_error or table(("setting", "value", "from"), found.settings)),
        (f"A compile with backend {found.backend} ({found.because})", _verdict(found)),
    ]
    return [(title, body) for title, body in sections if body]


def _listed(pairs: Mapping[str, str]) -> str:
    width = max(map(len, pairs), default=0)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in pairs.items())


def _folder_line(folder: Folder) -> str:
    whose = f"{folder.files} files, {folder.megabytes} MB, owner {folder.owner}" if folder.exists else "not there yet"
    remarks = "".join(f"; {each}" for each in (folder.problem, folder.doubt) if each is not None)
    return f"  {folder.path} ({folder.of}): {whose}{remarks}"


def _verdict(found: Examination) -> str:
    well = "runs: a small model was compiled" if found.tried else "would run: nothing was found that stops it"
    lines = [f"  stopped: {each}" for each in found.stops] or [f"  {well}"]
    return "\n".join([*lines, *(f"  doubtful: {each}" for each in found.doubts)])
