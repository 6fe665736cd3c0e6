"""The folders that compiled code is kept in: how large, whose, and whether they can be written to and loaded from."""

from __future__ import annotations

import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

_MOST_FILES = 200_000  # enough for any cache; a count of more would take minutes on a network disk


@dataclass(frozen=True)
class Folder:
    """What was found of one folder.

    Args:
        of: What it is for: ``"backend inductor"``.
        path: Where it is.
        exists: Whether it is there yet.
        files: How many files are in it.
        megabytes: What they take.
        owner: ``"you"``, or who else.
        problem: Why compiled code cannot be kept there, or ``None``.
        doubt: What is unusual about it, or ``None``.
    """

    of: str
    path: str
    exists: bool
    files: int = 0
    megabytes: float = 0.0
    owner: str = ""
    problem: str | None = None
    doubt: str | None = None


def look_at(path: str, of: str) -> Folder:
    """Look at a folder, which need not exist. A file is written into it and removed again; no folder is made."""
    exists = _is_folder(Path(path))
    files, size = _contents(path) if exists else (0, 0)
    foreign = _foreign_owner(path) if exists else None
    return Folder(
        of=of,
        path=path,
        exists=exists,
        files=files,
        megabytes=round(size / 2**20, 1),
        owner="" if not exists else foreign or "you",
        problem=_problem(path),
        doubt=None if foreign is None else f"it belongs to {foreign}, whose compiled code would be run",
    )


def temporary() -> str | None:
    """Why no temporary file can be made; ``None`` where it can."""
    try:
        with tempfile.TemporaryFile():
            return None
    except OSError as error:
        return f"no temporary file can be made: {error.strerror or error}. Point TMPDIR to a folder that is yours."


def _problem(path: str) -> str | None:
    there = _nearest_folder(Path(path).absolute())
    if not _is_folder(there):
        return f"{there} is a file"
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        where = "it" if there == Path(path).absolute() else str(there)
        return f"{where} cannot be written to ({error.strerror or error})"
    return "it is on a disk that allows no code to be loaded (mounted noexec)" if _no_code_from(there) else None


def _nearest_folder(path: Path) -> Path:
    return next((each for each in (path, *path.parents) if _mode(each) is not None), path)


def _is_folder(path: Path) -> bool:
    return stat.S_ISDIR(_mode(path) or 0)


def _mode(path: Path) -> int | None:
    """What kind of thing is there; ``None`` for nothing, and for what lies in somebody's private folder."""
    try:
        return path.stat().st_mode
    except OSError:
        return None


def _no_code_from(path: Path) -> bool:
    if not hasattr(os, "statvfs"):
        return False
    return bool(os.statvfs(path).f_flag & getattr(os, "ST_NOEXEC", 0))


def _foreign_owner(path: str) -> str | None:
    if not hasattr(os, "geteuid"):
        return None
    owner = Path(path).stat().st_uid
    return None if owner == os.geteuid() else f"another user (uid {owner})"


def _contents(path: str) -> tuple[int, int]:
    """The number of files below a folder, and their bytes."""
    files = size = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                size += os.lstat(os.path.join(folder, name)).st_size  # noqa: PTH118 - a Path for each file is slow
            except OSError:  # gone since
                continue
            files += 1
        if files >= _MOST_FILES:
            break
    return files, size
