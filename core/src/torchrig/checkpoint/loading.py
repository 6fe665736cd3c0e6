"""Load a checkpoint, on all ranks together: check, read beside what is live, and only then change anything."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchrig import precision
from torchrig.arguments import kind_of, require_module
from torchrig.errors import ArgumentError, CheckpointError, TorchrigWarning
from torchrig.tree import Undo, undo_all
from torchrig.unwrap import unwrap

from . import contents, folder, leaves, names, optimizers, randomness
from .ranks import rank, together, world_size
from .saving import OBJECTS
from .storage import INDEX, Reader, Staged, Target
from .wording import listed


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose files were found as they were saved.

    Args:
        manifest: See :mod:`.folder`.
        reader: Reads its tensors.
        tree: Its plain values; see :func:`torchrig.checkpoint.contents.capture`.
    """

    manifest: Mapping[str, Any]
    reader: Reader
    tree: Mapping[str, Any]


def open_checkpoint(path: Path, share: slice = slice(None)) -> Opened:
    """Open a checkpoint.

    Args:
        path: Its folder.
        share: Which of its files to check; ranks share the work.

    Raises:
        CheckpointError: It is not complete, or damaged.
    """
    manifest = folder.read(path)
    always = {INDEX, OBJECTS}
    large = sorted(name for name in manifest["files"] if name not in always)
    folder.verify(path, manifest, [*large[share], *(name for name in manifest["files"] if name in always)])
    data = path / manifest["data"]
    try:
        tree = torch.load(data / OBJECTS, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{data / OBJECTS} cannot be read, or holds more than plain values: {error}") from error
    return Opened(manifest, Reader(data, manifest["files"]), tree)


def load(path: Path, model: nn.Module, optimizer: Any, into: Mapping[str, Any]) -> dict[str, Any]:
    """See :func:`torchrig.load_checkpoint`."""
    doing = f"Loading {path}"
    opened = together(doing, lambda: open_checkpoint(path, slice(rank(), None, world_size())))
    load = together(doing, lambda: Load(opened, model, optimizer, into))
    together(doing, load.read)
    undos: list[Undo] = []
    try:
        together(doing, lambda: load.apply(undos))
    except BaseException as error:
        undo_all(undos, error)
        raise
    return load.extra


class Load:
    """One checkpoint on its way into what is live. Made, it was checked; nothing is changed before :meth:`apply`.

    Args:
        opened: The checkpoint.
        model: The model to load into.
        optimizer: The optimizers to load into.
        into: The extras to load into, by name.

    Raises:
        CheckpointError: Something does not fit.
        ArgumentError: Something cannot be loaded into.
    """

    def __init__(self, opened: Opened, model: nn.Module, optimizer: Any, into: Mapping[str, Any]) -> None:
        require_module(model, "load_checkpoint")
        self._reader, self._tree = opened.reader, opened.tree
        self._targets: list[Target] = []
        self._staged: list[Staged] = []
        self._model, self._bare, self._into = model, unwrap(model), into
        self._values = self._check_model()
        self._optimizers = self._check_optimizers(optimizers.as_optimizers(optimizer, "load_checkpoint"))
        self.extra = self._check_extra()
        self._random = self._check_random(opened.manifest["world_size"])

    def read(self) -> None:
        """Read this rank's part of everything.

        Raises:
            CheckpointError: Parameters that are one in the model were not when it was saved, and differ.
        """
        self._staged = self._reader.read(self._targets)
        seen: dict[int, Staged] = {}
        for each in self._staged:
            first = seen.setdefault(each.tensor.data_ptr() if each.tensor.numel() else id(each), each)
            differ = first.key != each.key and first.read.shape == each.read.shape
            if differ and not torch.equal(first.read, each.read):
                raise CheckpointError(
                    f"{first.key!r} and {each.key!r} are one tensor in the model and two, with different values, in "
                    "the checkpoint. Load it into a model that does not tie them."
                )

    def apply(self, undos: list[Undo]) -> None:
        """Change what is live; ``undos`` gets how to take each change back."""
        for name, target in self._into.items():
            before = copy.deepcopy(contents.state_of(target))
            undos.append(_loading(target, before))
            contents.load_into(target, self.extra[name])
            self.extra[name] = target
        for optimizer, state in self._optimizers:
            undos.append(_loading(optimizer, optimizer.state_dict()))
            optimizer.load_state_dict(state)
        self._apply_model(undos)
        self._apply_scaling(undos)
        undos.append(randomness.restore(self._random))

    def _check_model(self) -> dict[str, Any]:
        """Refuse a model of other keys or shapes; the values for what it holds besides tensors, by its own keys."""
        live, saved = names.state_dict(self._bare), self._tree["model"]
        known = [key for key in live if key in saved]
        tensors = {key: value for key in known if isinstance(value := live[key][1], torch.Tensor)}
        missing, strange = [key for key in live if key not in saved], [key for key in saved if key not in live]
        shapes = [told for key, value in tensors.items() if (told := self._misshapen(key, value))]
        if missing or strange or shapes:
            raise CheckpointError(
                f"The checkpoint does not fit this {type(self._bare).__name__}: "
                f"{contents.unfit(missing, strange, shapes)}. Build the model as it was when it was saved."
            )
        pairs = {(saved[key][leaves.MARK], id(value)): value for key, value in tensors.items()}
        self._targets += [Target(key, value.detach(), live=True) for (key, _), value in pairs.items()]
        return {live[key][0]: self._filled(saved[key], None) for key in known if key not in tensors}

    def _misshapen(self, key: str, value: torch.Tensor) -> str | None:
        """What is wrong with a saved tensor for a live one, in words."""
        if value.is_meta:
            raise CheckpointError(f"{key!r} is on the meta device. Materialise the model (to_empty), then load.")
        saved = self._tree["model"][key]
        marked = isinstance(saved, dict) and leaves.MARK in saved
        size = self._reader.tensor(saved[leaves.MARK]).size if marked else None
        if size == value.shape:
            return None
        return f"{key!r} is {_shape(size)} in the checkpoint and {_shape(value.shape)} in the model"

    def _check_optimizers(self, given: Sequence[Optimizer]) -> list[tuple[Optimizer, dict[str, Any]]]:
        saved = self._tree["optimizers"]
        if given and len(saved) != len(given):
            raise CheckpointError(
                f"The checkpoint has {len(saved)} optimizers ({listed([each['kind'] for each in saved])}), and "
                f"{len(given)} were given to load into. Give as many, in the same order, or none."
            )
        parameters = names.named_parameters(self._bare)
        return [(each, self._native(own, each, parameters)) for each, own in zip(given, saved, strict=False)]

    def _native(
        self, saved: Mapping[str, Any], optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]
    ) -> dict[str, Any]:
        optimizers.native_state(saved, optimizer, parameters)  # refuses what does not fit, before anything is allocated
        filled = self._filled(saved, {"state": optimizers.layout(saved, parameters)})
        return optimizers.native_state(filled, optimizer, parameters)

    def _check_extra(self) -> dict[str, Any]:
        saved, objects = self._tree["extra"], self._tree["objects"]
        for name, target in self._into.items():
            if not contents.has_state(target):
                raise ArgumentError(
                    f"{name}= is {kind_of(target)}, which cannot be loaded into: it has no state_dict and "
                    "load_state_dict. Leave it out; load_checkpoint returns what was saved under that name."
                )
            if name not in objects:
                raise CheckpointError(
                    f"The checkpoint has no object {name!r} to load. It has: {listed(list(objects))}."
                )
        layouts = {name: contents.state_of(target) for name, target in self._into.items()}
        return {name: self._filled(value, layouts.get(name)) for name, value in saved.items()}

    def _check_random(self, saved_by: int) -> dict[str, torch.Tensor]:
        own = rank() if saved_by == world_size() else 0
        if saved_by != world_size() and rank() == 0:
            warnings.warn(
                f"The checkpoint was saved by {saved_by} ranks and is loaded by {world_size()}: every rank takes the "
                "random states of the first one.",
                TorchrigWarning,
                stacklevel=2,
            )
        prefix = f"random.{own}."
        keys = [key for key in self._reader.index.state_dict_metadata if key.startswith(prefix)]
        return {key.removeprefix(prefix): self._fresh(key, None) for key in keys}

    def _filled(self, tree: Any, layout: Any) -> Any:
        """A tree with new tensors, to be read, in the place of its marks; sharded as those of ``layout`` are."""
        made: dict[str, torch.Tensor] = {}
        for key, like in leaves.tensors(tree, layout):
            if key not in made:
                made[key] = self._fresh(key, like)
        return leaves.join(tree, made.__getitem__)

    def _fresh(self, key: str, like: Any) -> torch.Tensor:
        saved = self._reader.tensor(key)
        tensor = optimizers.fresh(like, saved.size, saved.properties.dtype)
        self._targets.append(Target(key, tensor))
        return tensor

    @torch.no_grad()
    def _apply_model(self, undos: list[Undo]) -> None:
        before = {key: copy.deepcopy(value) for key, value in self._bare.state_dict().items() if key in self._values}
        undos.append(lambda: self._tell_model(before))
        for each in self._staged:
            each.swap()
            undos.append(each.swap)
        self._tell_model(self._values)

    def _tell_model(self, values: Mapping[str, Any]) -> None:
        """Let the model load what it holds by now, for its hooks, with ``values`` for what is no tensor."""
        state = self._bare.state_dict()
        state.update(values)
        self._bare.load_state_dict(state)

    def _apply_scaling(self, undos: list[Undo]) -> None:
        scaling, saved = precision.scaling_of(self._model), self._tree["scaling"]
        if scaling is not None and saved is not None:
            undos.append(_loading(scaling, scaling.state_dict()))
            scaling.load_state_dict(saved)


def _loading(target: Any, state: Any) -> Callable[[], None]:
    return lambda: contents.load_into(target, state)


def _shape(size: Sequence[int] | None) -> str:
    return "no tensor" if size is None else str(tuple(size))
