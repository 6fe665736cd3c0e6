"""What fsdp2 reckons that a process keeps and sends: compared with ``fully_shard``, and with four real processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import Language, adamw, batch, loss_of, own
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import torchrig
from torchrig import SettingsError, StrategyError
from torchrig.regions import resolve
from torchrig.simulation import simulate

FSDP = {"strategy": "fsdp2", "backend": "eager"}


def on_meta(**choices):
    with torch.device("meta"):
        return Language(width=24, **choices)


@pytest.fixture
def pretended():
    """Starts a group of so many processes that are not there."""
    yield lambda size: dist.init_process_group("fake", rank=0, world_size=size)
    dist.destroy_process_group()


@pytest.mark.parametrize("units", ["regions", "large", "root"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("processes", [1, 2, 7, 1024])
def test_what_is_kept_is_what_fully_shard_keeps(pretended, processes, tied, units):
    simulated = simulate(on_meta(tied=tied), processes, fsdp2={"units": units}, **FSDP)
    model = on_meta(tied=tied)
    pretended(processes)
    for unit in simulated.units:
        fully_shard(resolve(model, unit.name))
    parameters = dict(model.named_parameters())
    kept = {name: shape for unit in simulated.units for name, shape in unit.kept.items()}
    assert kept == {name: parameter.to_local().shape for name, parameter in parameters.items()}
    assert simulated.parameters == sum(parameter.to_local().nbytes for parameter in parameters.values())


class Traffic:
    """Counts the bytes that this process receives in gathers, and hands out in reductions."""

    def __init__(self, monkeypatch):
        self.gathered = self.reduced = 0
        for name in ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor"):
            if hasattr(dist, name):  # torch 2.13 has new names for the same
                monkeypatch.setattr(dist, name, self._counting(getattr(dist, name), name))
        monkeypatch.setattr(dist, "all_reduce", self._counting(dist.all_reduce, "all_reduce"))

    def _counting(self, function, name):
        def call(*tensors, **arguments):
            given = (*tensors, *arguments.values())
            sizes = [each.nbytes for each in given if isinstance(each, torch.Tensor)]
            if name.startswith("all_gather"):
                self.gathered += max(sizes) - min(sizes)
            else:  # of a reduce-scatter its own part stays; an all-reduce has one tensor
                self.reduced += max(sizes) - (min(sizes) if len(sizes) > 1 else 0)
            return function(*tensors, **arguments)

        return call


def stored(tensors):
    """Bytes of the memory behind this process's parts; several may lie in one piece."""
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in local}.values())


SETTINGS = [
    {},
    {"mixed_precision": "bf16"},
    {"fsdp2": {"units": "large"}},
    {"fsdp2": {"replicate": 2}},
    {"fsdp2": {"reshard_after_forward": False}},
    {"fsdp2": {"reshard_after_forward": 2}},
]


@pytest.mark.processes(4, group=False)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_four_real_processes_keep_and_send_what_was_reckoned(monkeypatch, settings):
    settings = {**FSDP, "device": "cpu", **settings}
    model = Language(width=24)
    model.layers[0].up.weight.requires_grad_(False)
    simulated = simulate(model, 4, **settings)
    optimizer = adamw(model)
    torchrig.prepare(model, optimizer, **settings)
    loss_of(model, own(batch(0))).backward()
    optimizer.step()
    optimizer.zero_grad()
    traffic = Traffic(monkeypatch)
    loss_of(model, own(batch(1))).backward()
    parameters = list(model.parameters())
    state = [value for each in optimizer.state.values() for value in each.values()]
    within = {"rel": 0.05}
    assert stored(parameters) == pytest.approx(simulated.parameters, **within)
    assert stored(each.grad for each in parameters if each.grad is not None) == pytest.approx(
        simulated.gradients, **within
    )
    if dist.get_rank() == 0:  # the last ones may have less: padding has no state
        assert stored(state) == pytest.approx(simulated.optimizer_state, **within)
    assert (traffic.gathered, traffic.reduced) == (simulated.gathered, simulated.reduced)


def test_a_mesh_that_does_not_divide_is_told():
    with pytest.raises(SettingsError, match="1000 processes cannot be divided into 3 replicas"):
        simulate(on_meta(), 1000, fsdp2={"replicate": 3}, **FSDP)


def test_what_cannot_be_cut_or_told_is_refused():
    model = on_meta()
    model.scale = nn.Parameter(torch.empty((), device="meta"))
    with pytest.raises(StrategyError, match="'scale' is a scalar"):
        simulate(model, 4, **FSDP)
    with pytest.raises(StrategyError, match="is up to the function 'parallelize'"):
        simulate(on_meta(), 4, parallelize=lambda model, mesh: model, **FSDP)
