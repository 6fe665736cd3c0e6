"""``"module:function"`` -> the function of that name, for settings that a file or a variable can give."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from .errors import SettingsError


def function(given: str | Callable[..., Any], setting: str, origin: str) -> Callable[..., Any]:
    """A function, looked up where it was given by name.

    Args:
        given: The function, or ``"module:function"``.
        setting: The setting that holds it, for messages.
        origin: Where the setting's value came from.

    Raises:
        SettingsError: The module does not import, or has no such function.
    """
    if not isinstance(given, str):
        return given
    module, _, name = given.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:
        message = f"{setting} names {given!r}, which cannot be imported: {type(error).__name__}: {error}."
        raise SettingsError(message, setting=setting, origin=origin) from error
    if not callable(found):
        raise SettingsError(f"{setting} names {given!r}, which is no function.", setting=setting, origin=origin)
    return found  # type: ignore[no-any-return]
