"""Tensors on the disk, with ``torch.distributed.checkpoint``: each rank writes and reads its own part.

Two things are done otherwise than there. Its index is a pickle, and is read here with an unpickler that knows the
classes of an index and nothing else. And what is read goes beside the live tensors first, so that they change only
when everything was read, on all ranks.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from torchrig.errors import CheckpointError

INDEX = ".metadata"
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},  # the name of a layout -> the layout
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},  # Python 3.13
    "collections": {"OrderedDict"},
}


@dataclass(frozen=True)
class Target:
    """A tensor to read into.

    Args:
        key: What it was saved under.
        tensor: Whole, or a ``DTensor`` of which this rank's part is read. Of the saved shape.
        live: Whether it is in use, so that it must not change yet.
    """

    key: str
    tensor: torch.Tensor
    live: bool = False


@dataclass(frozen=True)
class Staged:
    """What was read for a live tensor, on the CPU.

    Args:
        key: What it was saved under.
        tensor: This rank's part of the live tensor.
        read: What it is to hold.
    """

    key: str
    tensor: torch.Tensor
    read: torch.Tensor

    def swap(self) -> None:
        """Exchange the two; done again, it is taken back."""
        before = self.tensor.to("cpu", copy=True)
        self.tensor.copy_(self.read)
        self.read.copy_(before)


def write(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write this rank's part of ``tensors`` to new files in ``folder``, and wait until the disk has them.

    Called on all ranks. Of a tensor that is whole on every rank, the first one's is written.
    """
    planner = DefaultSavePlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True
    )
    with _in_one_process_too():
        writer = FileSystemWriter(folder, sync_files=True)
        state_dict_saver.save(dict(tensors), storage_writer=writer, planner=planner)


class Reader(FileSystemReader):
    """Reads the files of a folder, and runs none of what is in them.

    Args:
        folder: The folder.
        files: The names of the files that belong to the checkpoint.

    Raises:
        CheckpointError: The index is damaged, or holds what no index holds.
    """

    def __init__(self, folder: Path, files: Iterable[str]) -> None:
        super().__init__(folder)
        self.index = _read_index(folder / INDEX)
        named = {info.relative_path for info in self.index.storage_data.values()}
        if strange := named - set(files):
            raise CheckpointError(f"The index of {folder} names a file that is not of the checkpoint: {min(strange)}.")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index."""
        return self.index

    def tensor(self, key: str) -> TensorStorageMetadata:
        """Size and type of a saved tensor."""
        found = self.index.state_dict_metadata.get(key)
        if not isinstance(found, TensorStorageMetadata):
            raise CheckpointError(f"The index of {self.path} does not have the tensor {key!r}.")
        return found

    def read(self, targets: Iterable[Target]) -> list[Staged]:
        """Read this rank's part of every target. Called on all ranks, with targets of the same keys.

        Returns:
            What was read for the live ones.
        """
        staged: list[Staged] = []
        rest = list(targets)
        while True:  # one pass takes a key once; more are needed only where a saved tensor goes to several places
            now = {each.key: each for each in reversed(rest)}
            staged += self._pass(now)
            rest = [each for each in rest if now[each.key] is not each]
            if not rest:
                return staged

    def _pass(self, targets: Mapping[str, Target]) -> list[Staged]:
        planner = _StagingPlanner({key for key, each in targets.items() if each.live})
        with _in_one_process_too():
            tensors = {key: each.tensor for key, each in targets.items()}
            state_dict_loader.load(tensors, storage_reader=self, planner=planner)
        return list(planner.staged.values())


class _StagingPlanner(DefaultLoadPlanner):
    """Reads what belongs into live tensors into others beside them."""

    def __init__(self, live: set[str]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.staged: dict[MetadataIndex, Staged] = {}
        self._live = live

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The tensor to read a part of ``index`` into."""
        local = super().lookup_tensor(index)
        if index.fqn not in self._live:
            return local
        if index not in self.staged:
            self.staged[index] = Staged(index.fqn, local, torch.empty_like(local, device="cpu"))
        return self.staged[index].read

    def load_bytes(self, read_item: Any, value: Any) -> None:
        """Refuse what is no tensor: PyTorch would unpickle it."""
        raise CheckpointError(f"{read_item.dest_index.fqn!r} is no tensor in the checkpoint.")


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no index needs")
        return super().find_class(module, name)


def _read_index(file: Path) -> Metadata:
    try:
        with file.open("rb") as stream:
            index = _IndexUnpickler(stream).load()
    except Exception as error:  # damaged pickles raise anything
        raise CheckpointError(f"The index {file} cannot be read: {error}.") from error
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
        raise CheckpointError(f"{file} is not the index of a checkpoint.")
    return index


@contextmanager
def _in_one_process_too() -> Iterator[None]:
    """Without the warning that there is one process only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
