"""The tests' own tool: what passes on every rank passes, and what fails on one is told by name and rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torchrun import launch

ROOT = Path(__file__).parents[2]
WRONG = """
import os, pytest

rank = int(os.environ.get("RANK", "0"))
two = pytest.mark.processes(2, group=False)

@two
def test_right():
    pass

@two
def test_one_rank_fails():
    assert rank == 0, f"{rank} is wrong"

@two
def test_a_rank_dies():
    if rank == 1:
        os._exit(3)
"""


@pytest.mark.processes(2)
@pytest.mark.parametrize("value", [1, 2])
def test_the_ranks_are_there_and_a_group_of_them(value, shared_path):
    rank = dist.get_rank()
    assert dist.get_world_size() == 2 and os.environ["RANK"] == str(rank)
    total = torch.tensor([float(value + rank)])
    dist.all_reduce(total)
    assert total.item() == 2 * value + 1
    (shared_path / str(rank)).touch()
    dist.barrier()
    assert len(list(shared_path.iterdir())) == 2


@pytest.mark.processes(2, group=False)
@pytest.mark.parametrize("attempt", [1, 2])
def test_without_a_group_torchruns_variables_start_one(attempt):
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    dist.barrier()


@pytest.mark.processes(4)
def test_four_processes_are_four():
    assert dist.get_world_size() == 4


def test_a_rank_that_fails_or_dies_fails_its_test_and_no_other(tmp_path):
    (tmp_path / "test_wrong.py").write_text(WRONG)
    (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT / 'core/tests/support'}\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", tmp_path], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert "2 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "rank 1: call failed" in done.stdout and "1 is wrong" in done.stdout
    assert "rank 0: call failed" not in done.stdout and "rank 1: the process ended" in done.stdout


def test_launch_runs_a_script_and_ends_one_that_never_does(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\nprint('rank', os.environ['RANK'], sys.argv[1])\ntime.sleep(float(sys.argv[1]))"
    )
    done = launch(script, "0", processes=2)
    assert done.returncode == 0 and "rank 0 0" in done.stdout and "rank 1 0" in done.stdout
    assert launch(script, "600", processes=1, timeout=3).returncode == -9
