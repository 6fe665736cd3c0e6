"""What ``torchrig.prepare`` costs on a model of many blocks, next to the loops that people write by hand.

Nothing is traced here: only what happens before the first step is timed. ``torch._dynamo`` is imported beforehand, and
each way gets fresh models, in turns.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import types
from collections.abc import Callable

import torch
import torch._dynamo
from torch import Tensor, nn

import torchrig


class Block(nn.Module):
    """A residual feed-forward block; its size does not matter here."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Many blocks, one after the other."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def prepare(model: Stack) -> None:
    torchrig.prepare(model, backend="eager")


def bind_one(model: Stack) -> None:
    compiled = torch.compile(Block.forward, backend="eager")
    for block in model.layers:
        block.forward = types.MethodType(compiled, block)


def bind_each(model: Stack) -> None:
    for block in model.layers:
        block.forward = types.MethodType(torch.compile(Block.forward, backend="eager"), block)


def compile_each(model: Stack) -> None:
    for block in model.layers:
        block.compile(backend="eager")


BARE: dict[str, Callable[[Stack], None]] = {
    "bare loop: compile the block in place": compile_each,
    "bare loop: compile forward, bind it": bind_each,
    "bare loop: compile once, bind to each": bind_one,
}


def main() -> None:
    options = parse()
    ways = {"torchrig.prepare": prepare, **BARE}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(options.rounds + 1):
        for name, way in ways.items():
            seconds = timed(way, options.blocks)
            if round_:  # the first round imports plugins and fills caches
                taken[name].append(seconds)
    ours = statistics.median(taken["torchrig.prepare"])
    print(f"{options.blocks} blocks, medians of {options.rounds} rounds")
    print(f"  {'':40} {'ms':>8}  prepare is")
    for name, each in taken.items():
        median = statistics.median(each)
        print(f"  {name:40} {1e3 * median:8.1f}  {ours / median:6.2f}x of it")


def timed(way: Callable[[Stack], None], blocks: int) -> float:
    model = Stack(blocks)
    gc.collect()
    start = time.perf_counter()
    way(model)
    return time.perf_counter() - start


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What prepare costs before the first step.")
    parser.add_argument("--blocks", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


if __name__ == "__main__":
    main()
