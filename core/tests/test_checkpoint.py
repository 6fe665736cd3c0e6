"""Checkpoints in one process: what comes back, what is refused, and that nothing is ever half done."""

from __future__ import annotations

import collections
import copy
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from toys import Stack

import torchrig
from torchrig import ArgumentError, CheckpointError
from torchrig.checkpoint import folder, names
from torchrig.checkpoint.leaves import Parted, join


class Net(nn.Module):
    """A tied, a frozen and a normalised layer, dropout, and two blocks of one kind."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2), nn.BatchNorm1d(8)) for _ in range(2)
        )
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.frozen(x))


class Run:
    """A model that trains on random tokens, with an optimizer of two groups and a schedule."""

    def __init__(self, seed=0, optimizer=torch.optim.AdamW, **settings):
        torch.manual_seed(seed)
        self.model = Net()
        groups = [
            {"params": list(self.model.layers.parameters()), "lr": 0.02},
            {"params": [*self.model.embed.parameters(), *self.model.frozen.parameters()], "lr": 0.01},
        ]
        self.optimizer = optimizer(groups, lr=0.01)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 5], 0.5)
        if settings:
            self.model, self.optimizer = torchrig.prepare(self.model, self.optimizer, **settings)

    def steps(self, count):
        """The losses of some steps."""
        losses = []
        for _ in range(count):
            tokens = torch.randint(11, (6,))
            loss = nn.functional.cross_entropy(self.model(tokens), tokens)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            losses.append(loss.item())
        return losses

    def save(self, path, **extra):
        torchrig.save_checkpoint(path, self.model, self.optimizer, schedule=self.schedule, **extra)
        return path

    def load(self, path, **into):
        return torchrig.load_checkpoint(path, self.model, self.optimizer, schedule=self.schedule, **into)


def state(run):
    """A copy of everything a load could change."""
    return copy.deepcopy(
        (dict(run.model.state_dict()), run.optimizer.state_dict(), run.schedule.state_dict(), torch.get_rng_state())
    )


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.fixture
def saved(tmp_path):
    run = Run()
    run.steps(3)
    return run.save(tmp_path / "run", epoch=3)


WAYS = [
    {},
    {"backend": "no"},
    {"backend": "eager"},
    {"backend": "eager", "placement": "wrap"},
    {"backend": "aot_eager"},
]


@pytest.mark.parametrize(("source", "to"), [*((way, {}) for way in WAYS), *(({}, way) for way in WAYS[1:])], ids=str)
def test_a_run_goes_on_as_if_it_had_not_stopped(tmp_path, source, to):
    first = Run(**source)
    first.steps(3)
    first.save(tmp_path / "run", epoch=3)
    expected = first.steps(4)
    second = Run(seed=1, **to)
    assert second.load(tmp_path / "run") == {"schedule": second.schedule, "epoch": 3}
    tolerance = 1e-6 if "aot_eager" in (source.get("backend"), to.get("backend")) else 0
    assert second.steps(4) == pytest.approx(expected, abs=tolerance, rel=0)


def test_it_goes_on_in_a_run_that_has_state_of_its_own(saved):
    first, second = Run(), Run(seed=1)
    first.load(saved)
    expected = first.steps(4)
    second.steps(5)
    second.load(saved)
    assert second.steps(4) == expected


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda groups, lr: torch.optim.SGD(groups, lr=lr),
        lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9),
        lambda groups, lr: torch.optim.Adam(groups, lr=torch.tensor(lr), capturable=False, foreach=False),
        lambda groups, lr: torch.optim.AdamW(groups, lr=lr, amsgrad=True, fused=True),
        lambda groups, lr: torch.optim.Adafactor(groups, lr=lr),
        lambda groups, lr: torch.optim.RMSprop(groups, lr=lr, centered=True),
    ],
    ids=["sgd", "momentum", "tensor lr", "fused amsgrad", "adafactor", "rmsprop"],
)
def test_optimizers_go_on(tmp_path, optimizer):
    first, second = Run(optimizer=optimizer), Run(seed=1, optimizer=optimizer)
    first.steps(3)
    first.save(tmp_path / "run")
    expected = first.steps(3)
    second.load(tmp_path / "run")
    assert second.steps(3) == expected


def test_lbfgs_goes_on(tmp_path):
    def start():
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        return model, torch.optim.LBFGS(model.parameters(), max_iter=3)

    def step(model, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = model(torch.linspace(-1, 1, 4)).square().sum()
            loss.backward()
            return loss

        return optimizer.step(closure).item()

    first, second = start(), start()
    step(*first)
    torchrig.save_checkpoint(tmp_path / "run", *first)
    torchrig.load_checkpoint(tmp_path / "run", *second)
    assert step(*second) == step(*first) != 0


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
        lambda optimizer: torch.optim.lr_scheduler.CyclicLR(optimizer, 0.001, 0.1, cycle_momentum=False),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
        lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer),
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
            ],
            milestones=[3],
        ),
        torch.optim.lr_scheduler.CosineAnnealingWarmRestarts,
    ],
    ids=["one cycle", "cyclic", "lambda", "sequential", "warm restarts"],
)
def test_schedules_go_on(tmp_path, scheduler):
    def start():
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return (
            model,
            optimizer,
            scheduler(optimizer)
            if scheduler is not torch.optim.lr_scheduler.CosineAnnealingWarmRestarts
            else scheduler(optimizer, T_0=5),
        )

    def rates(optimizer, schedule):
        for _ in range(4):
            optimizer.step()
            schedule.step()
            yield optimizer.param_groups[0]["lr"]

    first, second = start(), start()
    list(rates(*first[1:]))
    torchrig.save_checkpoint(tmp_path / "run", *first[:2], schedule=first[2])
    torchrig.load_checkpoint(tmp_path / "run", *second[:2], schedule=second[2])
    assert list(rates(*second[1:])) == list(rates(*first[1:]))


def test_a_plateau_schedule_goes_on(tmp_path):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = (torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1) for _ in range(2))
    first.step(np.float64(2.0))  # as a metric from numpy comes
    torchrig.save_checkpoint(tmp_path / "run", model, optimizer, schedule=first)
    torchrig.load_checkpoint(tmp_path / "run", model, optimizer, schedule=second)
    assert (second.best, second.last_epoch) == (2.0, 1)


def test_groups_are_found_by_their_parameters(tmp_path):
    run = Run()
    run.steps(2)
    run.save(tmp_path / "run")
    other = Run(seed=1)
    other.optimizer.param_groups.reverse()
    other.optimizer.param_groups[0]["params"].reverse()
    torchrig.load_checkpoint(tmp_path / "run", other.model, other.optimizer)
    assert [group["lr"] for group in other.optimizer.param_groups] == [0.005, 0.01]
    for name, parameter in run.model.named_parameters():
        mine, its = (each.optimizer.state.get(dict(each.model.named_parameters())[name], {}) for each in (run, other))
        assert same(dict(mine), dict(its)), name
        assert bool(mine) is parameter.requires_grad


def test_an_optimizer_built_from_named_parameters_keeps_its_names(tmp_path):
    first, second = Stack(), Stack()
    one, two = (torch.optim.SGD(each.named_parameters(), lr=0.1, momentum=0.9) for each in (first, second))
    first(torch.ones(2, 4)).sum().backward()
    one.step()
    torchrig.save_checkpoint(tmp_path / "run", first, one)
    torchrig.load_checkpoint(tmp_path / "run", second, two)
    assert two.param_groups[0]["param_names"] == list(dict(second.named_parameters()))


def test_random_states_come_back(tmp_path):
    def draw():
        return torch.rand(2).tolist(), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()

    random.gauss(0, 1), np.random.randn()  # half of a pair each: the other half is state too
    model = nn.Linear(2, 2)
    torchrig.save_checkpoint(tmp_path / "run", model)
    first = draw()
    torchrig.load_checkpoint(tmp_path / "run", model)
    assert draw() == first


def test_saving_draws_no_random_number(tmp_path):
    model = nn.Linear(2, 2)
    before = torch.get_rng_state(), random.getstate()
    torchrig.save_checkpoint(tmp_path / "run", model)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


def test_the_loss_scale_comes_back(tmp_path):
    first, second = (torchrig.prepare(Stack(), mixed_precision="fp16", device="cpu") for _ in range(2))
    scaling = torchrig.precision.scaling_of(first)
    scaling.load_state_dict({**scaling.state_dict(), "scale": 128.0, "_growth_tracker": 7})
    torchrig.save_checkpoint(tmp_path / "run", first)
    torchrig.load_checkpoint(tmp_path / "run", second)
    assert torchrig.precision.scaling_of(second).state_dict() == scaling.state_dict()
    torchrig.load_checkpoint(tmp_path / "run", Stack())  # and goes where there is none


def test_tied_parameters_are_kept_once_and_stay_tied(saved):
    run = Run(seed=1)
    run.load(saved)
    assert run.model.head.weight is run.model.embed.weight
    stored = torchrig.checkpoint.loading.open_checkpoint(saved).reader.index.state_dict_metadata
    assert [
        key for key in stored if key.startswith("model.") and "weight" in key and ("head" in key or "embed" in key)
    ] == ["model.embed.weight"]


def test_tied_parameters_load_into_ones_that_are_not(saved):
    untied = Net()
    untied.head.weight = nn.Parameter(torch.zeros(11, 8))
    torchrig.load_checkpoint(saved, untied)
    assert torch.equal(untied.head.weight, untied.embed.weight)


def test_two_that_differ_do_not_load_into_one(tmp_path):
    untied = Net()
    untied.head.weight = nn.Parameter(torch.zeros(11, 8))
    torchrig.save_checkpoint(tmp_path / "run", untied)
    tied = Net()
    before = copy.deepcopy(tied.state_dict())
    with pytest.raises(CheckpointError, match=r"'model\.embed\.weight' and 'model\.head\.weight' are one tensor"):
        torchrig.load_checkpoint(tmp_path / "run", tied)
    assert same(dict(before), dict(tied.state_dict()))


class Odd(nn.Module):
    """Attributes with the names that wrappers use, and state that is no tensor."""

    def __init__(self, told="nothing"):
        super().__init__()
        self.module = Stack()
        self._orig_mod = nn.Linear(4, 4)
        self.module._checkpoint_wrapped_module = nn.Linear(4, 4)
        self.told = told
        self.loads = 0

    def forward(self, x):
        return self._orig_mod(self.module(x))

    def get_extra_state(self):
        return {"told": self.told, "weights": [torch.ones(2)]}

    def set_extra_state(self, state):
        self.told, self.weights = state["told"], state["weights"]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: model,
        lambda model: torch.compile(model, backend="eager"),
        lambda model: nn.DataParallel(torch.compile(model, backend="eager")),
        lambda model: torchrig.prepare(model, backend="eager", placement="wrap", regions=["Block"]),
        lambda model: torchrig.prepare(model, backend="eager", placement="wrap", regions=["Stack", "Linear"]),
    ],
)
def test_names_of_a_users_own_are_unharmed(tmp_path, wrap):  # case 54
    expected = list(Odd().state_dict())
    model = wrap(Odd(told="something"))
    bare = torchrig.unwrap(model)
    assert list(names.state_dict(bare)) == expected
    assert list(names.named_parameters(bare)) == [name for name, _ in Odd().named_parameters()]
    torchrig.save_checkpoint(tmp_path / "run", model)
    loaded = wrap(Odd())
    torchrig.load_checkpoint(tmp_path / "run", loaded)
    assert torchrig.unwrap(loaded).told == "something"
    assert same(dict(bare.state_dict()), dict(torchrig.unwrap(loaded).state_dict()))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda block: torch.compile(block, backend="eager"),
        checkpoint_wrapper,
        lambda block: torch.compile(checkpoint_wrapper(block), backend="eager"),
        lambda block: checkpoint_wrapper(torch.compile(block, backend="eager")),
    ],
    ids=["compile", "ac", "compile(ac)", "ac(compile)"],
)
def test_wrapped_blocks_have_bare_keys(tmp_path, wrap):  # cases 1 and 4
    bare, model = Stack(), Stack()
    for place, block in enumerate(model.layers):
        model.layers[place] = wrap(block)
    assert list(names.state_dict(model)) == list(bare.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    torchrig.save_checkpoint(tmp_path / "run", model, optimizer)
    other = torch.optim.SGD(bare.parameters(), lr=0.1, momentum=0.9)
    torchrig.load_checkpoint(tmp_path / "run", bare, other)
    assert all(map(torch.equal, bare.state_dict().values(), model.state_dict().values()))
    assert all(
        torch.equal(other.state[mine]["momentum_buffer"], optimizer.state[its]["momentum_buffer"])
        for mine, its in zip(bare.parameters(), model.parameters(), strict=True)
    )
    torchrig.load_checkpoint(tmp_path / "run", model, optimizer)  # and back


def test_extras_come_back(tmp_path):
    model, value = nn.Linear(2, 2), torch.arange(6.0).reshape(2, 3)
    plain = {"a": [1, 2.5, None, True, "ä", b"\0", (1, (2,)), {3, 4}], 7: {"x": float("inf")}, "dtype": torch.bfloat16}
    torchrig.save_checkpoint(
        tmp_path / "run", model, plain=plain, value=value, deep={"of": [value.int()]}, one=np.int64(4)
    )
    loaded = torchrig.load_checkpoint(tmp_path / "run", model)
    assert loaded["plain"] == plain
    assert torch.equal(loaded["value"], value)
    assert torch.equal(loaded["deep"]["of"][0], value.int())
    assert loaded["one"] == 4 and type(loaded["one"]) is int


def test_an_object_that_is_not_given_comes_back_as_its_state(saved):
    run = Run(seed=1)
    loaded = torchrig.load_checkpoint(saved, run.model, run.optimizer)
    assert loaded["schedule"]["last_epoch"] == 3
    run.schedule.load_state_dict(loaded["schedule"])


def test_an_averaged_model_is_restored_in_place(tmp_path):
    run = Run()
    average = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    run.steps(2)
    average.update_parameters(run.model)
    run.save(tmp_path / "run", average=average)
    other = Run(seed=1)
    fresh = AveragedModel(other.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    other.load(tmp_path / "run", average=fresh)
    assert same(dict(average.state_dict()), dict(fresh.state_dict()))


def test_an_optimizer_of_two_models_is_kept_as_an_extra(tmp_path):
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1, momentum=0.9)
    two(one(torch.ones(2))).sum().backward()
    optimizer.step()
    with pytest.raises(CheckpointError, match="SGD steps 2 parameters that the model does not have"):
        torchrig.save_checkpoint(tmp_path / "run", one, optimizer)
    assert not (tmp_path / "run").exists()
    torchrig.save_checkpoint(tmp_path / "run", one, two=two, both=optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    optimizer.state.clear()
    torchrig.load_checkpoint(tmp_path / "run", one, two=two, both=optimizer)
    assert same(before, optimizer.state_dict())


class Custom:
    pass


@pytest.mark.parametrize(
    ("extra", "place"),
    [
        ({"thing": Custom()}, "extra.thing is an instance of Custom"),
        ({"config": {"steps": [1, lambda: 2]}}, "extra.config.steps.1 is a function"),
        ({"kind": Custom}, "extra.kind is the class Custom"),
        ({"data": np.zeros(3)}, "extra.data is an instance of ndarray"),
        ({"seen": {Custom}}, "an element of extra.seen is the class Custom"),
        ({"counts": collections.defaultdict(int)}, "extra.counts is an instance of defaultdict"),
        ({"graph": torch.eye(3).to_sparse()}, "extra.graph is a sparse tensor"),
        ({"later": torch.empty(3, device="meta")}, "extra.later is on the meta device"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_read_safely_is_refused_when_it_is_saved(tmp_path, saved, extra, place):
    for path in (saved, tmp_path / "new"):
        with pytest.raises(CheckpointError) as raised:
            torchrig.save_checkpoint(path, nn.Linear(2, 2), **extra)
        assert place in str(raised.value)
    Run(seed=1).load(saved)  # what was there is as it was
    assert not (tmp_path / "new").exists()


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(values)
@settings(max_examples=25, deadline=None)
def test_any_plain_value_is_parted_and_joined(value):
    parted = Parted()
    tree = parted.part([value, torch.ones(1), value, {"t": torch.zeros(2)}], "x")
    joined = join(pickle.loads(pickle.dumps(tree)), parted.tensors.__getitem__)
    assert joined[0] == joined[2] == value
    assert len(parted.tensors) == 2 and joined[3]["t"].shape == (2,)


def test_places_that_read_alike_are_kept_apart():
    parted = Parted()
    tree = parted.part({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}, "x")
    joined = join(tree, parted.tensors.__getitem__)
    assert joined["a.b"].item() == 1 and joined["a"]["b"].item() == 0


# What does not fit is refused, and nothing is changed.


def wider(model):
    model.layers[0][0] = nn.Linear(8, 8, bias=False)
    model.layers[1][0] = nn.Linear(8, 9)
    model.more = nn.Linear(2, 2)


def refused(path, run, message, error=CheckpointError, **into):
    before = state(run)
    with pytest.raises(error, match=message) as raised:
        run.load(path, **into)
    assert same(before, state(run))
    return str(raised.value)


def test_a_model_that_does_not_fit_is_told_by_its_keys(saved):
    run = Run(seed=1)
    wider(run.model)
    told = refused(saved, run, "does not fit this Net")
    assert "the checkpoint does not have 'more.weight', 'more.bias'" in told
    assert "the model does not have 'layers.0.0.bias'" in told
    assert "'layers.1.0.weight' is (8, 8) in the checkpoint and (9, 8) in the model" in told


def test_long_lists_of_keys_are_cut(saved):
    with pytest.raises(CheckpointError, match=r"\(8 in all\)"):
        torchrig.load_checkpoint(saved, Stack())


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            "optimizer is AdamW, and the one to load into is SGD",
        ),
        (lambda model: torch.optim.AdamW(model.parameters()), "grouped otherwise"),
        (lambda model: torch.optim.AdamW(model.layers.parameters()), "not none of this one's, and 'embed.weight', "),
        (lambda model: torch.optim.AdamW(model.buffers()), "steps 6 parameters that the model does not have"),
        (lambda model: [torch.optim.AdamW(model.parameters())] * 2, r"has 1 optimizers \('AdamW'\), and 2 were given"),
    ],
)
def test_an_optimizer_that_does_not_fit_is_told(saved, optimizer, message):
    run = Run(seed=1)
    run.steps(1)
    before = state(run)
    other = optimizer(run.model)
    with pytest.raises(CheckpointError, match=message):
        torchrig.load_checkpoint(saved, run.model, other)
    assert same(before, state(run))


def test_a_model_alone_is_loaded_alone(saved):
    model = Net()
    torchrig.load_checkpoint(saved, model)
    torchrig.save_checkpoint(saved, model)
    with pytest.raises(CheckpointError, match=r"has 0 optimizers \(none\), and 1 were given"):
        torchrig.load_checkpoint(saved, model, torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize("call", [torchrig.save_checkpoint, torchrig.load_checkpoint])
def test_wrong_arguments_are_told(saved, call):
    with pytest.raises(ArgumentError, match="takes the model, and was given a dict"):
        call(saved, {})
    with pytest.raises(ArgumentError, match="takes an optimizer, or a list of them, and was given a generator"):
        call(saved, Net(), Net().parameters())


def test_a_plain_value_cannot_be_loaded_into(saved):
    refused(saved, Run(seed=1), "epoch= is an int, which cannot be loaded into", ArgumentError, epoch=3)


def test_an_object_that_was_not_saved_is_told(saved):
    run = Run(seed=1)
    refused(saved, run, r"no object 'average' to load. It has: 'schedule'\.", average=AveragedModel(run.model))


class Stubborn:
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        raise ValueError("not today")


def test_what_raises_while_it_is_loaded_takes_all_back(tmp_path):
    run = Run()
    run.save(tmp_path / "run", stubborn=Stubborn())
    other = Run(seed=1)
    other.steps(2)
    refused(tmp_path / "run", other, "ValueError: not today", stubborn=Stubborn())


def test_a_model_that_raises_while_it_is_loaded_takes_all_back(saved):
    run = Run(seed=1)
    run.steps(2)
    calls = []

    def hook(module, keys):
        calls.append(keys)
        if len(calls) == 1:
            raise ValueError("not today")

    run.model.register_load_state_dict_post_hook(hook)
    refused(saved, run, "ValueError: not today")


def test_a_model_on_the_meta_device_is_told(saved):
    with torch.device("meta"):
        model = Net()
    with pytest.raises(CheckpointError, match=r"'embed\.weight' is on the meta device"):
        torchrig.load_checkpoint(saved, model)
    with pytest.raises(CheckpointError, match=r"model\.embed\.weight is on the meta device"):
        torchrig.save_checkpoint(saved, model)


# Files.


def data_of(path):
    return path / json.loads((path / "manifest.json").read_text())["data"]


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "objects.pt"])
@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_a_damaged_file_is_found(saved, name, how):
    file = data_of(saved) / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.unlink()
    if how != "gone":
        file.write_bytes(content if how == "flipped" else content[: len(content) // 2])
    told = refused(saved, Run(seed=1), "is missing" if how == "gone" else "is damaged")
    assert name in told


@pytest.mark.parametrize(
    "manifest",
    ["", "{", "[]", '{"format": "other", "version": 1, "data": "x", "files": {}}', '{"format": "torchrig checkpoint"}'],
)
def test_a_damaged_manifest_is_told(saved, manifest):
    (saved / "manifest.json").write_text(manifest)
    refused(saved, Run(seed=1), "manifest.json is (damaged|no torchrig checkpoint)")
    Run().save(saved)  # it can be saved over
    Run(seed=1).load(saved)


def test_a_manifest_leads_nowhere_else(saved):
    manifest = json.loads((saved / "manifest.json").read_text())
    for change in ({"data": "../x"}, {"files": {"../../x": {"size": 1, "sha256": ""}}}):
        (saved / "manifest.json").write_text(json.dumps({**manifest, **change}))
        refused(saved, Run(seed=1), "no torchrig checkpoint")


def test_a_later_version_is_told(saved):
    manifest = json.loads((saved / "manifest.json").read_text())
    (saved / "manifest.json").write_text(json.dumps({**manifest, "version": 2}))
    refused(saved, Run(seed=1), "is of version 2, and this torchrig reads 1")


class Evil:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


@pytest.mark.parametrize("name", ["objects.pt", ".metadata"])
def test_code_in_a_checkpoint_does_not_run(saved, tmp_path, name):
    mark = tmp_path / "ran"
    file = data_of(saved) / name
    if name == "objects.pt":
        torch.save(Evil(mark), file)
    else:
        file.write_bytes(pickle.dumps(Evil(mark)))
    manifest = json.loads((saved / "manifest.json").read_text())
    manifest["files"] |= folder.digests(file.parent, [name])
    (saved / "manifest.json").write_text(json.dumps(manifest))
    refused(saved, Run(seed=1), "cannot be read")
    assert not mark.exists()


def test_what_is_no_checkpoint_is_told(tmp_path):
    run = Run()
    refused(tmp_path / "nothing", run, "does not exist")
    refused(tmp_path, run, "no torchrig checkpoint: it has no manifest.json")
    (tmp_path / "data-1").mkdir()
    refused(tmp_path, run, "its first save did not finish")


def test_other_peoples_files_are_not_saved_over(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="has files in it and is no checkpoint"):
        Run().save(tmp_path)
    with pytest.raises(CheckpointError, match=r"thesis\.txt is a file"):
        Run().save(tmp_path / "thesis.txt")
    assert [each.name for each in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_save_replaces_the_one_before(saved):
    before = data_of(saved)
    (saved / "notes.txt").write_text("good one")
    (saved / "data-leftover").mkdir()
    Run().save(saved, epoch=4)
    assert Run(seed=1).load(saved)["epoch"] == 4
    assert sorted(each.name for each in saved.iterdir()) == sorted([data_of(saved).name, "manifest.json", "notes.txt"])
    assert data_of(saved) != before


def test_a_save_that_fails_leaves_the_one_before(saved, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torchrig.checkpoint.saving.torch, "save", full)
    for path in (saved, tmp_path / "new"):
        with pytest.raises(CheckpointError, match="No space left on device"):
            Run(seed=1).save(path, epoch=4)
    assert len(list(saved.iterdir())) == 2 and not (tmp_path / "new").exists()
    monkeypatch.undo()
    assert Run(seed=1).load(saved)["epoch"] == 3


MOMENTS = {  # a function -> when, in a second save, the process is killed in it
    "torchrig.checkpoint.folder.begin": "after",
    "torch.distributed.checkpoint.filesystem.FileSystemWriter.write_data": "after",
    "torch.distributed.checkpoint.filesystem.FileSystemWriter.finish": "before",
    "torch.save": "after",
    "torchrig.checkpoint.folder.digests": "after",
    "torchrig.checkpoint.folder.commit": "before",
    "json.dump": "after",
    "pathlib.Path.replace": "before",
    "torchrig.checkpoint.folder._clear": "before",
    "shutil.rmtree": "before",
}

# One process that forks for each moment: most of the time would go into starting Python.
KILLED = textwrap.dedent("""
    import json, os, pkgutil, shutil, signal, sys, torch, torchrig
    from torch import nn
    from torchrig.checkpoint import loading

    model = nn.Linear(64, 64)

    def save(path, epoch):
        nn.init.constant_(model.weight, float(epoch))
        torchrig.save_checkpoint(path, model, epoch=epoch)

    def killed(path, name, when):
        save(path, 1)
        owner, attribute = name.rsplit(".", 1)
        owner = pkgutil.resolve_name(owner)
        inner = getattr(owner, attribute)

        def killing(*args, **kwargs):
            if when == "after":
                inner(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(owner, attribute, killing)
        save(path, 2)

    for name, when in json.loads(sys.argv[2]).items():
        child = os.fork()
        if not child:
            killed(f"{sys.argv[1]}/{name}", name, when)
            os._exit(0)
        print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""")


def whole(path):
    """Load what is there, and see that it is of one piece."""
    model = nn.Linear(64, 64)
    epoch = torchrig.load_checkpoint(path, model)["epoch"]
    assert torch.equal(model.weight, torch.full((64, 64), float(epoch)))
    return epoch


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A folder with a checkpoint for each moment, whose second save was killed then."""
    path = tmp_path_factory.mktemp("killed")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(path), json.dumps(MOMENTS)], check=True, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [f"{name} {-signal.SIGKILL}" for name in MOMENTS]
    return path


