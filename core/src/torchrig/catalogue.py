"""The names torchrig knows: who brings each, what else it is called, and what became of those that are gone.

The catalogue is a courtesy, not a gate: it turns "unknown backend" into "install this", and a name outside it is fine.
It knows nothing of torch and imports no plugin.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from . import entrypoints
from .entrypoints import BACKENDS, GROUPS, STRATEGIES, TRANSFORMS, normalise

__all__ = [
    "ALIASES",
    "BACKENDS",
    "CORE",
    "DISTRIBUTIONS",
    "GROUPS",
    "REMOVED",
    "STRATEGIES",
    "TRANSFORMS",
    "DynamoBackend",
    "Removed",
    "canonical",
    "distribution_of",
    "known_names",
    "normalise",
]

CORE = "torchrig"


class DynamoBackend(str, Enum):
    """The compile backends torchrig knows by name. Any other installed backend's name, and any callable, is as good."""

    NO = "no"
    EAGER = "eager"
    AOT_EAGER = "aot_eager"
    INDUCTOR = "inductor"
    AOT_TS_NVFUSER = "aot_ts_nvfuser"
    NVPRIMS_NVFUSER = "nvprims_nvfuser"
    CUDAGRAPHS = "cudagraphs"
    OFI = "ofi"
    FX2TRT = "fx2trt"
    ONNXRT = "onnxrt"
    TENSORRT = "tensorrt"
    AOT_TORCHXLA_TRACE_ONCE = "aot_torchxla_trace_once"
    TORCHXLA_TRACE_ONCE = "torchxla_trace_once"
    TVM = "tvm"
    HPU_BACKEND = "hpu_backend"
    NEURON = "neuron"
    OPENXLA = "openxla"
    OPENVINO = "openvino"
    THUNDER = "thunder"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Removed:
    """A backend PyTorch no longer has.

    Args:
        since: The first PyTorch release without it.
        why: What happened to it, to follow "PyTorch <since> removed it: ".
        successor: The backend that took its place.
    """

    since: str
    why: str
    successor: str


# Which distribution brings a name, group by group. Aliases and removed names are not in here.
DISTRIBUTIONS: dict[str, dict[str, str]] = {
    BACKENDS: {
        "no": CORE,
        "eager": CORE,
        "aot_eager": "torchrig-inductor",
        "inductor": "torchrig-inductor",
        "cudagraphs": "torchrig-inductor",
        "ofi": "torchrig-ofi",
        "onnxrt": "torchrig-onnxruntime",
        "tensorrt": "torchrig-tensorrt",
        "tvm": "torchrig-tvm",
        "hpu_backend": "torchrig-hpu",
        "neuron": "torchrig-neuron",
        "openxla": "torchrig-xla",
        "openvino": "torchrig-openvino",
        "thunder": "torchrig-thunder",
    },
    STRATEGIES: {
        "single": CORE,
        "ddp": CORE,
        "fsdp2": "torchrig-fsdp2",
        "deepspeed": "torchrig-deepspeed",
        "xla": "torchrig-xla",
    },
    TRANSFORMS: {
        "float8": "torchrig-torchao",
        "int8": "torchrig-torchao",
    },
}

# Other names of one backend.
ALIASES: dict[str, str] = {
    "torchxla_trace_once": "openxla",
    "aot_torchxla_trace_once": "openxla",
    "onnxruntime": "onnxrt",
    "hpu": "hpu_backend",
}

# Sources: pytorch/pytorch pull requests 110124 (TorchScript's nvFuser), 105789 (nvprims), 93822 (fx2trt).
REMOVED: dict[str, Removed] = {
    "aot_ts_nvfuser": Removed("2.2", "TorchScript no longer reaches nvFuser", "thunder"),
    "nvprims_nvfuser": Removed("2.1", "the nvprims path to nvFuser was taken out", "thunder"),
    "fx2trt": Removed("2.0", "TensorRT moved to Torch-TensorRT", "tensorrt"),
}


def canonical(name: str) -> str:
    """The name, normalised, with a catalogue alias replaced by what it stands for."""
    plain = normalise(name)
    return ALIASES.get(plain, plain)


def distribution_of(name: str, group: str = BACKENDS) -> str | None:
    """The distribution that brings a known name of a group; ``None`` for a name the catalogue does not know."""
    plain = canonical(name) if group == BACKENDS else normalise(name)
    return DISTRIBUTIONS[group].get(plain)


def known_names(group: str | None = None) -> tuple[str, ...]:
    """Every name of a group (of all three when ``None``), sorted: the catalogue's and the installed entry points'.

    Aliases and removed names are among them. Nothing is imported; only installed metadata is read.
    """
    groups = GROUPS if group is None else (group,)
    names = {name for each in groups for name in DISTRIBUTIONS[each]}
    if BACKENDS in groups:
        names.update(ALIASES, REMOVED, (member.value for member in DynamoBackend))
    entries, _ = entrypoints.scan()
    names.update(entry.name for entry in entries if entry.group in groups)
    return tuple(sorted(names))
