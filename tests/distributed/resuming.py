"""Runs that are saved under each strategy and go on under each other; started by ``test_checkpoint.py``.

    torchrun resuming.py save FOLDER WAY...     trains, saves to FOLDER/WAY, trains on
    torchrun resuming.py load FOLDER WAY...     loads every checkpoint in FOLDER under each WAY, and trains on

What every step lost is written to ``FOLDER/losses``. Every rank sees the same batches, so that the losses of all ways
are those of one process.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchrig


class Block(nn.Module):
    """Attention-like enough: two matrices of odd sizes, a norm, a buffer."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 13), nn.Linear(13, 6)
        self.norm = nn.LayerNorm(6)
        self.register_buffer("scale", torch.rand(1))

    def forward(self, x):
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Three blocks between an embedding and a head that share their weight, and a part that is frozen."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 6)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 17, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.frozen(x))


class Run:
    """A training run in one way, such as ``"fsdp2/eager/4"``: strategy, backend, and how many processes."""

    def __init__(self, way: str, seed: int) -> None:
        strategy, backend, _ = way.split("/")
        torch.manual_seed(seed)
        model = Model().double()
        if strategy in ("fsdp2", "hsdp"):
            self.model = torchrig.compile_regions(model, backend=backend) if backend != "no" else model
            shape, dims = ((dist.get_world_size(),), ("shard",)) if strategy == "fsdp2" else ((2, 2), ("copy", "shard"))
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=dims)
            for part in (*model.layers, model):
                fully_shard(part, mesh=mesh)
            self.optimizer = self._optimizer(model)
        else:
            self.model, self.optimizer = torchrig.prepare(
                model, self._optimizer(model), strategy=strategy, backend=backend, device="cpu"
            )
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.7)

    def steps(self, first: int, count: int) -> list[float]:
        """Train on the batches from ``first`` on."""
        losses = []
        for step in range(first, first + count):
            tokens = torch.randint(17, (4, 5), generator=torch.Generator().manual_seed(step))
            loss = nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten().roll(1))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            losses.append(loss.item())
        return losses

    @staticmethod
    def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
        matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
        return torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=0.02)


def save(folder: Path, way: str) -> dict[str, list[float]]:
    """Train, save, train on."""
    run = Run(way, seed=0)
    run.steps(0, 3)
    torchrig.save_checkpoint(folder / way.replace("/", "-"), run.model, run.optimizer, schedule=run.schedule, step=3)
    return {way: run.steps(3, 4)}


def load(folder: Path, way: str) -> dict[str, list[float]]:
    """Go on from every checkpoint."""
    losses = {}
    for path in sorted(each for each in folder.iterdir() if (each / "manifest.json").exists()):
        run = Run(way, seed=1)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The checkpoint was saved by . ranks", category=UserWarning)
            extra = torchrig.load_checkpoint(path, run.model, run.optimizer, schedule=run.schedule)
        losses[f"{path.name} -> {way}"] = run.steps(extra["step"], 4)
        assert torchrig.unwrap(run.model).head.weight is torchrig.unwrap(run.model).embed.weight
    return losses


def main(action: str, folder: str, *ways: str) -> None:
    """Do it for each way, and write what the first rank saw."""
    done: dict[str, Any] = {}
    for way in ways:
        done |= (save if action == "save" else load)(Path(folder), way)
    if not dist.is_initialized() or dist.get_rank() == 0:
        size = dist.get_world_size() if dist.is_initialized() else 1
        losses = Path(folder) / "losses"
        losses.mkdir(exist_ok=True)
        (losses / f"{action}-{size}.json").write_text(json.dumps(done))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    main(*sys.argv[1:])
