"""Activation checkpointing on two processes: one graph a kind, and the numbers of the strategy run eager."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchrig


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def train(**settings: object) -> tuple[list[float], torchrig.Report]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = torchrig.prepare(model, optimizer, **settings)
    generator, losses = torch.Generator().manual_seed(1 + dist.get_rank()), []
    for _ in range(3):
        loss = model(torch.randn(4, 8, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses, torchrig.report(model)


@pytest.mark.processes(2)
@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_case_19_checkpointed_blocks_are_one_graph_and_train_as_eager(strategy, precision, kind):
    given = {"strategy": strategy, "mixed_precision": precision}
    losses, report = train(**given, backend="aot_eager", fullgraph=True, activation_checkpointing=kind)
    wanted, _ = train(**given)
    assert losses == pytest.approx(wanted, rel=1e-5 if precision == "no" else 1e-2)
    assert report["Block"].graphs == 1 and report["Block"].calls >= 12 and report.ok
