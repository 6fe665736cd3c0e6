"""What PyTorch itself compiles with, as backends for torchrig: TorchInductor, AOTAutograd alone, and CUDA graphs.

Importing it imports neither ``torch._inductor`` nor ``torch._dynamo``.
"""

from __future__ import annotations

from . import aot_eager, cudagraphs, inductor

__all__ = ["aot_eager", "cudagraphs", "inductor"]