@pytest.mark.parametrize("name", MOMENTS)
def test_a_kill_leaves_the_one_before(killed, name):
    path = killed / name
    assert whole(path) == (2 if name == "shutil.rmtree" else 1)
    model = nn.Linear(64, 64)
    nn.init.constant_(model.weight, 3.0)
    torchrig.save_checkpoint(path, model, epoch=3)
    assert whole(path) == 3
    assert len(list(path.iterdir())) == 2  # nothing is left of the save that was killed


ENDLESS = textwrap.dedent("""
    import sys, torch, torchrig
    from torch import nn
    model = nn.Linear(64, 64)
    for epoch in range(1, 10000):
        nn.init.constant_(model.weight, float(epoch))
        torchrig.save_checkpoint(sys.argv[1], model, epoch=epoch)
        print(epoch, flush=True)
""")


def test_a_kill_at_any_time_leaves_a_whole_one(tmp_path):
    path, random_ = tmp_path / "run", random.Random(0)
    for _ in range(2):
        with subprocess.Popen([sys.executable, "-c", ENDLESS, str(path)], stdout=subprocess.PIPE, text=True) as process:
            seen = [int(process.stdout.readline()) for _ in range(random_.randrange(2, 9))]
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(random_.random() * 0.05)
            process.kill()
        assert whole(path) >= seen[-1]
