"""One call that compiles and distributes a PyTorch model in the right order, and proves what it compiled.

    model, optimizer, loader = torchrig.prepare(model, optimizer, loader)

The training loop stays plain PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .catalogue import DynamoBackend
from .checkpoint import load_checkpoint, save_checkpoint
from .errors import (
    AlreadyPreparedError,
    AmbiguousPluginError,
    ArgumentError,
    BackendError,
    BackendNotInstalled,
    BackendRemoved,
    BackendUnavailable,
    CheckpointError,
    CompileProblem,
    CompileProblemWarning,
    GraphBreak,
    PluginError,
    PluginLoadError,
    RankFailed,
    RecompileLimitReached,
    RegionCompileError,
    RegionError,
    RegionNotCompiled,
    SettingsError,
    StrategyError,
    StrategyNotInstalled,
    StrategyUnavailable,
    TorchrigError,
    TorchrigWarning,
)
from .gradients import clip_grad_norm_, no_sync
from .hookspecs import (
    BackendInfo,
    Capabilities,
    CompileRequest,
    Plan,
    Region,
    Share,
    Step,
    StrategyInfo,
    TransformInfo,
    Unit,
    Wrapped,
    hookimpl,
)
from .logs import silence_by_default
from .plan import plan
from .prepare import prepare
from .regional import compile_regions
from .report import Report, has_compiled_regions, is_compiled, report
from .unwrap import unwrap
from .warmup import warmup

if TYPE_CHECKING:
    from .settings import Settings

__version__ = "0.1.0"

silence_by_default()

__all__ = [
    "AlreadyPreparedError",
    "AmbiguousPluginError",
    "ArgumentError",
    "BackendError",
    "BackendInfo",
    "BackendNotInstalled",
    "BackendRemoved",
    "BackendUnavailable",
    "Capabilities",
    "CheckpointError",
    "CompileProblem",
    "CompileProblemWarning",
    "CompileRequest",
    "DynamoBackend",
    "GraphBreak",
    "Plan",
    "PluginError",
    "PluginLoadError",
    "RankFailed",
    "RecompileLimitReached",
    "Region",
    "RegionCompileError",
    "RegionError",
    "RegionNotCompiled",
    "Report",
    "Settings",
    "SettingsError",
    "Share",
    "Step",
    "StrategyError",
    "StrategyInfo",
    "StrategyNotInstalled",
    "StrategyUnavailable",
    "TorchrigError",
    "TorchrigWarning",
    "TransformInfo",
    "Unit",
    "Wrapped",
    "clip_grad_norm_",
    "compile_regions",
    "has_compiled_regions",
    "hookimpl",
    "is_compiled",
    "load_checkpoint",
    "no_sync",
    "plan",
    "prepare",
    "report",
    "save_checkpoint",
    "unwrap",
    "warmup",
]


def __getattr__(name: str) -> Any:
    # Settings brings pydantic along, about as dear as all the rest of torchrig; it is loaded when first asked for.
    if name == "Settings":
        return import_module(".settings", __name__).Settings
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
