"""What watching costs a training step: the same blocks compiled by torchrig and by a bare loop, in one process.

The bare loop binds ``torch.compile(Block.forward)`` to each block, once without and once with the Dynamo flag that
makes late hooks fire (its guards cost the same whoever asks for them). Rounds are interleaved; medians and ratios are
printed.

    python benchmarks/step_overhead.py --width 256 --blocks 12
"""

from __future__ import annotations

import argparse
import statistics
import time
import types
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch import nn

import torchrig


class Block(nn.Module):
    """A feed-forward block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, width]`` to the same."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks behind a trainable layer."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, width]`` to the same."""
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def bare(model: Stack, backend: str, flags: dict[str, Any]) -> Stack:
    """Bind one compiled forward to each block, and trace it under the flags."""
    compile_apart: Any = torch.compile  # isolate_recompiles is not in its typed signature (torch 2.13)
    compiled = compile_apart(Block.forward, backend=backend, isolate_recompiles=True)
    for layer in model.layers:
        layer.forward = types.MethodType(compiled, layer)
    with torch._dynamo.config.patch(**flags):
        model(torch.ones(4, model.first.in_features)).sum().backward()
    return model


def seconds(model: nn.Module, x: torch.Tensor, repeats: int) -> float:
    """Seconds a step, forward and backward."""
    started = time.perf_counter()
    for _ in range(repeats):
        model(x).sum().backward()
    return (time.perf_counter() - started) / repeats


def main() -> None:
    """Build the three models, time them in turn, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()

    def build() -> Stack:
        return Stack(arguments.blocks, arguments.width)

    ways: dict[str, Callable[[], nn.Module]] = {
        "bare loop": lambda: bare(build(), arguments.backend, {}),
        "bare loop, late hooks guarded": lambda: bare(
            build(), arguments.backend, {"skip_nnmodule_hook_guards": False, "allow_unspec_int_on_nn_module": True}
        ),
        "torchrig": lambda: torchrig.prepare(build(), backend=arguments.backend),
    }
    models = {name: make() for name, make in ways.items()}
    x = torch.ones(arguments.batch, arguments.width)
    times: dict[str, list[float]] = {name: [] for name in models}
    for model in models.values():
        seconds(model, x, 3)
    for _ in range(arguments.rounds):
        for name, model in models.items():
            times[name].append(seconds(model, x, arguments.repeats))
    medians = {name: statistics.median(own) for name, own in times.items()}
    print(f"{arguments.blocks} blocks of width {arguments.width}, batch {arguments.batch}, {arguments.backend}")
    for name, median in medians.items():
        ratios = [one / other for one, other in zip(times[name], times["bare loop, late hooks guarded"], strict=True)]
        print(f"{name:32} {median * 1e3:8.2f} ms a step   {statistics.median(ratios):.3f}x of guarded bare")


if __name__ == "__main__":
    main()
