"""What tests on several processes share: a small language model, its batches, and a loop over a process's own part.

The loss and the gradients of one process on the whole batch are what the processes together must arrive at.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

TOKENS = 16  # the vocabulary


class Block(nn.Module):
    """A residual feed-forward block, ``[batch, length, width]`` to the same."""

    def __init__(self, width: int = 8, checkpointed: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed and self.training:
            return x + checkpoint(self.feed, x, use_reentrant=False)
        return x + self.feed(x)

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


class Language(nn.Module):
    """``[batch, length]`` tokens to ``[batch, length, 16]`` logits."""

    def __init__(self, width: int = 8, blocks: int = 4, tied: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, width)
        self.layers = nn.ModuleList(Block(width, checkpointed) for _ in range(blocks))
        self.head = nn.Linear(width, TOKENS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(dtype: torch.dtype = torch.float64, **choices: object) -> Language:
    """The model, with the same values wherever it is built."""
    torch.manual_seed(0)
    return Language(**choices).to(dtype)


def adamw(model: nn.Module, **choices: object) -> torch.optim.Optimizer:
    """An optimizer with state of the parameters' shapes, and a step counter."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **choices)


def batch(step: int, rows: int = 8) -> torch.Tensor:
    """``[rows, 5]`` tokens, the same on every process."""
    return torch.randint(TOKENS, (rows, 5), generator=torch.Generator().manual_seed(step))


def own(rows: torch.Tensor, mesh_rank: int | None = None, parts: int | None = None) -> torch.Tensor:
    """This process's part of a batch."""
    rank = dist.get_rank() if mesh_rank is None else mesh_rank
    return rows.chunk(parts or dist.get_world_size())[rank]


def whole(rows: torch.Tensor) -> torch.Tensor:
    """All of a batch."""
    return rows


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of predicting the tokens themselves."""
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range = range(3),
    part: Callable[[torch.Tensor], torch.Tensor] = own,
) -> list[float]:
    """The losses of some steps, each the mean over the processes where they have different parts."""
    losses = []
    for step in steps:
        loss = loss_of(model, part(batch(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss) if part is not whole else loss.item())
    return losses


def mean(value: torch.Tensor) -> float:
    """The mean of a number over the processes."""
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def gathered(value: torch.Tensor) -> torch.Tensor:
    """A tensor, put together where it is sharded."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def check_same(model: nn.Module, bare: nn.Module, **tolerance: float) -> None:
    """That two models have equal parameters, gradients and buffers, name by name."""
    ours, theirs = dict(model.named_parameters()), dict(bare.named_parameters())
    assert list(ours) == list(theirs)
    for name, parameter in ours.items():
        message = lambda text, name=name: f"{name}: {text}"  # noqa: E731
        torch.testing.assert_close(gathered(parameter), theirs[name], msg=message, **tolerance)
        assert (parameter.grad is None) == (theirs[name].grad is None), name
        if parameter.grad is not None:
            torch.testing.assert_close(gathered(parameter.grad), theirs[name].grad, msg=message, **tolerance)
