"""An entry point -> the plugin it names, imported and checked to be one of its group."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from typing import Any, TypeAlias

import pluggy

from torchrig import hookspecs
from torchrig.catalogue import BACKENDS, STRATEGIES, TRANSFORMS, normalise
from torchrig.entrypoints import Entry
from torchrig.errors import (
    BackendNotInstalled,
    BackendUnavailable,
    PluginError,
    PluginLoadError,
    StrategyNotInstalled,
    StrategyUnavailable,
    TorchrigError,
)
from torchrig.hookspecs import BackendInfo, StrategyInfo, TransformInfo

DISABLE = "TORCHRIG_DISABLE_PLUGINS"

Info: TypeAlias = "BackendInfo | StrategyInfo | TransformInfo"


@dataclass(frozen=True)
class Plugin:
    """A plugin that was imported and checked.

    Args:
        name: The name it gives itself, normalised.
        group: Its entry-point group.
        distribution: The distribution that brings it; ``""`` for a callable or a name PyTorch registered.
        version: That distribution's version.
        hooks: The module or object with the ``hookimpl`` functions.
        info: What it says of itself.
    """

    name: str
    group: str
    distribution: str
    version: str
    hooks: object
    info: Info


@dataclass(frozen=True)
class Kind:
    """What the three groups differ in.

    Args:
        group: The entry-point group.
        word: What one of them is called; also the name of the setting that selects it.
        info: What ``describe`` returns.
        hook: The hook it cannot do without.
        missing: Raised when a known one is not installed.
        unusable: Raised when it is installed and cannot run here.
    """

    group: str
    word: str
    info: type[BackendInfo] | type[StrategyInfo] | type[TransformInfo]
    hook: str
    missing: type[TorchrigError]
    unusable: type[TorchrigError]

    @property
    def setting(self) -> str:
        """The name of the setting that selects one."""
        return "transforms" if self.word == "transform" else self.word


KINDS = {
    BACKENDS: Kind(BACKENDS, "backend", BackendInfo, "torch_compile_kwargs", BackendNotInstalled, BackendUnavailable),
    STRATEGIES: Kind(STRATEGIES, "strategy", StrategyInfo, "wrap_strategy", StrategyNotInstalled, StrategyUnavailable),
    TRANSFORMS: Kind(TRANSFORMS, "transform", TransformInfo, "transform", PluginError, PluginError),
}


def load(entry: Entry) -> Plugin:
    """Import what an entry point names, and check that it is a plugin of its group.

    Raises:
        PluginLoadError: It does not import, or is not one; the cause is chained.
    """
    kind = KINDS[entry.group]
    try:
        hooks = _import(entry)
        info = _described(kind, entry, hooks)
    except (Exception, SystemExit) as error:  # a plugin that calls sys.exit() at import must not end the process
        raise broken(entry, error) from error
    return Plugin(normalise(info.name), entry.group, entry.distribution, entry.version, hooks, info)


def unavailable_reason(entry: Entry, plugin: Plugin) -> str | None:
    """What the plugin's probe says.

    Raises:
        PluginLoadError: The probe itself raised, or answered with something else than a text or ``None``.
    """
    try:
        reason: object = plugin.info.unavailable_reason()
        if reason is None or (isinstance(reason, str) and reason.strip()):
            return reason
        raise NotAPlugin(f"its probe must return the reason as text, or None, and returned {reason!r:.80}")
    except (Exception, SystemExit) as error:
        raise broken(entry, error) from error


def broken(entry: Entry, cause: BaseException) -> PluginLoadError:
    """The error for a plugin that cannot be loaded: whose it is, what happened, and how to do without it."""
    kind = KINDS[entry.group]
    what = str(cause) if isinstance(cause, NotAPlugin) else f"{type(cause).__name__}: {cause}"
    return PluginLoadError(
        f"The {kind.word} plugin {entry.name!r} of {entry.distribution} {entry.version} ({entry.value}) is broken: "
        f"{what}. Repair or remove {entry.distribution}, or switch the plugin off: {DISABLE}={entry.name}"
    )


def defect(entry: Entry) -> str | None:
    """What is wrong with an entry point, as far as that shows without importing anything."""
    try:
        module, _ = entry.target()
    except ValueError as error:
        return str(error)
    top = module.partition(".")[0]
    found = top in sys.modules or importlib.util.find_spec(top) is not None
    return None if found else f"there is no module {top!r}"


class NotAPlugin(Exception):
    """What was imported is not a plugin of the group; the message says why."""


def _import(entry: Entry) -> Any:
    module, attribute = entry.target()
    found: Any = importlib.import_module(module)
    for name in filter(None, attribute.split(".")):
        found = getattr(found, name)
    return found


def _described(kind: Kind, entry: Entry, hooks: object) -> Info:
    manager = empty_manager()
    if type(hooks).__hash__ is None:
        raise NotAPlugin(
            "the object cannot be hashed, which pluggy needs; a dataclass can with frozen=True or eq=False"
        )
    manager.register(hooks, entry.name)
    manager.check_pending()
    implemented = {caller.name for caller in manager.get_hookcallers(hooks) or ()}
    for hook in ("describe", kind.hook):
        if hook not in implemented:
            raise NotAPlugin(f"a {kind.word} must implement the hook {hook}(), and it does not")
    info: Info = manager.hook.describe()
    if not isinstance(info, kind.info):
        raise NotAPlugin(f"describe() must return a {kind.info.__name__}, and returned {type(info).__name__}")
    if entry.name not in map(normalise, (info.name, *info.aliases)):
        raise NotAPlugin(f"it calls itself {info.name!r}, and its entry point {entry.name!r}")
    return info


def empty_manager() -> pluggy.PluginManager:
    """A manager that knows torchrig's hooks and has no plugins."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager
