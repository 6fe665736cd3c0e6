"""``torchrig plan``: what prepare would do to a model, without doing it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .factory import build
from .options import as_json, settings_of, settings_options

if TYPE_CHECKING:
    from torch import nn


@click.command()
@click.argument("factory", metavar="MODULE:FACTORY")
@settings_options
@click.option(
    "--world-size",
    type=click.IntRange(min=1),
    help="Also reckon what each of so many processes would keep and send. The model is built without memory.",
)
@click.option("--optimizer", default="AdamW", show_default=True, help="With --world-size: one of torch.optim's.")
@as_json
def plan(
    factory: str,
    file: Path | None,
    pairs: tuple[str, ...],
    strategy: str | None,
    backend: str | None,
    world_size: int | None,
    optimizer: str,
    as_json: bool,
) -> None:
    """Show the steps that prepare would take on the model that FACTORY() in MODULE returns.

    FACTORY may also be a module or an nn.Module class. The model is built, and not changed.
    """
    import torchrig

    settings = settings_of(file, pairs, strategy, backend)
    if world_size is None:
        made = torchrig.plan(build(factory), settings=settings)
        click.echo(made.to_json() if as_json else str(made))
        return
    from torchrig.simulation import simulate

    simulated = simulate(_build_without_memory(factory), world_size, optimizer=optimizer, settings=settings)
    click.echo(simulated.to_json() if as_json else f"{simulated.plan}\n\n{simulated}")


def _build_without_memory(factory: str) -> nn.Module:
    import torch

    with torch.device("meta"):
        return build(factory)
