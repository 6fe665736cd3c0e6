"""Save a checkpoint, on all ranks together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchrig import state
from torchrig.arguments import require_module
from torchrig.unwrap import unwrap

from . import contents, folder, randomness, storage
from .optimizers import as_optimizers
from .ranks import gather, rank, together, world_size

OBJECTS = "objects.pt"  # the tree


def save(path: Path, model: nn.Module, optimizer: Any, extra: Mapping[str, Any]) -> None:
    """See :func:`torchrig.save_checkpoint`."""
    doing = f"Saving {path}"
    tree, tensors = together(doing, lambda: _captured(model, optimizer, extra))
    data = gather(together(doing, lambda: folder.begin(path) if rank() == 0 else ""))[0]
    try:
        together(doing, lambda: _write(path / data, tree, tensors))
        written = gather(together(doing, lambda: folder.digests(path / data, _own_files(path / data))))
        files = {name: each for own in written for name, each in own.items()}
        manifest = {**_about(model), "data": data, "files": files}
        together(doing, lambda: folder.commit(path, manifest) if rank() == 0 else None)
    except BaseException:
        if rank() == 0:
            folder.discard(path, data)
        raise


def _captured(
    model: nn.Module, optimizer: Any, extra: Mapping[str, Any]
) -> tuple[contents.Tree, dict[str, torch.Tensor]]:
    require_module(model, "save_checkpoint")
    tree, tensors = contents.capture(model, as_optimizers(optimizer, "save_checkpoint"), extra)
    random = {f"random.{rank()}.{name}": each for name, each in randomness.capture().items()}
    return tree, {**tensors, **random}


def _write(data: Path, tree: contents.Tree, tensors: Mapping[str, torch.Tensor]) -> None:
    storage.write(data, tensors)
    if rank() == 0:
        with (data / OBJECTS).open("wb") as stream:
            torch.save(tree, stream)
            folder.to_disk(stream)


def _own_files(data: Path) -> list[str]:
    """The files that this rank wrote."""
    own = sorted(each.name for each in data.glob(f"__{rank()}_*"))
    return [*own, storage.INDEX, OBJECTS] if rank() == 0 else own


def _about(model: nn.Module) -> dict[str, Any]:
    """What the manifest tells of the run."""
    bare = unwrap(model)
    prepared = state.recall(model) or state.recall(bare)
    return {
        "torchrig": version("torchrig"),
        "torch": str(torch.__version__),
        "model": type(bare).__name__,
        "strategy": None if prepared is None else prepared.plan.strategy,
        "backend": None if prepared is None else prepared.plan.backend,
        "world_size": world_size(),
        "config": _config(bare, "config"),
        "generation_config": _config(bare, "generation_config"),
    }


def _config(model: nn.Module, name: str) -> dict[str, Any] | None:
    """A configuration in the manner of the transformers library, which an export writes beside the weights."""
    config: Any = getattr(model, name, None)
    if not callable(getattr(config, "to_json_string", None)):
        return None
    told: dict[str, Any] = json.loads(config.to_json_string())
    if name == "config" and not told.get("architectures"):
        told["architectures"] = [type(model).__name__]
    return told
