"""A run that is saved under one strategy, backend and number of processes goes on under any other."""

from __future__ import annotations

import os
import time
import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torchrig


def in_tensor_parallel(model, mesh):
    """Split the two matrices of each block over the dimension "tp" of the mesh."""
    for block in model.layers:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


TENSOR_PARALLEL = {"parallelize": in_tensor_parallel, "fsdp2": {"tensor_parallel": 2}}
WAYS = {  # name -> how many processes, settings
    "single": (1, {"strategy": "single", "backend": "eager"}),
    "ddp on 2": (2, {"strategy": "ddp", "backend": "no"}),
    "fsdp2 on 2": (2, {"strategy": "fsdp2", "backend": "aot_eager"}),
    "fsdp2 on 4": (4, {"strategy": "fsdp2", "backend": "eager"}),
    "hsdp on 4": (4, {"strategy": "fsdp2", "backend": "no", "fsdp2": {"replicate": 2}}),
    "fsdp2 and tp on 4": (4, {"strategy": "fsdp2", "backend": "no", **TENSOR_PARALLEL}),
}


class Block(nn.Module):
    """Two matrices, a norm whose weights no number of processes divides, a buffer."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
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
    """A training run; every rank sees the same batches, so that the losses are those of one process."""

    def __init__(self, seed, **settings):
        torch.manual_seed(seed)
        model = Model().double()
        matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
        optimizer = torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=0.02)
        self.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        self.model, self.optimizer = torchrig.prepare(model, optimizer, device="cpu", **settings)

    def steps(self, first, count):
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


class Ranks:
    """The four processes of a test, of which the first few make up a group for a while."""

    def __init__(self, folder, monkeypatch):
        self.rank, self._folder, self._count = int(os.environ["RANK"]), folder, 0
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name)

    @contextmanager
    def first(self, size):
        """Whether this one is among the first ``size``; when it is left, all four go on together."""
        self._count += 1
        inside, group = self.rank < size, f"file://{self._folder}/group-{self._count}"
        if inside and size > 1:
            dist.init_process_group("gloo", init_method=group, rank=self.rank, world_size=size)
        try:
            yield inside
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        (self._folder / f"{self._count}-{self.rank}").touch()
        while not all((self._folder / f"{self._count}-{rank}").exists() for rank in range(4)):
            time.sleep(0.002)


@pytest.fixture
def ranks(shared_path, monkeypatch):
    return Ranks(shared_path, monkeypatch)


@pytest.mark.processes(4, group=False)
@pytest.mark.parametrize("source", WAYS)
def test_a_run_goes_on_in_any_way(source, ranks, shared_path):  # case 21: still tied
    expected = Run(0, **WAYS["single"][1]).steps(0, 7)[3:]
    size, settings = WAYS[source]
    with ranks.first(size) as inside:
        if inside:
            run = Run(0, **settings)
            run.steps(0, 3)
            torchrig.save_checkpoint(shared_path / "run", run.model, run.optimizer, schedule=run.schedule, step=3)
            assert run.steps(3, 4) == pytest.approx(expected, rel=1e-12)
    for size, settings in WAYS.values():
        with ranks.first(size) as inside, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The checkpoint was saved by . ranks")
            if inside:
                run = Run(1, **settings)
                loaded = torchrig.load_checkpoint(shared_path / "run", run.model, run.optimizer, schedule=run.schedule)
                assert run.steps(loaded["step"], 4) == pytest.approx(expected, rel=1e-12), settings
                bare = torchrig.unwrap(run.model)
                assert bare.head.weight is bare.embed.weight
