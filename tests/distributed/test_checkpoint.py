"""Checkpoints on several processes: each rank's own part of them, and what fails on one rank fails on all."""

from __future__ import annotations

import copy
import os
import random
import signal
import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torchrun import launch
from toys import Stack

import torchrig
from torchrig import CheckpointError, TorchrigWarning
from torchrig.checkpoint import names, saving


class Alike:
    """The same model, trained a step, on every rank."""

    def __init__(self, seed=0, wrap=lambda model: model):
        torch.manual_seed(seed)
        self.bare = Stack()
        self.model = wrap(self.bare)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.step()

    def step(self):
        self.model(torch.linspace(-1, 1, 8).reshape(2, 4)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self):
        return copy.deepcopy((list(self.bare.state_dict().values()), self.optimizer.state_dict()["state"]))

    def unchanged(self, before):
        values, moments = before
        now, state = list(self.bare.state_dict().values()), self.optimizer.state_dict()["state"]
        return all(map(same, values, now)) and all(
            same(moments[key][name], state[key][name]) for key in moments for name in moments[key]
        )


def same(one, other):
    local = [each.to_local() if isinstance(each, DTensor) else each for each in (one, other)]
    return torch.equal(*local)


def sharded(model):
    for part in (*model.layers, model):
        fully_shard(part)
    return model


@pytest.mark.processes(2)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: torch.compile(model, backend="eager"),
        DistributedDataParallel,
        lambda model: torch.compile(DistributedDataParallel(model), backend="eager"),
        lambda model: DistributedDataParallel(torch.compile(model, backend="eager")),
        lambda model: torch.compile(DistributedDataParallel(torch.compile(model, backend="eager")), backend="eager"),
    ],
    ids=["compile", "ddp", "compile(ddp)", "ddp(compile)", "compile(ddp(compile))"],
)
def test_keys_are_the_bare_models_in_any_nesting(shared_path, wrap):  # case 2
    run = Alike(wrap=wrap)
    assert list(names.state_dict(torchrig.unwrap(run.model))) == list(Stack().state_dict())
    torchrig.save_checkpoint(shared_path / "run", run.model, run.optimizer)
    plain = Alike(seed=1)
    torchrig.load_checkpoint(shared_path / "run", plain.model, plain.optimizer)
    assert plain.unchanged(run.state())
    run.step()
    torchrig.load_checkpoint(shared_path / "run", run.model, run.optimizer)
    assert run.unchanged(plain.state())


@pytest.mark.processes(2)
def test_each_rank_gets_its_own_random_states_back(shared_path):
    def draw():
        return torch.rand(3).tolist(), random.random()

    torch.manual_seed(dist.get_rank())
    random.seed(dist.get_rank())
    torchrig.save_checkpoint(shared_path / "run", nn.Linear(2, 2))
    first = draw()
    torchrig.load_checkpoint(shared_path / "run", nn.Linear(2, 2))
    assert draw() == first
    both = [None, None]
    dist.all_gather_object(both, first)
    assert both[0] != both[1]


ALONE = """
import sys, torch, torchrig
torch.manual_seed(7)
torchrig.save_checkpoint(sys.argv[1], torch.nn.Linear(2, 2))
print(torch.rand(1).item())
"""


@pytest.mark.processes(2)
def test_another_number_of_ranks_takes_the_first_ones_random_states(shared_path):
    if dist.get_rank() == 0:
        alone = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK")}
        command = [sys.executable, "-c", ALONE, str(shared_path / "run")]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=alone)
        (shared_path / "drawn").write_text(done.stdout)
    dist.barrier()
    warned = pytest.warns(TorchrigWarning, match="saved by 1 ranks and is loaded by 2: every rank takes")
    with warned if dist.get_rank() == 0 else warnings.catch_warnings():
        torchrig.load_checkpoint(shared_path / "run", nn.Linear(2, 2))
    assert torch.rand(1).item() == float((shared_path / "drawn").read_text())


@pytest.mark.processes(2)
def test_buffers_that_differ_are_the_first_ranks(shared_path):
    model = nn.BatchNorm1d(3)
    model.running_mean.fill_(dist.get_rank() + 5)
    torchrig.save_checkpoint(shared_path / "run", model)
    torchrig.load_checkpoint(shared_path / "run", model)
    assert model.running_mean.tolist() == [5.0] * 3


@pytest.mark.processes(2)
def test_a_sharded_average_is_restored_in_place(shared_path):
    run, other = Alike(wrap=sharded), Alike(seed=1, wrap=sharded)
    averages = [sharded(Stack()) for _ in (run, other)]
    torchrig.save_checkpoint(shared_path / "run", run.model, run.optimizer, average=averages[0])
    torchrig.load_checkpoint(shared_path / "run", other.model, other.optimizer, average=averages[1])
    assert other.unchanged(run.state())
    assert all(map(same, averages[0].state_dict().values(), averages[1].state_dict().values()))
    loaded = torchrig.load_checkpoint(shared_path / "run", other.model, other.optimizer)
    assert all(type(each) is torch.Tensor for each in loaded["average"].values())  # whole, where it is not given
    with pytest.raises(CheckpointError, match="AdamW steps sharded parameters"):
        torchrig.save_checkpoint(shared_path / "run", run.model, also=run.optimizer)


