"""The folder of a checkpoint: whole, or as it was.

::

    path/
        manifest.json       what the checkpoint is, and which files belong to it, with their checksums
        data-1f6c0a52/      the files

The manifest names the one folder of data that counts. A save writes a new one beside it, waits for the disk, and then
replaces the manifest, which a file system does in one move; whenever the process is killed, the manifest names data
that is complete. What a killed save left is removed by the next.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from torchrig.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = "torchrig checkpoint"
VERSION = 1
_DATA = "data-"
_UNFINISHED = f"{MANIFEST}.new"
_CHUNK = 1 << 22


def begin(path: Path) -> str:
    """Make room for new data beside what is there; the name of its folder.

    Raises:
        CheckpointError: ``path`` holds something, and no checkpoint.
    """
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file; a checkpoint is a folder.")
    path.mkdir(parents=True, exist_ok=True)
    there = {each.name for each in path.iterdir()}
    if MANIFEST not in there and any(not name.startswith((_DATA, _UNFINISHED)) for name in there):
        raise CheckpointError(f"{path} has files in it and is no checkpoint. Save to a folder of its own.")
    _clear(path, keep=_named(path) if MANIFEST in there else None)
    name = f"{_DATA}{secrets.token_hex(4)}"
    (path / name).mkdir()
    return name


def commit(path: Path, manifest: Mapping[str, Any]) -> None:
    """Make the data that ``manifest`` names the checkpoint, and remove what was it before.

    Raises:
        CheckpointError: A file that it lists is not there as listed; nothing was changed.
    """
    data = path / manifest["data"]
    for name, listed in manifest["files"].items():
        if not (data / name).is_file() or (data / name).stat().st_size != listed["size"]:
            raise CheckpointError(
                f"{data / name}, which another rank wrote, is not there. All ranks must save to a disk they share."
            )
    _sync(data)
    unfinished = path / _UNFINISHED
    with unfinished.open("w", encoding="utf-8") as stream:
        json.dump({"format": FORMAT, "version": VERSION, **manifest}, stream, indent=1)
        to_disk(stream)
    unfinished.replace(path / MANIFEST)
    _sync(path)
    _sync(path.absolute().parent)
    _clear(path, keep=manifest["data"])


def discard(path: Path, data: str) -> None:
    """Remove data that did not become a checkpoint."""
    shutil.rmtree(path / data, ignore_errors=True)
    (path / _UNFINISHED).unlink(missing_ok=True)
    if path.is_dir() and not any(path.iterdir()):
        path.rmdir()


def digests(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Size in bytes and SHA-256 of files."""
    return {name: {"size": (folder / name).stat().st_size, "sha256": _sha256(folder / name)} for name in names}


def read(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: There is none, or it is damaged, or of a version to come.
    """
    file = path / MANIFEST
    if not file.is_file():
        raise CheckpointError(_why_not(path))
    try:
        manifest = json.loads(file.read_bytes())
        known = manifest["format"] == FORMAT
        version = int(manifest["version"])
        plain = [manifest["data"], *manifest["files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged, or no torchrig checkpoint's: {type(error).__name__}.") from error
    if not known or any(Path(name).name != name for name in plain):
        raise CheckpointError(f"{file} is no torchrig checkpoint's.")
    if version > VERSION:
        raise CheckpointError(
            f"{path} is of version {version}, and this torchrig reads {VERSION}. Install a newer one."
        )
    return manifest  # type: ignore[no-any-return]


def verify(path: Path, manifest: Mapping[str, Any], names: Iterable[str]) -> None:
    """Check files against their checksums.

    Raises:
        CheckpointError: One is missing or damaged.
    """
    for name in names:
        file, listed = path / manifest["data"] / name, manifest["files"][name]
        if not file.is_file():
            raise CheckpointError(f"{file} is missing: the checkpoint is not complete. Copy it again, with all files.")
        if file.stat().st_size != listed["size"] or _sha256(file) != listed["sha256"]:
            raise CheckpointError(f"{file} is damaged: it is not what was saved. Use another checkpoint.")


def to_disk(stream: IO[Any]) -> None:
    """Wait until the disk has what was written."""
    stream.flush()
    os.fsync(stream.fileno())


def _why_not(path: Path) -> str:
    if not path.exists():
        return f"There is no checkpoint: {path} does not exist."
    if path.is_dir() and any(path.glob(f"{_DATA}*")):
        return f"{path} is not complete: its first save did not finish. Use another checkpoint."
    return f"{path} is no torchrig checkpoint: it has no {MANIFEST}."


def _named(path: Path) -> str | None:
    """The data that the manifest names; ``None`` if it cannot be read, and so nobody can load it."""
    try:
        return str(read(path)["data"])
    except CheckpointError:
        return None


def _clear(path: Path, keep: str | None) -> None:
    (path / _UNFINISHED).unlink(missing_ok=True)
    for each in path.glob(f"{_DATA}*"):
        if each.name != keep:
            shutil.rmtree(each, ignore_errors=True)


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _sync(folder: Path) -> None:
    """Wait until the disk has the names in a folder."""
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
