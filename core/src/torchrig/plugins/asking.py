"""One hook of one plugin, called, and its answer checked: what a plugin forgot is told where it was forgotten.

pluggy leaves out an answer that is ``None`` and looks at no type, so a missing ``return`` would show up far away.
"""

from __future__ import annotations

from typing import Any, TypeVar, overload

import pluggy

from torchrig.errors import PluginLoadError

from .loading import KINDS, Plugin

T = TypeVar("T")


@overload
def ask(manager: pluggy.PluginManager, plugin: Plugin, hook: str, expected: type[T], /, **arguments: Any) -> T: ...


@overload
def ask(
    manager: pluggy.PluginManager, plugin: Plugin, hook: str, expected: tuple[type[Any], ...], /, **arguments: Any
) -> Any: ...


def ask(
    manager: pluggy.PluginManager,
    plugin: Plugin,
    hook: str,
    expected: type[Any] | tuple[type[Any], ...],
    /,
    **arguments: Any,
) -> Any:
    """Call a hook of one plugin and of no other.

    Args:
        manager: The manager that the plugin is registered in.
        plugin: Whose hook.
        hook: The hook's name.
        expected: What the answer must be an instance of.
        **arguments: The hook's arguments.

    Returns:
        The plugin's own answer, also of a hook from which pluggy would collect a list.

    Raises:
        PluginLoadError: The answer is ``None`` or of another type.
    """
    others = [each for each in manager.get_plugins() if each is not plugin.hooks]
    answer = manager.subset_hook_caller(hook, others)(**arguments)
    if not _takes_first(manager, hook):
        answer = answer[0] if answer else None  # pluggy keeps no None in a list
    if not isinstance(answer, expected):
        raise _wrong(plugin, hook, expected, answer)
    return answer


def _takes_first(manager: pluggy.PluginManager, hook: str) -> bool:
    spec = getattr(manager.hook, hook).spec
    return bool(spec is not None and spec.opts.get("firstresult"))


def _wrong(plugin: Plugin, hook: str, expected: type[Any] | tuple[type[Any], ...], answer: object) -> PluginLoadError:
    wanted = expected if isinstance(expected, tuple) else (expected,)
    whose = f" ({plugin.distribution} {plugin.version})" if plugin.distribution else ""
    came = f"the class {answer.__qualname__}" if isinstance(answer, type) else type(answer).__name__
    return PluginLoadError(
        f"the hook {hook}() of {KINDS[plugin.group].word} {plugin.name!r}{whose} must return "
        f"{' or '.join(f'{_article(each.__name__)} {each.__name__}' for each in wanted)}, and returned {came}"
        + (": does it lack a return?" if answer is None else ".")
    )


def _article(word: str) -> str:
    return "an" if word[0] in "aeiouAEIOU" else "a"
