"""What a checkpoint holds, told without a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .leaves import MARK
from .loading import Opened, open_checkpoint


def summary(path: Path, *, check: bool = False) -> dict[str, Any]:
    """What a checkpoint holds, as plain values.

    Args:
        path: The folder of the checkpoint.
        check: Whether to read every file and compare its checksum; otherwise only the small ones are.

    Raises:
        CheckpointError: There is no complete checkpoint, or a file is damaged.
    """
    opened = open_checkpoint(path, slice(None) if check else slice(0))
    manifest, tree = opened.manifest, opened.tree
    told = ("model", "strategy", "backend", "world_size", "torchrig", "torch")
    return {
        **{name: manifest[name] for name in told},
        "parameters": _elements(opened, tree["model"]),
        "keys": len(tree["model"]),
        "optimizers": [each["kind"] for each in tree["optimizers"]],
        "extras": {name: tree["objects"].get(name, "value") for name in tree["extra"]},
        "files": len(manifest["files"]),
        "bytes": sum(each["size"] for each in manifest["files"].values()),
        "checked": check,
    }


def _elements(opened: Opened, model: Mapping[str, Any]) -> int:
    """How many numbers the model has, buffers included; those it has under two keys once."""
    keys = {value[MARK] for value in model.values() if isinstance(value, dict) and MARK in value}
    return sum(opened.reader.tensor(key).size.numel() for key in keys)
