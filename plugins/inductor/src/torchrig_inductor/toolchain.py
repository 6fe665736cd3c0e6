"""What TorchInductor generates code with, a C++ compiler for CPUs and Triton for CUDA: whether it is there, and where.

Nothing here initialises a device.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from importlib import metadata


def missing_here() -> str | None:
    """What is missing on this machine, for the device a model would go to by default."""
    import torch

    return missing_for("cuda" if torch.cuda.is_available() else "cpu")


def missing_for(device: str) -> str | None:
    """What is missing to generate code for a device type; ``None`` for device types that bring their own generator."""
    if device == "cpu":
        return _no_cpp_compiler()
    return _no_triton() if device == "cuda" else None


def _no_triton() -> str | None:
    if importlib.util.find_spec("triton") is not None:
        return None
    return "it generates Triton kernels for CUDA, and triton is not installed: pip install triton"


def _no_cpp_compiler() -> str | None:
    try:
        found = _inductors_choice()
    except RuntimeError as error:
        return _advice(str(error))
    # Inductor remembers its first find for the life of the process; the compiler may have gone from PATH since.
    return None if shutil.which(found) else _advice(f"{found} is not on PATH any more.")


def _inductors_choice() -> str:
    """The compiler Inductor would call.

    Private (PyTorch 2.3 to 2.13), because the search is configured: ``torch._inductor.config.cpp.cxx``, which is
    ``CXX`` when that was set before Inductor was imported, else ``g++`` (``clang++`` on macOS, ``cl`` on Windows).
    """
    from torch._inductor.cpp_builder import get_cpp_compiler

    return get_cpp_compiler()


def _advice(problem: str) -> str:
    tried = os.environ.get("CXX")
    named = f" CXX is {tried!r}." if tried else ""
    return (
        f"it generates C++ for CPUs, and found no compiler ({problem.rstrip('.')}).{named} "
        "Install g++ or clang++, or set CXX to one before Python starts"
    )


def facts() -> dict[str, str]:
    """The tools that are found, with their versions; for a bug report."""
    return {"C++ compiler": _cpp_compiler(), "triton": _version_of("triton")}


def cache_dirs() -> list[str]:
    """The folders that generated and compiled code is kept in; none is made by asking.

    Private (run on PyTorch 2.13.0): where the cache is when no variable says so. Inductor's own ``cache_dir()`` would
    make the folder and set the variable.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folders = [os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()]
    if triton := os.environ.get("TRITON_CACHE_DIR"):
        folders.append(triton)
    return folders


def _cpp_compiler() -> str:
    try:
        found = _inductors_choice()
    except RuntimeError as error:
        return f"none found: {error}"
    path = shutil.which(found)
    if path is None:
        return f"{found}, which is not on PATH"
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"{path}, which cannot be run: {error}"
    return f"{said.splitlines()[0]} ({path})" if said.strip() else path


def _version_of(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"
