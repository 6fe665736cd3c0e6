"""The valid word that somebody probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST_COMPARED = 64  # difflib's time grows with the square of the length; no name is longer


def nearest(value: object, choices: Iterable[str]) -> str | None:
    """The choice most like ``value``, or ``None`` when none is like it."""
    if not isinstance(value, str):
        return None
    by_folded = {each.casefold(): each for each in choices}
    close = difflib.get_close_matches(value.casefold()[:_LONGEST_COMPARED], by_folded, 1, cutoff=0.65)
    return by_folded[close[0]] if close else None
