"""Tables for people, as plain text: no ANSI, whatever the terminal."""

from __future__ import annotations

import io
from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]], width: int = 120) -> str:
    """A table of ``rows`` under ``head``, at most ``width`` columns wide."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    drawn = Table(*head, box=box.SIMPLE, pad_edge=False)
    for row in rows:
        drawn.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=width, no_color=True, highlight=False, markup=False).print(drawn)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")
