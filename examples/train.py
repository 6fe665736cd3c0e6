"""Train a small byte-level Llama on the Python standard library's own sources.

A plain PyTorch training loop; torchrig is the one line that calls ``torchrig.prepare``. Which backend compiles, and
which regions, is chosen by flags or by ``TORCHRIG_*`` variables::

    python examples/train.py --backend inductor
    TORCHRIG_BACKEND=inductor TORCHRIG_REGIONS=whole python examples/train.py --steps 50
    torchrun --nproc-per-node 2 examples/train.py --strategy fsdp2

``--batch`` is the batch of all processes together, so that the losses are the same for any number of them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu
from torch.utils.data import DataLoader, TensorDataset

import torchrig

BYTES = 256  # the vocabulary: every byte is a token
CONTEXT = 64  # tokens


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding: turn each pair of channels by an angle that grows with the position."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Block(nn.Module):
    """Causal self-attention, then a gated feed-forward layer, each on the normalized input and added to it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.feed_norm = nn.RMSNorm(width, eps=1e-5)
        self.gate = nn.Linear(width, 3 * width, bias=False)
        self.up = nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x), cos, sin)
        y = self.feed_norm(x)
        return x + self.down(silu(self.gate(y)) * self.up(y))

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class ByteLlama(nn.Module):
    """A Llama-style language model over bytes: ``(batch, length)`` tokens to ``(batch, length, 256)`` logits."""

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int = 256, heads: int = 4, layers: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, BYTES, bias=False)
        for weight in (each for each in self.parameters() if each.dim() > 1):
            nn.init.normal_(weight, std=0.02)
        frequencies = 10_000.0 ** -torch.linspace(0, 1, width // heads // 2)
        angles = torch.outer(torch.arange(CONTEXT).float(), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def standard_library(limit: int = 4_000_000) -> Tensor:
    """The first ``limit`` bytes of the standard library's modules, in the order of their names."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)[:limit]), dtype=torch.uint8)


def batches(batch: int, seed: int) -> DataLoader[tuple[Tensor, ...]]:
    """Windows of the text in a shuffled order that depends on the seed alone."""
    text = standard_library()
    windows = text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    order = torch.Generator().manual_seed(seed)
    return DataLoader(TensorDataset(windows), batch_size=batch, shuffle=True, drop_last=True, generator=order)


@record  # so that torchrun shows the traceback of a process that raises
def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    first = os.environ.get("RANK", "0") == "0"  # the process that prints and writes
    torch.manual_seed(options.seed)
    model = ByteLlama(options.width, options.heads, options.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1)
    loader = batches(options.batch // processes(), options.seed)

    flags = ("backend", "regions", "strategy")
    chosen = {name: value for name in flags if (value := getattr(options, name)) is not None}
    model, optimizer, loader = torchrig.prepare(model, optimizer, loader, **chosen)

    losses, seconds = [], []
    for step, (window,) in zip(range(1, options.steps + 1), loader, strict=False):
        start = time.perf_counter()
        tokens = window.long()
        logits = model(tokens[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss.detach()))
        seconds.append(time.perf_counter() - start)
        if first:
            print(f"step {step}/{options.steps}  loss {losses[-1]:.4f}  {seconds[-1] * 1e3:.0f} ms", flush=True)

    report = torchrig.report(model)
    peak = mean(torch.tensor(peak_memory()))
    if first:
        print(report)
    if options.checkpoint:  # every process gives its part; the first one gets the bare model's whole values
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if first:
            torch.save(whole, options.checkpoint)
    if options.json and first:
        log = {"losses": losses, "seconds": seconds, "peak_mb": peak, "report": json.loads(report.to_json())}
        options.json.write_text(json.dumps(log))


def processes() -> int:
    """How many processes train together, by torchrun's variable."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def mean(value: Tensor) -> float:
    """The mean over all processes of a number that each has its own of."""
    if dist.is_initialized():
        dist.all_reduce(value)
        value = value / dist.get_world_size()
    return value.item()


def peak_memory() -> float:
    """The most memory that this process held at once, in megabytes; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    unit = 1 if sys.platform == "darwin" else 1024  # bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level Llama on the Python standard library's sources.")
    parser.add_argument("--backend", help="what compiles: no, eager, inductor, ... (default: TORCHRIG_BACKEND, or no)")
    parser.add_argument("--regions", help="what is compiled: auto, whole, ... (default: TORCHRIG_REGIONS, or auto)")
    parser.add_argument("--strategy", help="single, ddp, fsdp2, ... (default: TORCHRIG_STRATEGY, or auto)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=10, help="windows of text in a batch, over all processes")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, help="write the trained state dict to this file")
    parser.add_argument("--json", type=Path, help="write losses, step seconds and the report to this JSON file")
    options = parser.parse_args(arguments)
    if options.batch % processes():
        parser.error(f"--batch {options.batch} cannot be divided among {processes()} processes")
    return options


if __name__ == "__main__":
    main()
