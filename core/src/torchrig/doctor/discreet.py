"""Texts made fit to be shown to strangers: no home folder, no user's name, no secrets."""

from __future__ import annotations

import getpass
import re
from pathlib import Path
from typing import TypeVar

from torchrig.nested import map_leaves

T = TypeVar("T")

HIDDEN = "(set; not shown)"
_SECRET = re.compile(r"token|secret|passw|credential|private|auth|(^|_)(api_?)?key(_|$)", re.IGNORECASE)
_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")  # the user and password of an address


def hides(name: str) -> bool:
    """Whether what has this name is likely a secret."""
    return _SECRET.search(name) is not None


def shortened(value: T) -> T:
    """``value`` with the home folder and the user's name in paths replaced by ``~``, in every text in it."""
    home, user = _home(), _user()

    def shorten(leaf: object) -> object:
        return _shorten(leaf, home, user) if isinstance(leaf, str) else leaf

    return map_leaves(value, shorten)  # type: ignore[no-any-return]


def _shorten(text: str, home: str, user: str) -> str:
    if home:
        text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
    if user:  # as a part of a path, and at the end of one: /scratch/alice, /tmp/cache_alice
        text = re.sub(rf"(?<=[/\\_]){re.escape(user)}(?![\w-])", "~", text)
    return _LOGIN.sub("~", text)


def _home() -> str:
    try:
        home = str(Path.home())
    except RuntimeError:  # no such user
        return ""
    return "" if home == Path(home).anchor else home


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return ""
