"""Activation checkpointing of the blocks: same numbers, fewer saved tensors, still one graph a kind."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import torchrig


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 32), nn.Linear(32, 8), nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def models():
    """Two models alike, in float64."""
    torch.manual_seed(0)
    model = Model().double()
    return model, copy.deepcopy(model)


X = torch.linspace(-1, 1, 128, dtype=torch.float64).reshape(16, 8)


def train(model, steps=3):
    torch.manual_seed(1)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(steps):
        loss = model(X).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def saved_bytes(model):
    """What one forward keeps for its backward, parameters not counted."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(X).sum()
    total = sum(kept.values())
    loss.backward()
    return total


WAYS = [
    pytest.param({"backend": "no"}, id="no"),
    pytest.param({"backend": "eager"}, id="eager"),
    pytest.param({"backend": "aot_eager"}, id="aot_eager"),
    pytest.param({"backend": "aot_eager", "placement": "inplace"}, id="inplace"),
    pytest.param({"backend": "aot_eager", "placement": "wrap"}, id="wrap"),
    pytest.param({"backend": "aot_eager", "regions": "whole"}, id="whole"),
    pytest.param(
        {"backend": "inductor", "options": {"fallback_random": True}}, id="inductor", marks=pytest.mark.slow_compile
    ),
]


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("way", WAYS)
def test_it_trains_as_without_and_each_kind_is_one_graph(models, way, kind):
    plain, model = models
    fullgraph = {} if way["backend"] in ("no", "eager") else {"fullgraph": True}
    torchrig.prepare(model, activation_checkpointing=kind, **way, **fullgraph)
    found, wanted = train(model), train(plain)
    if way["backend"] == "inductor":
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    else:
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    report = torchrig.report(model)
    assert report.ok and all(each.graphs == 1 for each in report.kinds)
    assert list(model.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("backend", ["no", "aot_eager"])
def test_it_keeps_less_for_the_backward(models, backend):
    plain, model = models
    torchrig.prepare(plain, backend=backend)
    torchrig.prepare(model, backend=backend, activation_checkpointing="full")
    without, with_it = (saved_bytes(each) for each in (plain, model))
    assert with_it < 0.6 * without


def test_every_second_block():
    model = Model()
    made = torchrig.plan(model, activation_checkpointing="full", activation_checkpointing_every=2)
    (step,) = [step for step in made.steps if step.action == "checkpoint"]
    assert step.region.instances == ("layers.0", "layers.2")


def test_unwrap_takes_it_off_and_deep_copies_keep_it(models):
    plain, model = models
    torchrig.prepare(model, activation_checkpointing="full")
    assert saved_bytes(copy.deepcopy(model)) == saved_bytes(model) < saved_bytes(plain)
    # As of compiled code, a pickle has none of it: it holds the class's own forward.
    assert saved_bytes(pickle.loads(pickle.dumps(model))) == saved_bytes(plain)
    assert torchrig.unwrap(model, keep_compile=False) is model
    assert "forward" not in vars(model.layers[0]) and saved_bytes(model) == saved_bytes(plain)


def test_hooks_fire_once(models):
    _, model = models
    seen = []
    model.layers[1].register_forward_hook(lambda *_: seen.append("forward"))
    torchrig.prepare(model, backend="aot_eager", activation_checkpointing="full")
    model.layers[1].register_full_backward_hook(lambda *_: seen.append("backward"))
    model(X).sum().backward()
    assert seen == ["forward", "backward"]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_with_mixed_precision(models, precision):
    plain, model = (each.float() for each in models)
    losses = []
    for each, kind in ((plain, "none"), (model, "full")):
        torchrig.prepare(each, backend="aot_eager", mixed_precision=precision, activation_checkpointing=kind)
        torch.manual_seed(2)
        loss = each(X.float()).square().mean()
        loss.backward()
        losses.append((loss.item(), each.first.weight.grad))
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-3)
    torch.testing.assert_close(losses[0][1], losses[1][1], rtol=2e-2, atol=1e-3)


def test_what_cannot_be_checkpointed_is_refused_by_name():
    with pytest.raises(torchrig.SettingsError, match="nothing does in this Linear"):
        torchrig.plan(nn.Linear(2, 2), activation_checkpointing="full")
    own = Model()
    own.gradient_checkpointing = True
    with pytest.raises(torchrig.SettingsError, match="checkpoints its blocks by itself"):
        torchrig.prepare(own, activation_checkpointing="full")
    with pytest.raises(torchrig.SettingsError, match="activation_checkpointing"):
        torchrig.plan(Model(), activation_checkpointing="some")
    assert "forward" not in vars(own.layers[0])
