"""A name -> one plugin, imported, checked and able to run here; and one plugin manager for each prepare.

Only what is selected is imported. A plugin that nobody selected can be broken without harm: what can be noticed without
importing it is a warning. Three variables steer the choice, each a list of plugins' or distributions' names between commas:

- ``TORCHRIG_PLUGINS``: only these are there (set and empty: none);
- ``TORCHRIG_DISABLE_PLUGINS``: these are not; ``*`` matches any text;
- ``TORCHRIG_STRICT_PLUGINS=1``: every plugin that is there is imported and checked, and a broken one is an error.

What torchrig's own distribution brings (``single``, ``no``, ``eager``, ...) always stays.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import pluggy

from . import catalogue, entrypoints, foreign, hookspecs
from .catalogue import BACKENDS, CORE, REMOVED, STRATEGIES, TRANSFORMS, canonical, normalise
from .entrypoints import Entry
from .errors import (
    AmbiguousPluginError,
    BackendError,
    BackendNotInstalled,
    BackendRemoved,
    BackendUnavailable,
    PluginError,
    PluginLoadError,
    SettingsError,
    StrategyNotInstalled,
    StrategyUnavailable,
    TorchrigError,
    TorchrigWarning,
)
from .hookspecs import BackendInfo, CompileRequest, StrategyInfo, TransformInfo

ONLY = "TORCHRIG_PLUGINS"
DISABLE = "TORCHRIG_DISABLE_PLUGINS"
STRICT = "TORCHRIG_STRICT_PLUGINS"

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
    raise _unknown(
        kind, name, registered, "A name registered with torch._dynamo.register_backend, or a callable, is accepted too."
    )


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

    A plugin given twice is registered once; a backend that has the name of a strategy or transform is registered as
    ``"<name> (backend)"``.

    Raises:
        PluginLoadError: A plugin implements a hook torchrig does not have, or with arguments the hook does not have.
    """
    wanted = tuple(dict.fromkeys(plugins))
    taken = {each.name for each in wanted if each.group != BACKENDS}
    manager = _empty_manager()
    for each in wanted:
        clash = each.group == BACKENDS and each.name in taken
        _register(manager, each.hooks, f"{each.name} (backend)" if clash else each.name)
    manager.check_pending()
    return manager


def check_request(info: BackendInfo, request: CompileRequest) -> None:
    """Compare the mode and the options' names with what the backend says it takes; values are the backend's to check.

    ``mode="default"`` is no mode at all, and suits every backend.

    Raises:
        SettingsError: Of ``"mode"`` or ``"options"``; without an origin, which the caller knows.
    """
    if isinstance(info, foreign.ForeignInfo):
        return  # looks at its function's signature itself
    mode = None if request.mode == "default" else request.mode
    if mode is not None:
        _check_mode(info, mode)
    if request.options:
        _check_options(info, request.options)
    if mode is not None and request.options:
        raise SettingsError(
            f"mode {mode!r} and options exclude each other, as they do in torch.compile: a mode is a set of options.",
            setting="options",
        )


def _check_mode(info: BackendInfo, mode: str) -> None:
    if not info.modes:
        raise SettingsError(f"Backend {info.name!r} takes no mode, and mode {mode!r} was asked for.", setting="mode")
    if mode not in info.modes:
        message = f"{mode!r} is no mode of backend {info.name!r}."
        raise SettingsError(message, setting="mode", choices=info.modes, nearest=_nearest(mode, info.modes))


def _check_options(info: BackendInfo, options: Iterable[str]) -> None:
    if info.options is None:
        raise SettingsError(f"Backend {info.name!r} takes no options: {', '.join(options)}.", setting="options")
    known = {name.replace("-", "_"): name for name in info.options()}
    for name in options:
        if name.replace("-", "_") not in known:
            choices = tuple(known.values()) if len(known) <= 20 else ()  # inductor has several hundred
            message = f"{name!r} is no option of backend {info.name!r}."
            raise SettingsError(message, setting="options", choices=choices, nearest=_nearest(name, known))


def _nearest(given: str, choices: Iterable[str]) -> str | None:
    from .values import nearest

    return nearest(given, choices)


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
        PluginLoadError: The probe itself raised.
    """
    try:
        return plugin.info.unavailable_reason()
    except (Exception, SystemExit) as error:
        raise broken(entry, error) from error


def broken(entry: Entry, cause: BaseException) -> PluginLoadError:
    """The error for a plugin that cannot be loaded: whose it is, what happened, and how to do without it."""
    kind = KINDS[entry.group]
    what = str(cause) if isinstance(cause, _NotAPlugin) else f"{type(cause).__name__}: {cause}"
    return PluginLoadError(
        f"The {kind.word} plugin {entry.name!r} of {entry.distribution} {entry.version} ({entry.value}) is broken: {what}. "
        f"Repair or remove {entry.distribution}, or switch the plugin off: {DISABLE}={entry.name}"
    )


class _NotAPlugin(Exception):
    """What was imported is not a plugin of the group; the message says why."""


def _import(entry: Entry) -> Any:
    module, attribute = entry.target()
    found: Any = importlib.import_module(module)
    for name in filter(None, attribute.split(".")):
        found = getattr(found, name)
    return found


def _described(kind: Kind, entry: Entry, hooks: object) -> Info:
    manager = _empty_manager()
    _register(manager, hooks, entry.name)
    manager.check_pending()
    implemented = {caller.name for caller in manager.get_hookcallers(hooks) or ()}
    for hook in ("describe", kind.hook):
        if hook not in implemented:
            raise _NotAPlugin(
                f"a {kind.word} must implement the hook {hook}(), and this {type(hooks).__name__} does not"
            )
    info: Info = manager.hook.describe()
    if not isinstance(info, kind.info):
        raise _NotAPlugin(f"describe() must return a {kind.info.__name__}, and returned {type(info).__name__}")
    if entry.name not in map(normalise, (info.name, *info.aliases)):
        raise _NotAPlugin(f"it calls itself {info.name!r}, and its entry point {entry.name!r}")
    return info


def _empty_manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def _register(manager: pluggy.PluginManager, hooks: object, name: str) -> None:
    try:
        manager.register(hooks, name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginLoadError(f"Plugin {name!r} does not fit torchrig's hooks: {error}") from error


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
        raise kind.unusable(
            f"The {kind.word} {name!r} of {having[0].distribution} is installed, and switched off by {switched_off(having[0])}."
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
    choices = sorted({*catalogue.known_names(kind.group), *more})
    return SettingsError(
        f"{name!r} is no {kind.word} that torchrig knows. {advice}".rstrip(),
        setting=kind.setting,
        choices=choices,
        nearest=_nearest(normalise(name), choices),
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
    told = [str(broken(entry, _NotAPlugin(reason))) for entry, reason in others if reason is not None]
    for message in (*told, *(f"{fault.distribution}: {fault.reason}." for fault in faults)):
        if message not in _told:
            _told.add(message)
            warnings.warn(message, TorchrigWarning, stacklevel=5)


def defect(entry: Entry) -> str | None:
    """What is wrong with an entry point, as far as that shows without importing anything."""
    try:
        module, _ = entry.target()
        missing = importlib.util.find_spec(module.partition(".")[0]) is None
    except ValueError as error:  # also find_spec's, for a module that has no __spec__ and is loaded
        return str(error) if "form module" in str(error) else None
    return f"there is no module {module.partition('.')[0]!r}" if missing else None
