"""Mixed precision: what a plain loop sees of it."""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import pickle
import types
import weakref
from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optim_module
from torch.utils.checkpoint import checkpoint

import torchrig
from torchrig import placement, precision
from torchrig.errors import SettingsError

CPU = torch.device("cpu")
Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


class Net(nn.Module):
    def __init__(self, shape=lambda out: out):
        super().__init__()
        self.inner = nn.Linear(8, 16)
        self.outer = nn.Linear(16, 4)
        self.shape = shape

    def forward(self, x, *, scale: float = 1.0):
        return self.shape(self.outer(torch.relu(self.inner(x))) * scale)


class Plain(nn.Module):
    """At module level, so that it can be pickled."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, x):
        return self.inner(x)


def net(*shape):
    torch.manual_seed(0)
    return Net(*shape)


def batch(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, 8, generator=generator), torch.randn(5, 4, generator=generator)


def fp16(model, *optimizers):
    return precision.apply(model, optimizers, "fp16", CPU)


def loss_of(model, x, y):
    return nn.functional.mse_loss(model(x), y)


def autocast_gradients(model, compute):
    """The gradients that a loop with autocast and a hand-held scale gives: what fp16 must give, true size."""
    scale = 2.0**16

    def forward(x, **kwargs):
        with torch.autocast("cpu", dtype=torch.float16):
            out = type(model).forward(model, x, **kwargs)
        return out.float()

    model.forward = forward
    try:
        (compute(model) * scale).backward()
    finally:
        del model.forward
    return {name: parameter.grad / scale for name, parameter in model.named_parameters()}


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_equal(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("shape", "tensors"),
    [
        (lambda out: out, lambda out: [out]),
        (lambda out: (out, [out, {"deep": out}]), lambda out: [out[0], out[1][0], out[1][1]["deep"]]),
        (lambda out: Pair(out, "text"), lambda out: [out.first]),
        (lambda out: Output(out, out.sum()), lambda out: [out.logits, out.loss]),
    ],
)
def test_outputs_come_back_in_float32_in_the_same_make(name, shape, tensors):
    model = net(shape)
    plain = model(batch()[0])
    precision.apply(model, (), name, CPU)
    made = model(batch()[0])
    assert type(made) is type(plain)
    for tensor, reference in zip(tensors(made), tensors(plain), strict=True):
        assert tensor.dtype is torch.float32
        torch.testing.assert_close(tensor, reference, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_transformers_outputs_keep_their_class_and_both_ways_in(name):
    modeling = pytest.importorskip("transformers.modeling_outputs")
    model = net(lambda out: modeling.CausalLMOutput(loss=out.sum(), logits=out))
    precision.apply(model, (), name, CPU)
    out = model(batch()[0])
    assert type(out) is modeling.CausalLMOutput
    assert out.logits.dtype is out["logits"].dtype is torch.float32
    assert out.logits is out["logits"]
    assert out[0] is out.loss


def test_what_is_computed_inside_is_low_precision():
    model = net()
    seen = []
    model.outer.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    precision.apply(model, (), "bf16", CPU)
    model(batch()[0])
    assert seen == [torch.bfloat16]


def test_no_changes_nothing():
    model = net()
    before = dict(vars(model))
    precision.apply(model, (), "no", CPU)()
    assert vars(model) == before


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_the_signature_of_forward_is_the_models_case_7(name):
    model = net()
    before = inspect.signature(model.forward)
    precision.apply(model, (), name, CPU)
    assert inspect.signature(model.forward) == before


def test_a_free_forward_of_the_instances_own_runs_and_keeps_its_signature_case_27():
    model = net()
    model.forward = lambda x, factor=2.0: Net.forward(model, x) * factor
    before = inspect.signature(model.forward)
    free = model.forward
    undo = precision.apply(model, (), "bf16", CPU)
    assert inspect.signature(model.forward) == before
    x = batch()[0]
    torch.testing.assert_close(model(x, factor=4.0), 2 * model(x))
    undo()
    assert model.forward is free


def test_a_bound_forward_beneath_runs_on_the_copy_it_lies_in_case_24():
    model = net()
    model.forward = types.MethodType(lambda self, x: self.outer(self.inner(x)), model)
    precision.apply(model, (), "bf16", CPU)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert other(batch()[0]).abs().sum() == 0
    assert model(batch()[0]).abs().sum() > 0


def test_a_compiled_forward_beneath_runs_compiled_and_is_not_taken_for_the_layer():
    graphs = []
    model = net()

    def backend(module, inputs):
        graphs.append(module)
        return module.forward

    compiled = torch.compile(Net.forward, backend=backend)
    placement.put_layer(model, compiled, placement.Layer("compile"))
    fp16(model)
    assert [layer.name for layer in placement.layers(model)] == ["autocast", "compile"]
    assert not [name for name in vars(model.forward.__func__) if "dynamo" in name.lower() or "torchdynamo" in name]
    x, y = batch()
    loss_of(model, x, y).backward()
    assert len(graphs) == 1
    expected = autocast_gradients(net(), lambda each: loss_of(each, x, y))
    for name, value in gradients(model).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-2, atol=1e-4)


def test_gradients_of_a_region_compiled_by_aot_are_true_size():
    x, y = batch()
    model = net()
    model.inner.forward = types.MethodType(torch.compile(nn.Linear.forward, backend="aot_eager"), model.inner)
    fp16(model)
    loss_of(model, x, y).backward()
    assert_equal(gradients(model), autocast_gradients(net(), lambda each: loss_of(each, x, y)))


def test_a_pickled_model_runs_as_written_and_can_be_prepared_again_case_24():
    torch.manual_seed(0)
    model = Plain()
    precision.apply(model, (), "bf16", CPU)
    loaded = pickle.loads(pickle.dumps(model))
    x = batch()[0]
    assert placement.under(loaded) is None
    torch.testing.assert_close(loaded(x), Plain.forward(model, x), rtol=0, atol=0)
    undo = precision.apply(loaded, (), "bf16", CPU)
    torch.testing.assert_close(loaded(x), model(x), rtol=0, atol=0)
    undo()
    assert placement.under(loaded) is None


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_undo_takes_everything_back(name):
    model = net()
    before = dict(vars(model))
    pre, post = dict(optim_module._global_optimizer_pre_hooks), dict(optim_module._global_optimizer_post_hooks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    undo = precision.apply(model, (optimizer,), name, CPU)
    loss_of(model, *batch()).backward()
    undo()
    assert vars(model) == before
    assert precision.scaling_of(model) is None
    assert dict(optim_module._global_optimizer_pre_hooks) == pre
    assert dict(optim_module._global_optimizer_post_hooks) == post
    assert not optimizer._optimizer_step_pre_hooks


def test_a_model_is_freed_and_the_process_wide_hooks_go_with_it_case_36():
    model = net()
    fp16(model)
    loss_of(model, *batch()).backward()
    assert optim_module._global_optimizer_pre_hooks
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert not optim_module._global_optimizer_pre_hooks


# -- fp16: the gradients -------------------------------------------------------------------------------------------


def use_twice(out):
    return (out * out.sin()).mean()


def use_in_two_losses(out):
    return out.pow(2).mean() + out.sin().mean()


COMPUTE = {
    "plain": lambda model: loss_of(model, *batch()),
    "l2 penalty": lambda model: loss_of(model, *batch()) + 0.1 * sum(p.pow(2).sum() for p in model.parameters()),
    "two forwards": lambda model: loss_of(model, *batch()) + loss_of(model, *batch(2)),
    "its own output as input": lambda model: loss_of(model, nn.functional.pad(model(batch()[0]), (0, 4)), batch()[1]),
    "an output used twice": lambda model: use_twice(model(batch()[0])),
    "a parameter used outside": lambda model: (model(batch()[0]) @ model.outer.weight).pow(2).mean(),
    "output changed in place": lambda model: model(batch()[0]).mul_(2).pow(2).mean(),
}


@pytest.mark.parametrize("name", COMPUTE)
def test_gradients_have_their_true_size(name):
    model = net()
    fp16(model)
    COMPUTE[name](model).backward()
    if name == "l2 penalty":  # fp32 rounding differs by where the scale is divided by
        for key, value in autocast_gradients(net(), COMPUTE[name]).items():
            torch.testing.assert_close(gradients(model)[key], value, rtol=1e-6, atol=1e-8)
        return
    assert_equal(gradients(model), autocast_gradients(net(), COMPUTE[name]))


def test_small_gradients_do_not_underflow():
    x, y = batch()
    model, unscaled = net(), net()
    fp16(model)
    (loss_of(model, x, y) * 1e-7).backward()
    with torch.autocast("cpu", dtype=torch.float16):
        out = unscaled(x)
    (nn.functional.mse_loss(out.float(), y) * 1e-7).backward()
    assert not unscaled.inner.weight.grad.any()
    assert model.inner.weight.grad.count_nonzero() > 0.25 * unscaled.inner.weight.numel()


def test_gradients_accumulate_over_backwards():
    model = net()
    fp16(model)
    for seed in (1, 2, 3):
        loss_of(model, *batch(seed)).backward()
    total = {}
    for seed in (1, 2, 3):
        for key, value in autocast_gradients(net(), lambda each, seed=seed: loss_of(each, *batch(seed))).items():
            total[key] = total.get(key, 0) + value
    assert_equal(gradients(model), total)


def test_a_second_backward_through_one_graph():
    model = net()
    fp16(model)
    loss = model(batch()[0]).mean()
    loss.backward(retain_graph=True)
    first = gradients(model)
    loss.backward()
    assert_equal(gradients(model), {name: 2 * value for name, value in first.items()})


def test_the_gradient_of_an_input_and_of_what_made_it_are_true_size():
    x, y = batch()
    model, reference = net(), net()
    upstream = nn.Linear(8, 8)
    fp16(model)
    loss_of(model, upstream(x), y).backward()
    seen = upstream.weight.grad.clone()
    upstream.weight.grad = None
    autocast_gradients(reference, lambda each: loss_of(each, upstream(x), y))
    torch.testing.assert_close(seen, upstream.weight.grad / 2.0**16, rtol=1e-6, atol=0)
    leaf = x.clone().requires_grad_()
    (by_grad,) = torch.autograd.grad(loss_of(model, leaf, y), leaf)
    loss_of(model, leaf, y).backward()
    assert torch.equal(by_grad, leaf.grad)


def test_a_loss_in_the_model_beside_logits_used_outside_as_well():
    class WithLoss(Net):
        def forward(self, x):
            logits = super().forward(x).float()
            return logits, logits.pow(2).mean()

    torch.manual_seed(0)
    model = WithLoss()
    fp16(model)
    logits, loss = model(batch()[0])
    (loss + logits.sin().mean()).backward()
    expected = autocast_gradients(net(), lambda each: use_in_two_losses(each(batch()[0])))
    for name, value in gradients(model).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-6)


def test_an_auxiliary_loss_left_in_an_attribute_is_scaled_too():
    class Auxiliary(Net):
        def forward(self, x):
            out = super().forward(x)
            self.kept = {"losses": [self.inner(x).float().pow(2).mean()]}
            return out

    x, y = batch()
    torch.manual_seed(0)
    model = Auxiliary()
    fp16(model)
    (loss_of(model, x, y) + model.kept["losses"][0]).backward()

    def compute(each):
        with torch.autocast("cpu", dtype=torch.float16):
            hidden = each.inner(x)
        return loss_of(each, x, y) + hidden.float().pow(2).mean()

    for name, value in autocast_gradients(net(), compute).items():
        torch.testing.assert_close(gradients(model)[name], value, rtol=2e-3, atol=1e-6)


def test_a_state_kept_across_forwards_without_detaching():
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(8, 8)
            self.hidden = None

        def forward(self, x):
            self.hidden = self.lin(x if self.hidden is None else x + self.hidden)
            return self.hidden

    def run(model, factor):
        total = sum(model(batch(seed)[0]).float().pow(2).mean() / 100 for seed in (1, 2, 3))
        (total * factor).backward()
        return {name: value / factor for name, value in gradients(model).items()}

    torch.manual_seed(0)
    model = Cell()
    reference = copy.deepcopy(model)
    fp16(model)
    seen = run(model, 1.0)
    with torch.autocast("cpu", dtype=torch.float16):
        expected = run(reference, 2.0**16)
    for name, value in seen.items():
        torch.testing.assert_close(value, expected[name], rtol=2e-3, atol=1e-6)


def test_checkpointing_without_reentry_gives_the_same_gradients_and_reentry_is_refused():
    class Checkpointed(Net):
        reentrant = False

        def forward(self, x):
            return self.outer(checkpoint(lambda each: torch.relu(self.inner(each)), x, use_reentrant=self.reentrant))

    x, y = batch()
    torch.manual_seed(0)
    model = Checkpointed()
    fp16(model)
    loss_of(model, x, y).backward()
    assert_equal(gradients(model), autocast_gradients(net(), lambda each: loss_of(each, x, y)))
    model.reentrant = True
    with pytest.raises(SettingsError, match="use_reentrant=False"):
        model(x.requires_grad_())


def test_differentiating_twice_is_refused_rather_than_wrong():
    model = net()
    fp16(model)
    leaf = batch()[0].requires_grad_()
    with pytest.raises(SettingsError, match="create_graph"):
        torch.autograd.grad(model(leaf).sum(), leaf, create_graph=True)


def test_without_gradients_nothing_is_scaled():
    model = net()
    fp16(model)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = model.eval()(batch()[0])
        assert out.dtype is torch.float32
        assert out.grad_fn is None
    for parameter in model.parameters():
        parameter.requires_grad_(requires_grad=False)
    assert not model(batch()[0]).requires_grad


def test_float16_parameters_are_refused_and_the_model_left_alone():
    model = net().half()
    before = dict(vars(model))
    with pytest.raises(SettingsError, match=r"inner\.weight.*float32"):
        fp16(model)
    assert vars(model) == before


def test_deep_copies_train_by_themselves_case_24():
    x, y = batch()
    model = net()
    fp16(model)
    other = copy.deepcopy(model)
    loss_of(other, x, y).backward()
    assert model.inner.weight.grad is None
    assert_equal(gradients(other), autocast_gradients(net(), lambda each: loss_of(each, x, y)))
    assert precision.scaling_of(other) is not precision.scaling_of(model)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other.inner.weight.grad.fill_(float("inf"))
    optimizer.step()
    assert precision.scaling_of(other).skipped_steps == 1
    assert precision.scaling_of(model).skipped_steps == 0


# -- fp16: the steps -----------------------------------------------------------------------------------------------


OPTIMIZERS = {
    "sgd with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    "fused adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
}
SCALER = {"init_scale": 2.0**16, "growth_interval": 4}


def by_hand(make, seeds, *, bad=(), clip=None):
    """The loop that PyTorch documents, with its GradScaler; its parameters, scales and losses."""
    model = net()
    optimizer = make(model.parameters())
    scaler = torch.amp.GradScaler("cpu", **SCALER)
    scales, losses = [], []
    for place, seed in enumerate(seeds):
        x, y = batch(seed)
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        loss = nn.functional.mse_loss(out.float(), y) * (float("inf") if place in bad else 1.0)
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        losses.append(loss.item())
    return model.state_dict(), optimizer.state_dict()["state"], scales, losses


def by_torchrig(make, seeds, *, bad=(), clip=None, early=True):
    """A plain loop."""
    model = net()
    optimizer = make(model.parameters()) if early else None
    fp16(model, *([optimizer] if early else []))
    optimizer = optimizer or make(model.parameters())
    scaling = precision.scaling_of(model)
    scaling.growth_interval = SCALER["growth_interval"]
    scales, losses = [], []
    for place, seed in enumerate(seeds):
        loss = loss_of(model, *batch(seed)) * (float("inf") if place in bad else 1.0)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        scales.append(scaling.scale)
        losses.append(loss.item())
    return model.state_dict(), optimizer.state_dict()["state"], scales, losses


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_a_loop_with_grad_scaler_through_an_overflow_case_52(name, early):
    seeds = range(12)
    parameters, state, scales, losses = by_torchrig(OPTIMIZERS[name], seeds, bad=(3, 9), early=early)
    expected, expected_state, expected_scales, expected_losses = by_hand(OPTIMIZERS[name], seeds, bad=(3, 9))
    assert_equal(parameters, expected)
    torch.testing.assert_close(state, expected_state, rtol=0, atol=0)
    assert scales == expected_scales
    assert scales[3] == 2.0**15  # it backed off,
    assert scales[7] == 2.0**16  # and grew
    assert losses == expected_losses


def test_the_users_own_clipping_sees_true_gradients():
    make = OPTIMIZERS["sgd with momentum"]
    assert_equal(by_torchrig(make, range(6), clip=0.1)[0], by_hand(make, range(6), clip=0.1)[0])


def test_a_natural_overflow_backs_off_until_losses_train_case_52():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    fp16(model, optimizer)
    scaling = precision.scaling_of(model)
    before = copy.deepcopy(model.state_dict())
    losses = []
    for place in range(12):
        loss = loss_of(model, *batch()) * 1000
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if place == 0:
            assert scaling.scale == 2.0**15
            assert_equal(model.state_dict(), before)
    assert scaling.skipped_steps > 1
    assert scaling.scale == 2.0 ** (16 - scaling.skipped_steps)
    assert losses[-1] < losses[0] < float("inf")


def test_a_skipped_step_leaves_the_gradients_for_the_loop_to_see():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fp16(model, optimizer)
    (loss_of(model, *batch()) * float("inf")).backward()
    kept = model.inner.weight.grad
    optimizer.step()
    assert model.inner.weight.grad is kept


def test_two_optimizers_over_one_model_share_one_scale():
    def run(bad):
        model = net()
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.inner, model.outer)]
        fp16(model, *optimizers)
        scaling = precision.scaling_of(model)
        scaling.growth_interval = 2
        for _ in range(2):
            loss_of(model, *batch()).backward()
            if bad:
                model.inner.weight.grad[0, 0] = float("inf")
            before = model.outer.weight.detach().clone()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert not torch.equal(before, model.outer.weight)  # its gradients were good, as GradScaler has it
        return scaling.scale

    assert run(bad=False) == 2.0**17
    assert run(bad=True) == 2.0**14


def test_an_optimizer_of_another_model_is_left_alone():
    model, other = net(), net()
    fp16(model)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    (loss_of(other, *batch()) * float("inf")).backward()
    optimizer.step()
    assert not other.inner.weight.isfinite().all()
    assert precision.scaling_of(model).skipped_steps == 0


def test_parameters_replaced_later_are_unscaled_and_checked():
    x, y = batch()
    model = net()
    fp16(model)
    model.inner = nn.Linear(8, 16)
    loss_of(model, x, y).backward()
    assert model.inner.weight.grad.abs().max() < 10
    optimizer = torch.optim.SGD(model.inner.parameters(), lr=0.1)
    before = model.inner.weight.detach().clone()
    model.inner.bias.grad[0] = float("nan")
    optimizer.step()
    assert torch.equal(model.inner.weight, before)


@pytest.mark.parametrize("keyword", [True, False])
def test_a_step_that_computes_its_own_gradients_is_skipped_alike(keyword):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    fp16(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    factor = float("inf")

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, *batch()) * factor
        loss.backward()
        return loss

    assert (optimizer.step(closure=closure) if keyword else optimizer.step(closure)) == float("inf")
    assert_equal(model.state_dict(), before)
    assert not optimizer.state
    factor = 1.0
    optimizer.step(closure)
    assert not torch.equal(model.inner.weight, before["inner.weight"])
    assert precision.scaling_of(model).scale == 2.0**15


def test_lbfgs_trains_in_fp16():
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5)
    fp16(model, optimizer)
    losses = []

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, *batch())
        loss.backward()
        return loss

    for _ in range(3):
        losses.append(optimizer.step(closure).item())
    assert losses[-1] < 0.5 * losses[0]


def test_sparse_gradients_are_scaled_and_checked():
    class Looking(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 4, sparse=True)

        def forward(self, x):
            return self.table(x) @ torch.eye(4)

    model = Looking()
    fp16(model)
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.1)
    model(torch.tensor([1, 1, 2])).mean().backward()
    torch.testing.assert_close(model.table.weight.grad.to_dense()[1], torch.full((4,), 2 / 12), rtol=1e-3, atol=0)
    before = model.table.weight.detach().clone()
    (model(torch.tensor([1])).sum() * float("inf")).backward()
    optimizer.step()
    assert torch.equal(model.table.weight, before)


def test_the_scale_moves_to_and_from_grad_scaler():
    model = net()
    fp16(model)
    scaling = precision.scaling_of(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    scaler.scale(torch.ones(()))
    scaling.load_state_dict(scaler.state_dict())
    assert scaling.scale == 512.0
    assert scaling.state_dict() == scaler.state_dict()
    scaler.load_state_dict(scaling.state_dict())


def test_the_scale_of_a_wrapped_model_is_found():
    model = net()
    fp16(model)
    assert precision.scaling_of(nn.Sequential(model)) is precision.scaling_of(model)
    assert precision.scaling_of(net()) is None


def test_taking_the_layer_off_ends_the_scaling() -> None:
    model = torchrig.prepare(nn.Sequential(nn.Linear(4, 4)), mixed_precision="fp16")
    assert precision.scaling_of(model) is not None
    torchrig.unwrap(model, keep_compile=False)
    assert precision.scaling_of(model) is None
