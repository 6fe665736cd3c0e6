"""The options that say with which settings a command works, the same for every command that has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from torchrig.errors import ArgumentError

if TYPE_CHECKING:
    from torchrig.settings import Settings

F = TypeVar("F", bound=Callable[..., Any])

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")

_SETTINGS = (
    click.option("--config", "file", type=click.Path(path_type=Path), help="A YAML file of settings."),
    click.option(
        "--set",
        "pairs",
        metavar="NAME=VALUE",
        multiple=True,
        help="A single setting; may be given again. VALUE is read as in a YAML file, NAME.KEY or NAME__KEY sets one "
        "key.",
    ),
    click.option("--strategy", help="The strategy; short for --set strategy=..."),
    click.option("--backend", help="The compile backend; short for --set backend=..."),
)


def settings_options(command: F) -> F:
    """Give a command the parameters ``file``, ``pairs``, ``strategy`` and ``backend``, for :func:`settings_of`."""
    for option in reversed(_SETTINGS):
        command = option(command)
    return command


def settings_of(file: Path | None, pairs: tuple[str, ...], strategy: str | None, backend: str | None) -> Settings:
    """The settings that the options ask for, over those of the environment.

    Raises:
        SettingsError: A setting cannot be used; names where it came from.
        ArgumentError: A ``--set`` has no ``=``.
    """
    from torchrig.settings import Settings

    overrides = {**parsed(pairs), **_given(strategy=strategy, backend=backend)}
    return Settings(**overrides) if file is None else Settings.from_yaml(file, **overrides)


def parsed(pairs: tuple[str, ...]) -> dict[str, Any]:
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
