"""How messages list names."""

from __future__ import annotations

from collections.abc import Sequence

_SHOWN = 5


def listed(names: Sequence[str]) -> str:
    """``"'a', 'b', 'c' (9 in all)"``; ``"none"`` where there are none."""
    shown = ", ".join(repr(name) for name in names[:_SHOWN]) or "none"
    return shown if len(names) <= _SHOWN else f"{shown} ({len(names)} in all)"
