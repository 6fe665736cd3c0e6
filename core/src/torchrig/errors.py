"""The exceptions and warnings torchrig raises.

::

    TorchrigError
    ├── SettingsError (also ValueError)       a value, key or variable that cannot be used, with its origin
    ├── PluginError
    │   ├── PluginLoadError                   a selected plugin does not import or is not a plugin
    │   └── AmbiguousPluginError              two distributions, or two hooks, claim the same thing
    ├── BackendError
    │   ├── BackendNotInstalled               a known name whose distribution is missing
    │   ├── BackendUnavailable                installed, but it cannot run here
    │   └── BackendRemoved                    PyTorch removed it; the message names the successor
    ├── StrategyError
    │   ├── StrategyNotInstalled
    │   └── StrategyUnavailable
    ├── ArgumentError (also TypeError)        prepare was given something it cannot prepare
    ├── RegionError                           the regions asked for are not in the model
    ├── CheckpointError                       a checkpoint cannot be saved, or does not load here
    ├── AlreadyPreparedError                  prepare again, with other settings
    ├── RankFailed                            another rank raised, so that none goes on
    └── CompileProblem                        what was asked to be compiled was not
        ├── RegionCompileError                the backend raised
        ├── RegionNotCompiled                 no graph was built
        ├── GraphBreak                        a region was cut into several graphs
        └── RecompileLimitReached             Dynamo gave up recompiling a region
    TorchrigWarning (UserWarning)
    └── CompileProblemWarning                 a CompileProblem that the settings turn into a warning

Every message says what happened, where the value came from, and what to do.
This module imports nothing, so that anything may import it.
"""

from __future__ import annotations

from collections.abc import Iterable


class TorchrigError(Exception):
    """Root of every error torchrig raises on purpose."""


class SettingsError(TorchrigError, ValueError):
    """A setting cannot be used.

    Args:
        message: What is wrong, in one sentence.
        setting: The field's name (``"mode"``, ``"fsdp2.reshard"``), or ``None``.
        origin: Where the value came from: ``"argument"``, ``"variable TORCHRIG_MODE"`` or ``"train.yaml:3"``.
            Left ``None`` by plugins; core fills it in from the setting's name.
        choices: The valid values, if they can be listed.
        nearest: The valid value that looks most like the given one.
    """

    def __init__(
        self,
        message: str,
        *,
        setting: str | None = None,
        origin: str | None = None,
        choices: Iterable[str] = (),
        nearest: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.setting = setting
        self.origin = origin
        self.choices = tuple(choices)
        self.nearest = nearest

    def __str__(self) -> str:
        parts = [self.message]
        if self.origin is not None:
            parts.append(f"(from {self.origin})")
        if self.nearest is not None:
            parts.append(f"Did you mean {self.nearest!r}?")
        if self.choices:
            parts.append(f"Valid: {', '.join(self.choices)}.")
        return " ".join(parts)


class PluginError(TorchrigError):
    """Something is wrong with a plugin."""


class PluginLoadError(PluginError):
    """A selected plugin could not be imported, or what was imported is not a plugin of that group."""


class AmbiguousPluginError(PluginError):
    """Two distributions claim one name, or two plugins both answer ``compile_region``."""


class BackendError(TorchrigError):
    """A compile backend cannot be used."""


class BackendNotInstalled(BackendError):
    """The backend is known, but the distribution that brings it is not installed."""


class BackendUnavailable(BackendError):
    """The backend is installed, but it cannot run on this machine."""


class BackendRemoved(BackendError):
    """PyTorch no longer has this backend; the message names the successor."""


class StrategyError(TorchrigError):
    """A strategy cannot be used."""


class StrategyNotInstalled(StrategyError):
    """The strategy is known, but the distribution that brings it is not installed."""


class StrategyUnavailable(StrategyError):
    """The strategy is installed, but it cannot run on this machine or in this process."""


class ArgumentError(TorchrigError, TypeError):
    """An argument of ``prepare`` is of a kind it cannot prepare, or does not belong to the model."""


class RegionError(TorchrigError):
    """The regions asked for are not in the model, or cannot be compiled."""


class CheckpointError(TorchrigError):
    """A checkpoint cannot be saved, is not complete, or does not fit what it is loaded into."""


class AlreadyPreparedError(TorchrigError):
    """``prepare`` was called on a prepared model with other settings."""


class RankFailed(TorchrigError):
    """Another rank raised in something that all ranks do together."""


class CompileProblem(TorchrigError):
    """Something that was asked to be compiled did not run compiled."""


class RegionCompileError(CompileProblem):
    """The backend raised while it compiled a region; the cause is chained."""


class RegionNotCompiled(CompileProblem):
    """A region ran, and no graph was built for it."""


class GraphBreak(CompileProblem):
    """A region was cut into more than one graph."""


class RecompileLimitReached(CompileProblem):
    """Dynamo recompiled a region as often as it may, and runs it eager from then on."""


class TorchrigWarning(UserWarning):
    """Root of every warning torchrig gives."""


class CompileProblemWarning(TorchrigWarning):
    """A :class:`CompileProblem` that the settings ask to be warned about rather than raised."""
