"""``torchrig checkpoint``: look into a checkpoint, and take the model out of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click

from torchrig.errors import ArgumentError

_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}
_folder = click.argument("path", type=click.Path(path_type=Path))


@click.group()
def checkpoint() -> None:
    """Look into a checkpoint, or take the model out of it."""


@checkpoint.command()
@_folder
@click.option("--check", is_flag=True, help="Read every file and compare its checksum.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def info(path: Path, check: bool, as_json: bool) -> None:
    """Show what the checkpoint in the folder PATH holds."""
    from torchrig.checkpoint.summary import summary

    told = summary(path, check=check)
    if as_json:
        click.echo(json.dumps(told, indent=2))
        return
    for name, value in told.items():
        click.echo(f"{name.replace('_', ' '):<12} {_shown(value)}")


@checkpoint.command()
@_folder
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="The file to write, or a folder to write model.safetensors to. Default: the folder PATH-export.",
)
@click.option("--max-shard-size", metavar="SIZE", help="Write several files of at most SIZE each, such as 5GB.")
def export(path: Path, out: Path | None, max_shard_size: str | None) -> None:
    """Write the model of the checkpoint in the folder PATH as a safetensors file, with the bare model's keys.

    For a model of the transformers library config.json is written beside it, and from_pretrained takes the folder.
    """
    from torchrig.checkpoint.export import export as write

    limit = None if max_shard_size is None else _bytes(max_shard_size)
    written = write(path, _file(path, out), limit)
    for file in written.files:
        click.echo(file)
    if written.left_out:
        click.echo(f"Left out, as they are no tensors: {', '.join(written.left_out)}", err=True)


def _file(path: Path, out: Path | None) -> Path:
    target = path.absolute().with_name(f"{path.absolute().name}-export") if out is None else out
    return target if target.suffix == ".safetensors" and not target.is_dir() else target / "model.safetensors"


def _bytes(size: str) -> int:
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?|)B?", size.strip().upper())
    if matched is None or float(matched[1]) <= 0:
        raise ArgumentError(f"--max-shard-size {size!r} is no size. Give a number with KB, MB, GB, KiB, MiB or GiB.")
    return int(float(matched[1]) * _UNITS[matched[2]])


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} ({kind})" for name, kind in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
