"""``torchrig plan``: what prepare would do to a model, without doing it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import click

from torchrig.errors import ArgumentError


@click.command()
@click.argument("factory", metavar="MODULE:FACTORY")
@click.option("--config", "file", type=click.Path(path_type=Path), help="A YAML file of settings.")
@click.option("--set", "pairs", metavar="NAME=VALUE", multiple=True, help="A single setting; may be given again.")
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


def build(factory: str) -> Any:
    """Build the model that ``"module:attribute"`` names; the module is looked for in the working directory too.

    Raises:
        ArgumentError: The name has no such form, or nothing of that name is there.
    """
    module, _, attribute = factory.partition(":")
    if not module or not attribute:
        raise ArgumentError(f"{factory!r} must have the form module:factory, such as train:build_model.")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module)
        for name in attribute.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise ArgumentError(f"{factory!r} cannot be found: {error}.") from error
    finally:
        sys.path.pop(0)
    from torch import nn

    return found if isinstance(found, nn.Module) else found()


def _parsed(pairs: tuple[str, ...]) -> dict[str, Any]:
    import yaml

    parsed = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ArgumentError(f"--set {pair!r} must have the form name=value.")
        parsed[name.strip()] = yaml.safe_load(value)
    return parsed


def _given(**options: str | None) -> dict[str, str]:
    return {name: value for name, value in options.items() if value is not None}
