"""What a step under ``fsdp2`` costs by placement: a compiled forward bound to each block, or ``module.compile()``.

    torchrun --nproc-per-node 2 benchmarks/fsdp2_placement.py [backend]

The models take turns, so that a machine that changes its pace changes it for all. Printed is the median over the steps,
in milliseconds, with the graphs and breaks, and how far the losses are from eager's.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

import torchrig

WIDTH, BLOCKS, LENGTH, BATCH, STEPS = 128, 12, 64, 4, 30


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, 4, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(gelu(self.up(self.second(x))))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(BLOCKS)))


class Runner:
    """One prepared model and its times."""

    def __init__(self, name: str, **settings: Any) -> None:
        self.name = name
        made = model()
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3)
        self.model, self.optimizer = torchrig.prepare(made, optimizer, strategy="fsdp2", **settings)
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def step(self, index: int) -> None:
        """One step of training."""
        generator = torch.Generator().manual_seed(1000 * index + dist.get_rank())
        x = torch.randn(BATCH, LENGTH, WIDTH, generator=generator)
        dist.barrier()
        start = time.perf_counter()
        loss = (self.model(x) - x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())


def main() -> None:
    backend = sys.argv[1] if len(sys.argv) > 1 else "inductor"
    runners = [Runner("no", backend="no")]
    runners += [Runner(placement, backend=backend, placement=placement) for placement in ("forward", "inplace")]
    for index in range(STEPS):
        for runner in runners:
            runner.step(index)
    if dist.get_rank() == 0:
        print(f"{'placement':<10} {'median ms':>9} {'fastest':>8} {'first s':>8} graphs breaks  loss off eager's")
        for runner in runners:
            report, warm = torchrig.report(runner.model), [1e3 * each for each in runner.seconds[3:]]
            off = max(abs(a - b) for a, b in zip(runner.losses, runners[0].losses, strict=True))
            times = f"{statistics.median(warm):9.1f} {min(warm):8.1f} {runner.seconds[0]:8.1f}"
            print(f"{runner.name:<10} {times} {report.graphs:6} {report.breaks:6} {off:.1e}")


if __name__ == "__main__":
    main()
