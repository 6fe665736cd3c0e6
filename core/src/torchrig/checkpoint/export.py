"""A checkpoint's model as safetensors files, made in one process: for ``load_state_dict`` and for other libraries."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchrig.errors import CheckpointError

from .leaves import MARK
from .loading import Opened, open_checkpoint
from .storage import Target

_CONFIGS = ("config", "generation_config")  # of the transformers library, which looks for <name>.json


@dataclass(frozen=True)
class Exported:
    """What an export wrote.

    Args:
        files: The files, the weights first.
        left_out: Keys of the model that are no tensors; safetensors has no place for them.
    """

    files: tuple[Path, ...]
    left_out: tuple[str, ...]


def export(path: Path, out: Path, max_shard_size: int | None = None) -> Exported:
    """Write the model of a checkpoint to a safetensors file, under the bare model's keys.

    Parameters that are one in the model are written under each of their keys, so that ``load_state_dict(strict=True)``
    finds all. Where the model has a configuration as models of the transformers library do, it is written beside it,
    and ``from_pretrained`` takes the folder if the file is called ``model.safetensors``.

    Args:
        path: The folder of the checkpoint.
        out: The file to write; its folder is made where it is not there.
        max_shard_size: In bytes. A larger model is written to several files, ``model-00001-of-00003.safetensors`` and
            so on, and an index, ``model.safetensors.index.json``. ``None`` writes one file in any case.

    Raises:
        CheckpointError: There is no complete checkpoint, or a file cannot be written.
    """
    opened = open_checkpoint(path)
    saved: Mapping[str, Any] = opened.tree["model"]
    stored = {key: value[MARK] for key, value in saved.items() if isinstance(value, dict) and MARK in value}
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        files = [*_write(opened, stored, out, max_shard_size), *_write_configs(opened.manifest, out.parent)]
    except OSError as error:
        raise CheckpointError(f"Exporting {path} to {out} failed: {error}.") from error
    return Exported(tuple(files), tuple(key for key in saved if key not in stored))


def _write(opened: Opened, stored: Mapping[str, str], out: Path, limit: int | None) -> Iterator[Path]:
    sizes = {key: _size(opened, each) for key, each in stored.items()}
    parts = _parts(sizes, limit)
    names = {place: _part_name(out, place, len(parts)) for place in range(len(parts))}
    for place, keys in enumerate(parts):
        yield _write_tensors(opened, {key: stored[key] for key in keys}, out.with_name(names[place]))
    if len(parts) > 1:
        weights = {key: names[place] for place, keys in enumerate(parts) for key in keys}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weights}
        yield _write_json(index, out.with_name(f"{out.name}.index.json"))


def _size(opened: Opened, key: str) -> int:
    saved = opened.reader.tensor(key)
    return saved.size.numel() * saved.properties.dtype.itemsize


def _parts(sizes: Mapping[str, int], limit: int | None) -> list[list[str]]:
    """Keys in their order, as many in each part as fit."""
    parts: list[list[str]] = [[]]
    room = limit
    for key, size in sizes.items():
        if room is not None and limit is not None:
            if size > room and parts[-1]:
                parts.append([])
                room = limit
            room -= size
        parts[-1].append(key)
    return parts


def _part_name(out: Path, place: int, count: int) -> str:
    return out.name if count == 1 else f"{out.stem}-{place + 1:05d}-of-{count:05d}{out.suffix}"


def _write_tensors(opened: Opened, stored: Mapping[str, str], file: Path) -> Path:
    from safetensors.torch import save_file

    targets = {key: Target(each, _empty(opened, each)) for key, each in stored.items()}
    opened.reader.read(targets.values())
    unfinished = file.with_name(f"{file.name}.new")
    save_file({key: each.tensor for key, each in targets.items()}, unfinished, metadata={"format": "pt"})
    return unfinished.replace(file)


def _empty(opened: Opened, key: str) -> torch.Tensor:
    saved = opened.reader.tensor(key)
    return torch.empty(saved.size, dtype=saved.properties.dtype)


def _write_configs(manifest: Mapping[str, Any], folder: Path) -> Iterator[Path]:
    for name in _CONFIGS:
        if manifest.get(name) is not None:
            yield _write_json(manifest[name], folder / f"{name}.json")


def _write_json(value: Any, file: Path) -> Path:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    return file
