"""Replicas, tensor parallelism, and each way of sharding, on four processes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import Language, adamw, batch, build, check_same, loss_of, own, train, whole
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torchrig
from torchrig.precision import scaling_of

FSDP = {"strategy": "fsdp2"}
EXACT = {"rtol": 1e-11, "atol": 1e-11}


@pytest.mark.processes(4)
@pytest.mark.parametrize(
    "own_settings",
    [
        {},
        {"replicate": 2},
        {"reshard_after_forward": 2, "units": "large"},
        {"reshard_after_forward": False, "cpu_offload": True},
    ],
    ids=str,
)
def test_every_way_of_sharding_computes_the_same(own_settings):
    bare, model = build(), build()
    expected, optimizer = adamw(bare), adamw(model)
    torchrig.prepare(model, optimizer, backend="eager", fullgraph=True, fsdp2=own_settings, **FSDP)
    assert train(model, optimizer) == pytest.approx(train(bare, expected, part=whole))
    check_same(model, bare, **EXACT)
    assert torchrig.report(model).graphs == 1


class Scaled(Language):
    """Of a size that four processes cannot divide, and with a parameter that only one of them has anything of."""

    def __init__(self):
        super().__init__(width=5)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, tokens):
        return super().forward(tokens) * self.scale


def scaled(dtype):
    torch.manual_seed(0)
    return Scaled().to(dtype)


@pytest.mark.processes(4)
def test_parameters_that_the_processes_cannot_divide():
    bare, model = scaled(torch.float64), scaled(torch.float64)
    expected, optimizer = adamw(bare), adamw(model)
    train(bare, expected, range(2), whole)
    train(model, optimizer, range(2), whole)
    torchrig.prepare(model, optimizer, **FSDP)
    assert train(model, optimizer, range(2, 4)) == pytest.approx(train(bare, expected, range(2, 4), whole))
    check_same(model, bare, **EXACT)
    model.load_state_dict(bare.state_dict())
    check_same(copy.deepcopy(model), bare, rtol=0, atol=0)
    for kind in (2.0, torch.inf):
        loss_of(model, own(batch(9))).backward()
        loss_of(bare, batch(9)).backward()
        torch.testing.assert_close(*(torchrig.clip_grad_norm_(each, 0.1, kind) for each in (model, bare)), **EXACT)
        check_same(model, bare, **EXACT)


@pytest.mark.processes(4)
def test_the_check_for_overflow_takes_parameters_that_the_processes_cannot_divide():
    bare, model = scaled(torch.float32), scaled(torch.float32)
    optimizer = adamw(model)
    torchrig.prepare(model, optimizer, mixed_precision="fp16", **FSDP)
    assert train(model, optimizer) == pytest.approx(train(bare, adamw(bare), part=whole), rel=5e-3)
    assert scaling_of(model).skipped_steps == 0


def parallelize(model, mesh):
    tensor_parallel = mesh["tp"]  # once: each time it is another object, and compiled code would be told apart by it
    for layer in model.layers:
        parallelize_module(layer, tensor_parallel, {"up": ColwiseParallel(), "down": RowwiseParallel()})


@pytest.mark.processes(2)
@pytest.mark.parametrize("backend", ["no", "aot_eager"])
def test_tensor_parallelism_on_two_processes(backend):
    check_tensor_parallel(backend)


@pytest.mark.processes(4)
def test_values_that_differ_and_were_parallelized_are_refused_on_every_process():
    torch.manual_seed(dist.get_rank() // 2)
    model = Language()
    before = [id(each) for each in model.parameters()]
    with pytest.raises(torchrig.StrategyError, match="Seed all processes alike"):
        torchrig.prepare(model, parallelize=parallelize, fsdp2={"tensor_parallel": 2}, **FSDP)
    assert [id(each) for each in model.parameters()] == before


@pytest.mark.processes(4)
def test_tensor_parallelism_and_sharding_on_four_processes():
    check_tensor_parallel("aot_eager")


def check_tensor_parallel(backend):
    bare, model = build(), build()
    expected, optimizer = adamw(bare), adamw(model)
    train(bare, expected, range(2), whole)
    train(model, optimizer, range(2), whole)
    loader = torch.utils.data.DataLoader(batch(2), batch_size=4)
    settings = {"backend": backend, "fullgraph": True, "parallelize": parallelize, "fsdp2": {"tensor_parallel": 2}}
    model, optimizer, loader = torchrig.prepare(model, optimizer, loader, **settings, **FSDP)
    assert torchrig.plan(build(), **settings, **FSDP).steps[0].action == "parallelize"
    rank, parts = dist.get_rank() // 2, dist.get_world_size() // 2
    part = lambda rows: own(rows, rank, parts)  # noqa: E731
    assert train(model, optimizer, range(2, 4), part) == pytest.approx(train(bare, expected, range(2, 4), whole))
    up = model.layers[0].up.weight
    assert up.device_mesh.mesh_dim_names == ("shard", "tp")
    assert optimizer.state[up]["exp_avg"].placements == up.placements
    assert torch.cat(list(loader)).shape[0] == 8 // parts, "processes of one tensor-parallel group read the same"
    loss_of(model, part(batch(9))).backward()
    loss_of(bare, batch(9)).backward()
    torch.testing.assert_close(*(torchrig.clip_grad_norm_(each, 0.1) for each in (model, bare)), **EXACT)
    check_same(model, bare, **EXACT)
    assert torchrig.report(model).graphs == (backend != "no")


def test_parallelize_needs_a_strategy_with_a_mesh():
    model = build()
    with pytest.raises(torchrig.SettingsError, match="has no mesh of processes") as caught:
        torchrig.prepare(model, parallelize=parallelize)
    assert caught.value.setting == "parallelize"
    with pytest.raises(torchrig.SettingsError, match="module:function"):
        torchrig.prepare(model, parallelize="a function")
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
