"""The one touch of PyTorch's private surface: forgetting that ``fully_shard`` was called on a module.

PyTorch remembers it in a table of its own, beside the module, and refuses a second call for as long as the module
lives. A ``prepare`` that fails after sharding must be able to run again. Run on torch 2.13.0; where the table is not
there, nothing is done, and such a second ``prepare`` raises.
"""

from __future__ import annotations

from torch import nn


def forget_sharded(module: nn.Module) -> None:
    """Let ``fully_shard`` be called on the module again."""
    from torch.distributed import _composable_state

    table = getattr(_composable_state, "_module_state_mapping", {})
    table.pop(module, None)
