"""PyTorch FSDP2 (``fully_shard``) as a strategy for torchrig.

Importing it imports neither ``torch._dynamo`` nor ``torch.distributed.fsdp``.
"""

from __future__ import annotations

from . import fsdp2
from .settings import FSDP2Settings

__all__ = ["FSDP2Settings", "fsdp2"]
