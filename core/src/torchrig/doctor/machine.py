"""The machine, as far as a bug report needs it: PyTorch, devices, processor, Python, packages, and the variables."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import torch

from .discreet import HIDDEN, hides

PACKAGES = ("torchrig", "numpy", "pluggy", "pydantic", "pydantic-settings", "accelerate", "transformers", "peft")

_PREFIXES = ("TORCH", "PYTORCH_", "ACCELERATE_DYNAMO_", "TRITON_", "OMP_", "MKL_", "KMP_", "GOMP_")
_VARIABLES = frozenset(
    {"CC", "CXX", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "TMPDIR", "WORLD_SIZE"}
)


def summary() -> dict[str, str]:
    """PyTorch, its devices, the processor, Python and the platform, one line each."""
    return {
        "torch": f"{torch.__version__}, {_built_with()}",
        "accelerator": "; ".join(_devices()) or "none",
        "distributed": _distributed(),
        "processor": f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}",
        "cores": f"{_usable_cores()} usable of {os.cpu_count()}",
        "threads": f"{torch.get_num_threads()} within an operation, {torch.get_num_interop_threads()} between them",
        "python": f"{platform.python_version()} {platform.python_implementation()}{_gil()} ({sys.executable})",
        "platform": f"{platform.platform()}, {' '.join(filter(None, platform.libc_ver())) or 'libc unknown'}",
    }


def packages() -> dict[str, str]:
    """The versions of the packages that a compiled model meets; those that are installed."""
    return {name: version for name in PACKAGES if (version := _version(name)) is not None}


def environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that steer PyTorch and torchrig. Others are not looked at, and secrets are not shown."""
    given = os.environ if variables is None else variables
    wanted = sorted(name for name in given if name.startswith(_PREFIXES) or name in _VARIABLES)
    return {name: HIDDEN if hides(name) else given[name] for name in wanted}


def _built_with() -> str:
    versions = (("CUDA", torch.version.cuda), ("HIP", torch.version.hip), ("XPU", torch.version.xpu))
    return ", ".join(f"built with {name} {version}" for name, version in versions if version) or "built for CPUs"


def _devices() -> Iterator[str]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return
    for index in range(torch.accelerator.device_count()):
        try:
            name = torch.get_device_module(accelerator).get_device_name(index)
        except Exception as error:  # no such function, or a driver in trouble: that is worth telling too
            name = f"no name: {type(error).__name__}: {error}"
        yield f"{accelerator.type}:{index} {name}"


def _distributed() -> str:
    if not torch.distributed.is_available():
        return "not built in"
    names = ("gloo", "mpi", "nccl", "ucc", "xccl")
    having = [name for name in names if torch.distributed.is_backend_available(name)]
    return ", ".join(having) or "no backend"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _usable_cores() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _gil() -> str:
    enabled = getattr(sys, "_is_gil_enabled", lambda: True)()
    return "" if enabled else " without the GIL"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
