"""``torchrig plan``: what prepare would do to a model, without doing it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from torchrig.errors import ArgumentError

from .factory import build


@click.command()
@click.argument("factory", metavar="MODULE:FACTORY")
@click.option("--config", "file", type=click.Path(path_type=Path), help="A YAML file of settings.")
@click.option(
    "--set",
    "pairs",
    metavar="NAME=VALUE",
    multiple=True,
    help="A single setting; may be given again. VALUE is read as in a YAML file, NAME.KEY or NAME__KEY sets one key.",
)
@click.option("--strategy", help="The strategy; short for --set strategy=...")
@click.option("--backend", help="The compile backend; short for --set backend=...")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(
    factory: str, file: Path | None, pairs: tuple[str, ...], strategy: str | None, backend: str | None, as_json: bool
) -> None:
    """Show the steps that prepare would take on the model that FACTORY() in MODULE returns.

    FACTORY may also be a module or an nn.Module class. The model is built, and not changed.
    """
    import torchrig

    overrides = {**_parsed(pairs), **_given(strategy=strategy, backend=backend)}
    model = build(factory)
    settings = torchrig.Settings(**overrides) if file is None else torchrig.Settings.from_yaml(file, **overrides)
    made = torchrig.plan(model, settings=settings)
    click.echo(made.to_json() if as_json else str(made))


def _parsed(pairs: tuple[str, ...]) -> dict[str, Any]:
    """The settings that ``--set`` gives; a whole mapping is set before a key in it, as with variables."""
    from torchrig.settings.layers import Layer, put
    from torchrig.settings.yamlfile import parse_value

    layer = Layer()
    for path, name, value in sorted((_split(pair) for pair in pairs), key=lambda each: len(each[0])):
        put(layer, path, parse_value(value, f"--set {name}"), f"--set {name}")
    return layer.values


def _split(pair: str) -> tuple[list[str], str, str]:
    """``"on_problem.graph_break=raise"`` -> the path of names, the name as given, and the value's text."""
    given, equals, value = pair.partition("=")
    name = given.strip()
    path = name.replace("__", ".").split(".")
    if path[0] == "options":  # its keys have dots of their own
        path = name.replace("__", ".", 1).split(".", 1)
    if not equals or not all(path):
        raise ArgumentError(f"--set {pair!r} must have the form name=value.")
    return path, name, value


def _given(**options: str | None) -> dict[str, str]:
    return {name: value for name, value in options.items() if value is not None}