@pytest.mark.processes(2)
@pytest.mark.parametrize("wrap", [lambda model: model, sharded], ids=["whole", "sharded"])
def test_an_optimizer_that_did_not_step_gets_state(shared_path, wrap):
    run = Alike(wrap=wrap)
    torchrig.save_checkpoint(shared_path / "run", run.model, run.optimizer)
    other = Alike(seed=1, wrap=wrap)
    other.optimizer.state.clear()
    torchrig.load_checkpoint(shared_path / "run", other.model, other.optimizer)
    for _ in range(2):
        run.step()
        other.step()
    assert other.unchanged(run.state())


# What fails on one rank fails on all, and changes nothing on any.


def refused(run, message, call):
    before = run.state()
    with pytest.raises(CheckpointError, match=message):
        call()
    assert run.unchanged(before)


@pytest.mark.processes(2)
def test_a_value_that_one_rank_cannot_save(shared_path):
    run, path = Alike(wrap=sharded), shared_path / "run"
    torchrig.save_checkpoint(path, run.model, run.optimizer, step=1)
    value = (lambda: 0) if dist.get_rank() == 1 else 2
    told = (
        "extra.step is a function"
        if dist.get_rank() == 1
        else "failed on rank 1, and was stopped on all: extra.step is a"
    )
    refused(run, told, lambda: torchrig.save_checkpoint(path, run.model, run.optimizer, step=value))
    assert torchrig.load_checkpoint(path, run.model, run.optimizer) == {"step": 1}


@pytest.mark.processes(2)
@pytest.mark.parametrize("place", [(saving.storage.FileSystemWriter, "write_data"), (saving.folder, "digests")])
def test_a_rank_that_cannot_write(shared_path, monkeypatch, place):
    run, path = Alike(wrap=sharded), shared_path / "run"
    torchrig.save_checkpoint(path, run.model, run.optimizer, step=1)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    if dist.get_rank() == 1:
        monkeypatch.setattr(*place, full)
    refused(run, "rank 1.*No space left|No space left", lambda: torchrig.save_checkpoint(path, run.model, step=2))
    dist.barrier()
    assert len(list(path.iterdir())) == 2
    assert torchrig.load_checkpoint(path, run.model, run.optimizer) == {"step": 1}


@pytest.mark.processes(2)
def test_a_disk_that_is_not_shared_is_told(shared_path):
    run, path = Alike(), shared_path / str(dist.get_rank()) / "run"
    run.model = sharded(run.model)
    message = "which another rank wrote, is not there. All ranks must save to a disk they share"
    with pytest.raises(CheckpointError, match=message if dist.get_rank() == 0 else "rank 0"):
        torchrig.save_checkpoint(path, run.model)


@pytest.mark.processes(2)
def test_a_file_that_one_rank_finds_damaged(shared_path):
    run, path = Alike(wrap=sharded), shared_path / "run"
    torchrig.save_checkpoint(path, run.model, run.optimizer)
    dist.barrier()
    if dist.get_rank() == 0:
        (file,) = path.glob("data-*/__1_*")
        content = bytearray(file.read_bytes())
        content[100] ^= 1
        file.write_bytes(content)
    dist.barrier()
    refused(run, r"__1_0\.distcp is damaged", lambda: torchrig.load_checkpoint(path, run.model, run.optimizer))


@pytest.mark.processes(2)
def test_a_model_that_fits_on_one_rank_only(shared_path):
    run, path = Alike(), shared_path / "run"
    torchrig.save_checkpoint(path, run.model, run.optimizer)
    if dist.get_rank() == 1:
        run.model.more = nn.Linear(1, 1)
    refused(run, "the checkpoint does not have 'more.weight'", lambda: torchrig.load_checkpoint(path, run.model))


@pytest.mark.processes(2)
def test_an_object_that_does_not_load_on_one_rank(shared_path):
    class Schedule:
        stubborn = False

        def state_dict(self):
            return {"step": 1}

        def load_state_dict(self, state):
            if self.stubborn:
                raise ValueError("not today")

    run, path, schedule = Alike(wrap=sharded), shared_path / "run", Schedule()
    torchrig.save_checkpoint(path, run.model, run.optimizer, schedule=schedule)
    run.step()
    schedule.stubborn = dist.get_rank() == 1
    refused(run, "not today", lambda: torchrig.load_checkpoint(path, run.model, run.optimizer, schedule=schedule))


KILLED = """
import os, signal, sys, torch, torchrig
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torchrig.checkpoint import saving

dist.init_process_group("gloo")
model = fully_shard(torch.nn.Linear(64, 64))
torch.nn.init.constant_(model.weight, 1.0)
torchrig.save_checkpoint(sys.argv[1], model, epoch=1)
torch.nn.init.constant_(model.weight, 2.0)
inner = saving.folder.digests

def killing(*args):
    os.kill(os.getpid(), signal.SIGKILL)

if dist.get_rank() == int(sys.argv[2]):
    saving.folder.digests = killing
torchrig.save_checkpoint(sys.argv[1], model, epoch=2)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_leaves_the_checkpoint_before(tmp_path, rank):
    (tmp_path / "killed.py").write_text(KILLED)
    done = launch(tmp_path / "killed.py", tmp_path / "run", rank, processes=2)
    assert done.returncode != 0 and str(-signal.SIGKILL) in done.stderr
    model = nn.Linear(64, 64)
    with pytest.warns(TorchrigWarning, match="saved by 2 ranks and is loaded by 1"):
        assert torchrig.load_checkpoint(tmp_path / "run", model) == {"epoch": 1}
    assert torch.equal(model.weight, torch.ones(64, 64))
    torchrig.save_checkpoint(tmp_path / "run", model, epoch=3)
    assert len(list((tmp_path / "run").iterdir())) == 2
