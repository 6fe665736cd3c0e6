"""``torchrig plan``: what prepare would do to a model, without doing it."""

from __future__ import annotations

from pathlib import Path

import click

from .factory import build
from .options import as_json, settings_of, settings_options


@click.command()
@click.argument("factory", metavar="MODULE:FACTORY")
@settings_options
@as_json
def plan(
    factory: str, file: Path | None, pairs: tuple[str, ...], strategy: str | None, backend: str | None, as_json: bool
) -> None:
    """Show the steps that prepare would take on the model that FACTORY() in MODULE returns.

    FACTORY may also be a module or an nn.Module class. The model is built, and not changed.
    """
    import torchrig

    settings = settings_of(file, pairs, strategy, backend)
    made = torchrig.plan(build(factory), settings=settings)
    click.echo(made.to_json() if as_json else str(made))
