"""Strategy fsdp2 on two processes: what one process computes on the whole batch is what they compute together."""

from __future__ import annotations

import collections
import copy
import pickle

import pytest
import ranks
import torch
import torch.distributed as dist
from ranks import adamw, batch, build, check_same, gathered, loss_of, own, train, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FSDPModule, fully_shard

import torchrig
from torchrig import precision

FSDP = {"strategy": "fsdp2"}
EXACT = {"rtol": 1e-11, "atol": 1e-11}  # of float64; the gradients are summed in another order

two_processes = pytest.mark.processes(2)


@two_processes
@pytest.mark.parametrize(("backend", "tied"), [("no", False), ("eager", True), ("aot_eager", True)])
def test_losses_gradients_and_parameters_are_those_of_one_process(backend, tied):
    """Cases 21, 22: tied parameters, and an optimizer that has state already."""
    bare, model = build(tied=tied), build(tied=tied)
    expected, optimizer = adamw(bare), adamw(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    train(bare, expected, range(2), whole)
    train(model, optimizer, range(2), whole)
    prepared, same, *_ = torchrig.prepare(model, optimizer, schedule, backend=backend, fullgraph=True, **FSDP)
    assert prepared is model and same is optimizer
    schedule.step()
    expected.param_groups[0]["lr"] /= 2
    assert train(model, optimizer, range(2, 5)) == pytest.approx(train(bare, expected, range(2, 5), whole))
    loss_of(model, own(batch(9))).backward()
    loss_of(bare, batch(9)).backward()
    check_same(model, bare, **EXACT)
    assert (model.head.weight is model.embed.weight) is tied
    assert all(isinstance(layer, FSDPModule) for layer in (*model.layers, model))
    assert (type(model).__name__, type(model.layers[0]).__name__) == ("Language", "Block")
    report = torchrig.report(model)
    assert (report.graphs, report.breaks) == (backend != "no", 0)


@two_processes
@pytest.mark.parametrize("kind", ["foreach", "fused", "SGD"])
def test_the_state_of_every_optimizer_is_cut_as_its_parameters_are(kind):
    """Case 22."""

    def make(model):
        if kind == "SGD":
            return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return adamw(model, **{kind: True})

    bare, model = build(), build()
    expected, optimizer = make(bare), make(model)
    train(bare, expected, range(2), whole)
    train(model, optimizer, range(2), whole)
    torchrig.prepare(model, optimizer, **FSDP)
    assert train(model, optimizer, range(2, 4)) == pytest.approx(train(bare, expected, range(2, 4), whole))
    for old, new in zip(bare.parameters(), model.parameters(), strict=True):
        for name, value in expected.state[old].items():
            assert type(optimizer.state[new][name]) is type(new.data) or name == "step"
            torch.testing.assert_close(gathered(optimizer.state[new][name]), value, **EXACT)
    assert kind != "fused" or optimizer.param_groups[0]["fused"]


@two_processes
@pytest.mark.parametrize("placement", ["forward", "inplace"])
def test_bf16_and_checkpointed_blocks_compile_to_one_graph(placement):
    losses = {}
    for backend in ("no", "aot_eager"):
        model = build(torch.float32, checkpointed=True)
        optimizer = adamw(model)
        settings = {"backend": backend, "fullgraph": True, "placement": placement, "mixed_precision": "bf16"}
        torchrig.prepare(model, optimizer, **settings, **FSDP)
        losses[backend] = train(model, optimizer)
        assert {each.dtype for each in (*model.parameters(), model(own(batch(0))))} == {torch.float32}
    assert losses["aot_eager"] == losses["no"]
    assert (torchrig.report(model).graphs, torchrig.report(model).breaks) == (1, 0)
    bare = build(torch.float32)
    assert losses["no"] == pytest.approx(train(bare, adamw(bare), part=whole), rel=5e-3)


@two_processes
def test_fp16_skips_a_step_on_every_process_when_one_has_overflowed():
    """Case 52."""
    bare, model = build(torch.float32), build(torch.float32)
    optimizer = adamw(model)
    torchrig.prepare(model, optimizer, mixed_precision="fp16", backend="eager", **FSDP)
    assert train(model, optimizer) == pytest.approx(train(bare, adamw(bare), part=whole), rel=5e-3)
    before = {name: gathered(value).clone() for name, value in model.named_parameters()}
    loss_of(model, own(batch(9))).backward()
    if dist.get_rank() == 1:
        model.layers[0].up.weight.grad.to_local()[0, 0] = torch.inf
    optimizer.step()
    assert all(torch.equal(gathered(value), before[name]) for name, value in model.named_parameters())
    assert precision.scaling_of(model).skipped_steps == 1


@two_processes
def test_blocks_are_gathered_and_freed_as_often_as_in_eager(monkeypatch):
    """Cases 50, 56."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    counts = collections.Counter()
    for name in ("unshard", "reshard", "post_backward"):
        method = getattr(FSDPParamGroup, name)

        def counted(self, *args, name=name, method=method, **kwargs):
            counts[self._module_fqn, name] += 1
            return method(self, *args, **kwargs)

        monkeypatch.setattr(FSDPParamGroup, name, counted)

    def run(**settings):
        model = build()
        optimizer = adamw(model)
        torchrig.prepare(model, optimizer, **settings, **FSDP)
        counts.clear()
        train(model, optimizer, range(2))
        return dict(counts)

    expected = run(backend="no")
    assert {name for name, _ in expected} >= {f"layers.{index}" for index in range(4)}
    for placement in ("forward", "inplace"):
        assert run(backend="aot_eager", placement=placement) == expected


@two_processes
@pytest.mark.parametrize("order", ["compile, shard", "shard, compile", "shard", "blocks", "wrapped, shard"])
def test_a_model_that_the_user_compiled_or_sharded_before(order):
    """Case 23."""
    bare, model = build(), build()
    if order == "compile, shard":
        _compile(model)
    if order == "wrapped, shard":
        for index, layer in enumerate(model.layers):
            model.layers[index] = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for layer in model.layers:
        fully_shard(layer)
    if order != "blocks":
        fully_shard(model)
    if order == "shard, compile":
        _compile(model)
    optimizer = adamw(model)
    backend = {} if "," in order else {"backend": "aot_eager"}
    torchrig.prepare(model, optimizer, **backend, **FSDP)
    assert train(model, optimizer) == pytest.approx(train(bare, adamw(bare), part=whole))
    if order != "wrapped, shard":  # there the user's own compile is left as it is
        report = torchrig.report(model)
        assert (report.graphs, report.breaks, report.kinds[0].instances) == (1, 0, 4)


def _compile(model):
    for layer in model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)


@two_processes
def test_a_model_compiled_whole_is_one_unit_and_one_graph():
    bare, model = build(), build()
    optimizer = adamw(model)
    torchrig.prepare(model, optimizer, backend="aot_eager", regions="whole", fullgraph=True, **FSDP)
    assert train(model, optimizer) == pytest.approx(train(bare, adamw(bare), part=whole))
    assert torchrig.report(model).graphs == 1
    assert [name for name, module in model.named_modules() if isinstance(module, FSDPModule)] == [""]


@two_processes
def test_gradients_add_up_unsynchronised_and_are_clipped_by_their_whole_norm():
    bare, model = build(), build()
    optimizer = adamw(model)
    torchrig.prepare(model, optimizer, backend="eager", **FSDP)
    parts = batch(0, rows=16).chunk(2)
    for index, rows in enumerate(parts):
        with torchrig.no_sync(model, enabled=index == 0):
            (loss_of(model, own(rows)) / 2).backward()
            assert (model.head.weight.grad is None) is (index == 0)
    loss_of(bare, batch(0, rows=16)).backward()
    check_same(model, bare, **EXACT)
    norms = [torchrig.clip_grad_norm_(each, 0.1) for each in (model, bare)]
    torch.testing.assert_close(*norms, **EXACT)
    check_same(model, bare, **EXACT)


@two_processes
def test_state_dict_keys_are_the_bare_models():
    """Cases 3 and 4."""
    bare, model = build(checkpointed=True), build(checkpointed=True)
    optimizer = adamw(model)
    torchrig.prepare(model, optimizer, backend="aot_eager", **FSDP)
    keys = list(bare.state_dict())
    assert list(model.state_dict()) == list(get_model_state_dict(model)) == keys
    set_model_state_dict(model, get_model_state_dict(model))
    assert list(get_model_state_dict(model)) == keys
    train(model, optimizer)
    bare.load_state_dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
    torchrig.unwrap(model).load_state_dict(bare.state_dict())
    check_same(model, bare, rtol=0, atol=0)
    model.layers[1].load_state_dict(bare.layers[0].state_dict())
    assert torch.equal(gathered(model.layers[1].up.weight), bare.layers[0].up.weight)


@two_processes
def test_a_deep_copy_is_sharded_and_compiled_and_runs_its_own_weights():
    """Case 24."""
    model = build(tied=True)
    optimizer = adamw(model)
    torchrig.prepare(model, optimizer, backend="aot_eager", **FSDP)
    train(model, optimizer, range(1))
    average = copy.deepcopy(model)
    assert average.head.weight is average.embed.weight
    assert all(isinstance(each, FSDPModule) and type(each).__name__ == "Block" for each in average.layers)
    tokens = own(batch(7))
    with torch.no_grad():
        assert torch.equal(average(tokens), model(tokens))
    graphs = torchrig.report(model).graphs
    train(model, optimizer, range(1, 3))
    for (name, kept), live in zip(average.named_parameters(), model.parameters(), strict=True):
        assert kept.placements == live.placements, name
        kept.data.lerp_(live.data, 0.5)
    own_optimizer = adamw(average)
    train(average, own_optimizer, range(3, 5))
    assert torchrig.report(model).graphs == graphs
    with torch.no_grad():
        assert not torch.equal(average(tokens), model(tokens))


@two_processes
def test_a_pickle_holds_the_whole_model():
    model = build(tied=True)
    optimizer = adamw(model)
    torchrig.prepare(model, optimizer, backend="eager", **FSDP)
    train(model, optimizer, range(1))
    loaded = pickle.loads(pickle.dumps(model))
    assert type(loaded) is ranks.Language and not any(isinstance(each, FSDPModule) for each in loaded.modules())
    assert loaded.head.weight is loaded.embed.weight
    check_same(model, loaded, rtol=0, atol=0)
    assert torch.allclose(loaded(own(batch(7))), model(own(batch(7))))
    assert all(
        sorted(vars(a)) == sorted({*vars(b), "forward"}) for a, b in zip(loaded.layers, build().layers, strict=True)
    )


@two_processes
def test_after_an_evaluation_the_parameters_are_the_shards():
    model = build()
    torchrig.prepare(model, backend="eager", **FSDP)
    shards = {id(each) for each in model.parameters()}
    with torch.no_grad():
        model(own(batch(0)))
    assert {id(each) for each in model.parameters()} == shards


@two_processes
def test_all_processes_shard_the_first_ones_values():
    torch.manual_seed(dist.get_rank())
    model = ranks.Language().double()
    model.register_buffer("offset", torch.rand(3))
    torch.manual_seed(0)
    first = ranks.Language().double()
    first.register_buffer("offset", torch.rand(3))
    torchrig.prepare(model, **FSDP)
    check_same(model, first, rtol=0, atol=0)
    assert torch.equal(model.offset, first.offset)


@two_processes
def test_a_sharded_model_can_be_prepared_again_and_keeps_its_values():
    bare, model = build(), build()
    expected, optimizer = adamw(bare), adamw(model)
    for backend in ("no", "eager"):
        torchrig.prepare(model, optimizer, backend=backend, **FSDP)
        assert train(model, optimizer) == pytest.approx(train(bare, expected, part=whole))
        check_same(model, bare, **EXACT)
        assert torchrig.has_compiled_regions(model) == (backend != "no")
        torchrig.unwrap(model, keep_compile=False)
    with pytest.raises(torchrig.SettingsError, match="sharded already, with another precision"):
        torchrig.prepare(model, mixed_precision="bf16", **FSDP)


@two_processes
def test_frozen_parameters_and_gradients_that_are_there_already():
    def make():
        model = build()
        model.embed.requires_grad_(False)
        for layer in model.layers:
            layer.norm.requires_grad_(False)
        return model

    bare, model = make(), make()
    for each in (bare, model):
        loss_of(each, batch(0)).backward()
    torchrig.prepare(model, backend="aot_eager", **FSDP)
    check_same(model, bare, **EXACT)
    loss_of(bare, batch(1)).backward()
    loss_of(model, own(batch(1))).backward()
    check_same(model, bare, **EXACT)


@two_processes
def test_a_prepare_that_fails_leaves_the_model_as_it_was_and_can_be_made_again(monkeypatch):
    bare, model = build(), build()
    expected, optimizer = adamw(bare), adamw(model)
    train(model, optimizer, range(1), whole)
    before = {name: (type(module), sorted(vars(module))) for name, module in model.named_modules()}
    parameters = [id(each) for each in model.parameters()]
    with monkeypatch.context() as patched:
        patched.setattr("torchrig.loaders.place", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            torchrig.prepare(model, optimizer, torch.utils.data.DataLoader(range(4)), backend="eager", **FSDP)
    assert {name: (type(module), sorted(vars(module))) for name, module in model.named_modules()} == before
    assert [id(each) for each in model.parameters()] == parameters
    assert [id(each) for group in optimizer.param_groups for each in group["params"]] == parameters
    train(model, optimizer, range(1, 2), whole)
    torchrig.prepare(model, optimizer, backend="eager", **FSDP)
    train(bare, expected, range(2), whole)
    assert train(model, optimizer, range(2, 4)) == pytest.approx(train(bare, expected, range(2, 4), whole))


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


@two_processes
@pytest.mark.parametrize(
    ("make", "settings", "error", "told"),
    [
        (Scalar, {}, torchrig.StrategyError, "'scale' is a scalar; give it the shape"),
        (build, {"fsdp2": {"replicate": 3}}, torchrig.SettingsError, "2 processes cannot be divided into 3 replicas"),
        (build, {"fsdp2": {"tensor_parallel": 2}}, torchrig.SettingsError, "no function parallelizes the model"),
        (build, {"fsdp2": {"replicate": "two"}}, torchrig.SettingsError, "fsdp2.replicate"),
        (build, {"parallelize": "nowhere:at_all"}, torchrig.SettingsError, "cannot be imported"),
        (build, {"parallelize": lambda model, mesh: 3}, torchrig.ArgumentError, "returned an int"),
    ],
)  # fmt: skip
def test_what_cannot_be_sharded_is_told_before_anything_is_changed(make, settings, error, told):
    model = make()
    before = [(id(each), each.shape) for each in model.parameters()]
    with pytest.raises(error, match=told):
        torchrig.prepare(model, **settings, **FSDP)
    assert [(id(each), each.shape) for each in model.parameters()] == before
    assert not any(isinstance(module, FSDPModule) for module in model.modules())


@two_processes
def test_processes_that_build_different_models_are_told_apart_on_every_process():
    model = build(width=8 if dist.get_rank() == 0 else 6)
    with pytest.raises(torchrig.StrategyError, match=r"process 1 has 'embed\.weight'"):
        torchrig.prepare(model, **FSDP)
    assert type(model) is ranks.Language


@two_processes
@pytest.mark.slow_compile
def test_inductor_computes_the_same():
    bare, model = build(), build()
    optimizer = adamw(model)
    torchrig.prepare(model, optimizer, backend="inductor", fullgraph=True, **FSDP)
    assert train(model, optimizer) == pytest.approx(train(bare, adamw(bare), part=whole), rel=1e-9)
    check_same(model, bare, rtol=1e-8, atol=1e-9)
    assert (torchrig.report(model).graphs, torchrig.report(model).breaks) == (1, 0)
