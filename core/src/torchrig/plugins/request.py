"""What a request asks of a backend, against what the backend says it takes."""

from __future__ import annotations

from collections.abc import Iterable

from torchrig.errors import SettingsError
from torchrig.hookspecs import BackendInfo, CompileRequest
from torchrig.spelling import nearest

from .foreign import ForeignInfo

_MOST_LISTED = 20  # choices in a message; inductor has several hundred options


def check_request(info: BackendInfo, request: CompileRequest) -> None:
    """Compare the mode and the options' names with what the backend says it takes; values are the backend's to check.

    ``mode="default"`` is no mode at all, and suits every backend.

    Raises:
        SettingsError: Of ``"mode"`` or ``"options"``; without an origin, which the caller knows.
    """
    if isinstance(info, ForeignInfo):
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
        raise SettingsError(message, setting="mode", choices=info.modes, nearest=nearest(mode, info.modes))


def _check_options(info: BackendInfo, options: Iterable[str]) -> None:
    if info.options is None:
        raise SettingsError(f"Backend {info.name!r} takes no options: {', '.join(options)}.", setting="options")
    known = {name.replace("-", "_"): name for name in info.options()}
    for name in options:
        if name.replace("-", "_") not in known:
            choices = tuple(known.values()) if len(known) <= _MOST_LISTED else ()
            message = f"{name!r} is no option of backend {info.name!r}."
            raise SettingsError(message, setting="options", choices=choices, nearest=nearest(name, known))
