"""Whether TorchInductor finds what it generates code with: a C++ compiler for CPUs, Triton for CUDA.

Each answer is ``None``, or the reason why not. None initialises a device.
"""

from __future__ import annotations

import importlib.util
import os
import shutil


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
