"""What fails on one process ends all of them, with that process's traceback; nobody waits for ever."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torchrun import launch

import torchrig

ENDED = 45  # seconds, the start of two Pythons included; torchrun gives the others 30 to end after one has failed

SCRIPT = """
import contextlib, sys
import torch, torch.distributed as dist, torchrig
from torch.distributed.elastic.multiprocessing.errors import record

class Tired(torch.nn.Linear):
    def parameters(self, recurse=True):
        if sys.argv[1] == "prepare" and dist.is_initialized() and dist.get_rank() == 1:
            raise ZeroDivisionError("rank 1 is tired in prepare")
        return super().parameters(recurse)

    def forward(self, x):
        if sys.argv[1] == "step" and dist.get_rank() == 1:
            raise ZeroDivisionError("rank 1 is tired in step")
        return super().forward(x)

@record
def main():
    model = torchrig.prepare(Tired(4, 4), strategy=sys.argv[2], backend="no", device="cpu")
    more = sys.argv[1] in ("uneven", "join")
    with model.join() if sys.argv[1] == "join" else contextlib.nullcontext():
        for _ in range(2 + more * dist.get_rank()):
            model(torch.ones(2, 4)).sum().backward()

main()
"""


def run(tmp_path: Path, *arguments: str) -> tuple[int, str, float]:
    (tmp_path / "script.py").write_text(SCRIPT)
    started = time.monotonic()
    done = launch(tmp_path / "script.py", *arguments, processes=2, timeout=ENDED)
    return done.returncode, done.stderr, time.monotonic() - started


@pytest.mark.parametrize(("where", "strategy"), [("prepare", "ddp"), ("step", "fsdp2")])
def test_a_rank_that_raises_ends_all_with_its_traceback(tmp_path, where, strategy):
    code, said, seconds = run(tmp_path, where, strategy)
    assert code == 1, said
    assert f"ZeroDivisionError: rank 1 is tired in {where}" in said
    assert seconds < ENDED


@pytest.mark.parametrize("where", ["uneven", "join"])
def test_one_batch_more_on_a_rank_of_ddp_is_an_error_and_not_a_hang_unless_joined(tmp_path, where):
    code, said, _ = run(tmp_path, where, "ddp")
    assert code == (where == "uneven"), said


@pytest.mark.processes(2)
def test_a_mesh_that_the_processes_do_not_fit_is_refused_on_every_one():
    model = torch.nn.Linear(4, 4)
    with pytest.raises(torchrig.SettingsError, match="2 processes cannot be divided into 3 replicas"):
        torchrig.prepare(model, strategy="fsdp2", backend="no", device="cpu", fsdp2={"replicate": 3})
    assert type(model.weight) is torch.nn.Parameter
