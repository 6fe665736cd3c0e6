"""``torchrig plugins`` and ``torchrig backends``: what is installed, what could be, and what is wrong with it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from torchrig.plugins.inventory import PluginRow

_PLAIN_WIDTH = 1000
_COLOURS = {"ok": "green", "broken": "red", "ambiguous": "red", "unavailable": "yellow"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plugins(as_json: bool) -> None:
    """List the installed plugins. Each is imported, to see whether it works."""
    from torchrig.plugins.inventory import installed_rows

    _print(installed_rows(), ("name", "kind", "status", "distribution", "about"), as_json)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def backends(as_json: bool) -> None:
    """List the compile backends: those torchrig knows, and every other that is installed."""
    from torchrig.plugins.inventory import backend_rows

    _print(backend_rows(), ("name", "status", "distribution", "modes", "about"), as_json)


def _print(rows: Sequence[PluginRow], columns: Sequence[str], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps([row.to_dict() for row in rows], indent=2))
    else:
        _print_table(rows, columns)


def _print_table(rows: Sequence[PluginRow], columns: Sequence[str]) -> None:
    if not sys.stdout.isatty():  # one line a row, however wide: to be searched and cut
        from torchrig.render import table as plain_table

        click.echo(plain_table(columns, [tuple(_cells(row)[each] for each in columns) for row in rows], _PLAIN_WIDTH))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in ("name", "status"))
    for row in rows:
        cells = _cells(row)
        table.add_row(
            *(Text(cells[each], _COLOURS.get(row.status, "") if each == "status" else "") for each in columns)
        )
    console.print(table)


def _cells(row: PluginRow) -> dict[str, str]:
    return {
        "name": row.name,
        "kind": row.kind,
        "status": row.status,
        "distribution": f"{row.distribution} {row.version}".strip(),
        "modes": ", ".join(row.modes),
        "about": row.reason or row.summary,
    }
