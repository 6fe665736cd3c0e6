"""A name -> one plugin, imported, checked and able to run here; and one plugin manager for each prepare.

Only what is selected is imported. A plugin that nobody selected can be broken without harm: what can be noticed
without importing it is a warning. Three variables steer the choice:

- ``TORCHRIG_PLUGINS=a,b``: only these are there (set and empty: none);
- ``TORCHRIG_DISABLE_PLUGINS=x,*``: these are not;
- ``TORCHRIG_STRICT_PLUGINS=1``: every plugin that is there is imported and checked, and a broken one is an error.

The lists hold names of plugins or of distributions; ``*`` matches any text.

What torchrig's own distribution brings (``single``, ``no``, ``eager``, ...) always stays.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import pluggy

from torchrig import catalogue, entrypoints
from torchrig.catalogue import BACKENDS, CORE, REMOVED, STRATEGIES, TRANSFORMS, canonical, normalise
from torchrig.entrypoints import Entry
from torchrig.errors import (
    AmbiguousPluginError,
    BackendError,
    BackendNotInstalled,
    BackendRemoved,
    PluginLoadError,
    SettingsError,
    TorchrigWarning,
)
from torchrig.spelling import nearest

from . import foreign
from .loading import (
    DISABLE,
    KINDS,
    Kind,
    NotAPlugin,
    Plugin,
    broken,
    defect,
    empty_manager,
    load,
    unavailable_reason,
)
from .request import check_request

__all__ = [
    "Plugin",
    "ambiguous",
    "check_request",
    "load_backend",
    "load_strategy",
    "load_transform",
    "make_manager",
    "switched_off",
]

ONLY = "TORCHRIG_PLUGINS"

STRICT = "TORCHRIG_STRICT_PLUGINS"


def load_backend(name: str | Callable[..., Any]) -> Plugin:
    """The backend of that name, or a callable dressed as one.

    Args:
        name: An installed plugin's name, a catalogue alias, a name registered with PyTorch, or a callable as
            ``torch.compile(backend=...)`` takes.

    Raises:
        SettingsError: Nobody knows the name.
        BackendNotInstalled, BackendRemoved, BackendUnavailable: It is known, and it cannot be used here.
        PluginLoadError, AmbiguousPluginError: The plugin is broken, or two distributions claim the name.
    """
    if not isinstance(name, str) and not callable(name):
        raise SettingsError(f"{name!r} is neither a backend's name nor a callable.", setting="backend")
    if not isinstance(name, str):
        return _foreign(foreign.from_callable(name))
    kind, plain = KINDS[BACKENDS], normalise(name)
    found = _installed(kind, plain) or _installed(kind, canonical(plain))
    if found is not None:
        return _usable(kind, found)
    if plain in REMOVED:
        return _successor(plain)
    if catalogue.distribution_of(plain) is not None:
        raise BackendNotInstalled(_how_to_install(kind, canonical(plain)))
    registered = foreign.registered_names()
    if plain in registered:
        return _foreign(foreign.from_registered(registered[plain]))
    more = "A name registered with torch._dynamo.register_backend, or a callable, is accepted too."
    raise _unknown(kind, name, foreign.registered_names(debug=False), more)


def load_strategy(name: str) -> Plugin:
    """The strategy of that name.

    Raises:
        SettingsError: Nobody knows the name.
        StrategyNotInstalled, StrategyUnavailable: It is known, and it cannot be used here.
        PluginLoadError, AmbiguousPluginError: The plugin is broken, or two distributions claim the name.
    """
    return _load_by_name(KINDS[STRATEGIES], name)


def load_transform(name: str) -> Plugin:
    """The transform of that name.

    Raises:
        SettingsError: Nobody knows the name.
        PluginError: It is known, and not installed or not usable here.
        PluginLoadError, AmbiguousPluginError: The plugin is broken, or two distributions claim the name.
    """
    return _load_by_name(KINDS[TRANSFORMS], name)


def make_manager(plugins: Iterable[Plugin]) -> pluggy.PluginManager:
    """One manager with these plugins alone, registered in this order under their names.

    A plugin given twice is registered once. Names are unique within a group only: a plugin whose name one before it has
    is registered as ``"<name> (<group's word>)"``, as in ``"single (strategy)"``.

    Raises:
        PluginLoadError: A plugin implements a hook torchrig does not have, or with arguments the hook does not have.
    """
    wanted = tuple({id(each.hooks): each for each in plugins}.values())
    manager = empty_manager()
    for each in wanted:
        try:
            manager.register(each.hooks, _free_name(each, manager))
            manager.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:  # ValueError: it equals one that is registered
            raise PluginLoadError(f"Plugin {each.name!r} does not fit torchrig's hooks: {error}") from error
    return manager


def _free_name(plugin: Plugin, manager: pluggy.PluginManager) -> str:
    word = KINDS[plugin.group].word
    names = (plugin.name, f"{plugin.name} ({word})", *(f"{plugin.name} ({word} {count})" for count in range(2, 1000)))
    return next(name for name in names if not manager.has_plugin(name))


def switched_off(entry: Entry) -> str | None:
    """How a variable keeps this entry out (``"TORCHRIG_DISABLE_PLUGINS=x"``); ``None`` when none does."""
    if normalise(entry.distribution) == CORE:
        return None
    only = os.environ.get(ONLY)
    if only is not None and not _matches(entry, only):
        return f"{ONLY}={only}"
    disabled = os.environ.get(DISABLE, "")
    return f"{DISABLE}={disabled}" if _matches(entry, disabled) else None


def _matches(entry: Entry, listed: str) -> bool:
    patterns = [normalise(each) for each in listed.split(",") if each.strip()]
    return any(fnmatchcase(name, each) for name in (entry.name, normalise(entry.distribution)) for each in patterns)


def _load_by_name(kind: Kind, name: str) -> Plugin:
    plain = normalise(name)
    found = _installed(kind, plain)
    if found is not None:
        return _usable(kind, found)
    if catalogue.distribution_of(plain, kind.group) is not None:
        raise kind.missing(_how_to_install(kind, plain))
    raise _unknown(kind, name)


def _installed(kind: Kind, name: str) -> Entry | None:
    """The one entry of that name that is there; ``None`` when nothing installed has it."""
    entries, faults = entrypoints.scan()
    _notice(entries, faults, name)
    having = [entry for entry in entries if (entry.group, entry.name) == (kind.group, name)]
    here = [entry for entry in having if switched_off(entry) is None]
    if len(here) > 1:
        raise ambiguous(here)
    if having and not here:
        off = having[0]
        raise kind.unusable(
            f"The {kind.word} {name!r} of {off.distribution} is installed, and switched off by {switched_off(off)}."
        )
    return here[0] if here else None


def ambiguous(entries: Sequence[Entry]) -> AmbiguousPluginError:
    """The error for several distributions that claim one name."""
    claims = " and ".join(f"{entry.distribution} {entry.version} ({entry.value})" for entry in entries)
    other = next((entry for entry in entries if normalise(entry.distribution) != CORE), entries[0])
    return AmbiguousPluginError(
        f"The {KINDS[entries[0].group].word} {entries[0].name!r} is claimed by {claims}. "
        f"Uninstall one of them, or switch one off: {DISABLE}={other.distribution}"
    )


def _usable(kind: Kind, entry: Entry) -> Plugin:
    plugin = load(entry)
    reason = unavailable_reason(entry, plugin)
    if reason is not None:
        whose = f"{entry.distribution} {entry.version}"
        raise kind.unusable(f"The {kind.word} {entry.name!r} ({whose}) cannot be used here: {reason}")
    return plugin


def _successor(name: str) -> Plugin:
    removed = REMOVED[name]
    gone = f"Backend {name!r} is gone: PyTorch {removed.since} removed it ({removed.why})."
    try:
        plugin = load_backend(removed.successor)
    except BackendError as error:
        raise BackendRemoved(f"{gone} Its successor is {removed.successor!r}: {error}") from error
    warnings.warn(f"{gone} Its successor {removed.successor!r} is used instead.", TorchrigWarning, stacklevel=3)
    return plugin


def _how_to_install(kind: Kind, name: str) -> str:
    distribution = catalogue.distribution_of(name, kind.group)
    if distribution == CORE:
        return (
            f"The {kind.word} {name!r} is torchrig's own, and the torchrig that is installed does not bring it yet. "
            f"Choose another {kind.word}."
        )
    return f"{kind.word} {name!r} comes with {distribution}: pip install {distribution}"


def _unknown(kind: Kind, name: str, more: Iterable[str] = (), advice: str = "") -> SettingsError:

    choices = sorted({*catalogue.known_names(kind.group), *more} - REMOVED.keys())
    return SettingsError(
        f"{name!r} is no {kind.word} that torchrig knows. {advice}".rstrip(),
        setting=kind.setting,
        choices=choices,
        nearest=nearest(normalise(name), choices),
    )


def _foreign(backend: foreign.ForeignBackend) -> Plugin:
    return Plugin(backend.name, BACKENDS, "", "", backend, backend.describe())


def _strict() -> bool:
    return os.environ.get(STRICT, "").strip().casefold() not in ("", "0", "false", "no", "off")


_told: set[str] = set()


def _notice(entries: Iterable[Entry], faults: Iterable[entrypoints.Fault], selected: str) -> None:
    """Say once in a process which plugins are broken, as far as that shows without importing them."""
    enabled = [entry for entry in entries if switched_off(entry) is None]
    if _strict():
        for entry in enabled:
            load(entry)
        for fault in faults:
            raise PluginLoadError(f"{fault.distribution}: {fault.reason}.")
    others = [(entry, defect(entry)) for entry in enabled if entry.name != selected]
    told = [str(broken(entry, NotAPlugin(reason))) for entry, reason in others if reason is not None]
    for message in (*told, *(f"{fault.distribution}: {fault.reason}." for fault in faults)):
        if message not in _told:
            _told.add(message)
            warnings.warn(message, TorchrigWarning, stacklevel=5)
