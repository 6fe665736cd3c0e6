"""Warm-up on several processes: all of them end together, or none goes on; and no group keeps the longer timeout."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group
from toys import Stack

import torchrig
from torchrig import ranks


def timeout() -> timedelta:
    group = _get_default_group()
    return group._get_backend(torch.device("cpu")).options._timeout


@pytest.mark.processes(2)
def test_every_rank_compiles_both_modes_and_the_model_stays_as_it_was():
    torch.manual_seed(0)
    bare = Stack()
    model = torchrig.prepare(bare, strategy="ddp", backend="aot_eager")
    x = torch.ones(2, 4) * (1 + dist.get_rank())
    before, state, waited = {k: v.clone() for k, v in bare.state_dict().items()}, torch.get_rng_state(), timeout()
    report = torchrig.warmup(model, x)
    assert report["Block"].modes == {"train": 1, "eval, no_grad": 1}
    assert all(torch.equal(value, bare.state_dict()[name]) for name, value in before.items())
    assert all(parameter.grad is None for parameter in bare.parameters())
    assert torch.equal(state, torch.get_rng_state()) and timeout() == waited
    model(x).sum().backward()
    gathered = [torch.empty(4, 4) for _ in range(2)]
    dist.all_gather(gathered, bare.first.weight.grad)
    assert torch.equal(*gathered) and torchrig.report(model)["Block"].graphs == 2


@pytest.mark.processes(2)
def test_where_one_rank_fails_none_goes_on():
    model = torchrig.prepare(Stack(), strategy="ddp", backend="eager")
    wrong = dist.get_rank() == 1
    x = torch.ones(2, 3 if wrong else 4)
    with pytest.raises(RuntimeError if wrong else torchrig.RankFailed) as caught:
        torchrig.warmup(model, x, modes="eval")
    assert wrong or "Rank 1 failed in the warm-up" in str(caught.value)


@pytest.mark.processes(2)
def test_a_group_waits_longer_and_then_no_longer():
    before = timeout()
    with ranks.patient(timedelta(hours=3)):
        assert timeout() == timedelta(hours=3)
    assert timeout() == before


@pytest.mark.processes(2)
def test_only_the_first_rank_shows_the_progress(capsys):
    model = torchrig.prepare(Stack(), strategy="ddp", backend="eager")
    torchrig.warmup(model, torch.ones(2, 4))
    assert ("warm-up, train" in capsys.readouterr().err) == (dist.get_rank() == 0)
