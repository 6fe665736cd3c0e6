"""``torchrig config``: the settings as a prepare in this shell would find them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from torchrig.settings import Row, Settings


@click.group()
def config() -> None:
    """Settings, and where each came from."""


@config.command()
@click.option("--config", "file", metavar="FILE", help="A YAML file of settings, instead of TORCHRIG_CONFIG.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(file: str | None, as_json: bool) -> None:
    """Print every setting with its value and its origin."""
    rows = _settings(file).rows()
    click.echo(_json(rows) if as_json else _table(rows))


def _settings(file: str | None) -> Settings:
    from torchrig.settings import Settings

    return Settings() if file is None else Settings.from_yaml(file)


def _json(rows: list[Row]) -> str:
    from torchrig.settings.values import plain

    listed = [{"name": row.name, "value": plain(row.value), "origin": row.origin} for row in rows]
    return json.dumps(listed, indent=2)


def _table(rows: list[Row]) -> str:
    from torchrig.render import table
    from torchrig.settings.values import plain

    return table(("setting", "value", "from"), [(row.name, _text(plain(row.value)), row.origin) for row in rows])


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
