"""The ``torchrig`` command: one module a group, imported when the group is called."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import click

from torchrig.errors import SettingsError, TorchrigError

# command -> the module of this package it is an attribute of
COMMANDS = {
    "backends": "plugins",
    "checkpoint": "checkpoint",
    "config": "config",
    "doctor": "doctor",
    "explain": "explain",
    "plan": "plan",
    "plugins": "plugins",
}


class Commands(click.Group):
    """A group that imports a command when it is asked for, and prints torchrig's errors instead of a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands' names."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"{__name__}.{COMMANDS[cmd_name]}"), cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; exit 2 for a setting that cannot be used, 1 for any other error of torchrig's."""
        try:
            return super().invoke(ctx)
        except TorchrigError as error:
            click.echo(f"Error: {error}", err=True)
            sys.exit(2 if isinstance(error, SettingsError) else 1)


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from torchrig import __version__

        click.echo(f"torchrig {__version__}")
        ctx.exit()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_print_version, help="Print it.")
def main() -> None:
    """Compile and distribute PyTorch models in the right order."""
