"""Strategy ``ddp`` in one process; tests/distributed has it in more."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from toys import Stack

import torchrig


@pytest.fixture(autouse=True)
def seeded_and_no_group_left():
    torch.manual_seed(0)  # of which no block's ReLU is dead
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_the_model_is_in_pytorchs_own_wrapper_with_what_the_settings_say():
    block = {"find_unused_parameters": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 3}
    model = Stack()
    prepared = torchrig.prepare(model, strategy="ddp", ddp=block)
    assert isinstance(prepared, DistributedDataParallel) and prepared.module is model
    assert prepared.find_unused_parameters and prepared.gradient_as_bucket_view
    assert prepared.bucket_bytes_cap == 3 * 2**20


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"find_unused": True}, "ddp has no setting 'find_unused'.*'find_unused_parameters'"),
        ({"bucket_cap_mb": 0}, "ddp.bucket_cap_mb"),
        ({"static_graph": "perhaps"}, "ddp.static_graph"),
    ],
)
def test_a_wrong_setting_is_named(block, message):
    with pytest.raises(torchrig.SettingsError, match=message):
        torchrig.prepare(Stack(), strategy="ddp", ddp=block)
    assert not dist.is_initialized()


def test_a_model_that_cannot_be_wrapped_is_refused_before_anything_is_changed():
    frozen = Stack().requires_grad_(False)
    with torch.device("meta"):
        empty = Stack()
    for model, message in [(frozen, "No parameter of this Stack is trained"), (empty, "'first.weight' is on the meta")]:
        for function in (torchrig.plan, torchrig.prepare):
            with pytest.raises(torchrig.StrategyError, match=message):
                function(model, strategy="ddp", backend="eager", device="cpu")
        assert not torchrig.has_compiled_regions(model) and not dist.is_initialized()


def test_plan_starts_nothing():
    plan = torchrig.plan(Stack(), strategy="ddp", backend="eager")
    assert [step.action for step in plan.steps] == ["compile", "wrap"]
    assert not dist.is_initialized()


def test_an_optimizer_and_a_scheduler_given_go_on():
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    prepared, same, alike = torchrig.prepare(model, optimizer, scheduler, strategy="ddp")
    assert same is optimizer and alike is scheduler
    before = model.first.weight.detach().clone()
    prepared(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    scheduler.step()
    assert not torch.equal(model.first.weight, before) and optimizer.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize("strategy", ["single", "ddp", None])
def test_no_sync_and_clipping_are_the_same_under_every_strategy(strategy):
    model = Stack()
    prepared = model if strategy is None else torchrig.prepare(model, strategy=strategy)
    for enabled in (True, False):
        with torchrig.no_sync(prepared, enabled):
            prepared(torch.ones(2, 4)).sum().backward()
    expected = torch.stack([each.grad.norm() for each in model.parameters()]).norm()
    torch.testing.assert_close(torchrig.clip_grad_norm_(prepared, 0.1), expected)
    clipped = torch.stack([each.grad.norm() for each in model.parameters()]).norm()
    torch.testing.assert_close(clipped, torch.tensor(0.1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torchrig.clip_grad_norm_(model, 9.0, norm_type=float("inf")), _largest(model))


def _largest(model):
    return torch.stack([each.grad.abs().max() for each in model.parameters()]).max()


@pytest.mark.parametrize("function", [torchrig.no_sync, lambda model: torchrig.clip_grad_norm_(model, 1.0)])
def test_what_is_no_model_is_refused(function):
    with pytest.raises(torchrig.ArgumentError, match="takes the model"):
        function([Stack()])


def test_no_sync_of_a_wrapper_of_the_users_own_is_pytorchs():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    wrapped = DistributedDataParallel(Stack())
    with torchrig.no_sync(wrapped):
        assert not wrapped.require_backward_grad_sync
    assert wrapped.require_backward_grad_sync


def test_no_sync_finds_the_wrapper_by_the_model_inside():
    model = Stack()
    prepared = torchrig.prepare(model, strategy="ddp")
    with torchrig.no_sync(model):
        assert not prepared.require_backward_grad_sync


@pytest.mark.parametrize("placement", ["forward", "inplace", "wrap"])
def test_a_model_compiled_whole_comes_back_and_keeps_its_keys(placement):
    model = Stack()
    keys = list(model.state_dict())
    prepared = torchrig.prepare(model, strategy="ddp", backend="eager", regions="whole", placement=placement)
    prepared(torch.ones(2, 4)).sum().backward()
    assert torchrig.report(prepared).graphs == 1
    assert torchrig.unwrap(prepared) is model
    assert list(prepared.state_dict()) == keys
    assert torchrig.unwrap(prepared, keep_compile=False) is model and not torchrig.has_compiled_regions(model)


def test_inputs_are_left_where_they_are():
    class Seen(nn.Linear):
        def forward(self, x):
            self.seen = x
            return super().forward(x)

    prepared = torchrig.prepare(Seen(4, 4), strategy="ddp")
    x = torch.ones(1, 4)
    prepared(x)
    assert prepared.module.seen is x
