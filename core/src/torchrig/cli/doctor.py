"""``torchrig doctor``: everything a bug report needs, and what would stop a compile here."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from .options import as_json, settings_of, settings_options


@click.command()
@settings_options
@click.option("--try", "try_it", is_flag=True, help="Compile a small model as well, to be sure; may take a minute.")
@as_json
def doctor(
    file: Path | None,
    pairs: tuple[str, ...],
    strategy: str | None,
    backend: str | None,
    try_it: bool,
    as_json: bool,
) -> None:
    """Show what a bug report needs: PyTorch, devices, compilers, plugins, settings, variables, caches.

    The home folder and the user's name in paths are shown as ~, secrets are not shown. No model is needed, and
    nothing is compiled without --try.

    Exits with 1 where something would stop a compile with the settings as they are; the end of the output says what.
    """
    from torchrig.doctor import examine

    found = examine(lambda: settings_of(file, pairs, strategy, backend), try_it=try_it)
    click.echo(found.to_json() if as_json else str(found))
    sys.exit(0 if found.ok else 1)
