"""Which process this is, as variables and the process group say, and the group of one process alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from torchrig import processes
from torchrig.errors import SettingsError, StrategyUnavailable
from torchrig.processes import World

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def launched(monkeypatch, **variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_without_a_launcher_there_is_one_process():
    assert processes.world() == World(0, 1, 0)
    assert not processes.launched() and not processes.has_group()


def test_torchruns_variables_say_which_one_this_is(monkeypatch):
    launched(monkeypatch, RANK="5", WORLD_SIZE="8", LOCAL_RANK="1")
    assert processes.world() == World(5, 8, 1)
    assert not processes.has_group(), "asking starts nothing"


@pytest.mark.parametrize(
    ("variables", "error", "message"),
    [
        ({"WORLD_SIZE": "2"}, StrategyUnavailable, "WORLD_SIZE=2 is set, and RANK not.*torchrun"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, StrategyUnavailable, "LOCAL_RANK not"),
        ({"WORLD_SIZE": "two"}, SettingsError, "WORLD_SIZE is 'two'.*variable WORLD_SIZE"),
        ({"WORLD_SIZE": "0"}, SettingsError, "WORLD_SIZE is '0'.*from 1"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, SettingsError, "RANK is '2'.*from 0 to 1, as WORLD_SIZE is 2"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, SettingsError, "RANK is '-1'"),
    ],
)
def test_variables_that_are_wrong_are_named(monkeypatch, variables, error, message):
    launched(monkeypatch, **variables)
    with pytest.raises(error, match=message):
        processes.world()


def test_processes_that_cannot_find_each_other_are_told_what_is_missing(monkeypatch):
    launched(monkeypatch, RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="localhost")
    with pytest.raises(StrategyUnavailable, match=r"WORLD_SIZE=2 is set, and MASTER_PORT not.*--nproc-per-node 2"):
        processes.start(CPU)
    assert not dist.is_initialized()


def test_a_process_alone_has_a_group_of_one_until_it_is_taken_back():
    undo = processes.start(CPU)
    assert (dist.get_world_size(), dist.get_rank(), dist.get_backend()) == (1, 0, "gloo")
    undo()
    assert not dist.is_initialized()


def test_a_group_that_is_there_is_used_and_left():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    processes.start(CPU)()
    assert dist.is_initialized()
    assert processes.world() == World(0, 1, 0)


def test_each_process_has_the_device_of_its_local_rank(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    cuda = torch.device("cuda")
    assert processes.own_device(cuda) == cuda
    launched(monkeypatch, RANK="3", WORLD_SIZE="4", LOCAL_RANK="1")
    assert processes.own_device(cuda) == torch.device("cuda:1")
    assert processes.own_device(torch.device("cuda:0")) == torch.device("cuda:0")
    assert processes.own_device(CPU) == CPU
    launched(monkeypatch, LOCAL_RANK="2")
    with pytest.raises(StrategyUnavailable, match=r"LOCAL_RANK=2, and this machine has 2 cuda devices"):
        processes.own_device(cuda)


def test_the_group_is_destroyed_at_exit_without_a_word():
    script = (
        "import atexit, torch.distributed as dist, torch, torchrig\n"
        "atexit.register(lambda: print('left' if dist.is_initialized() else 'gone'))\n"
        "torchrig.prepare(torch.nn.Linear(2, 2), strategy='ddp', device='cpu')\n"
        "assert dist.is_initialized()\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHRIG_")}
    command = [sys.executable, "-W", "error", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "gone\n", "")
