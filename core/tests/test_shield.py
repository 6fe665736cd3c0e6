"""Case 42: a backend that fails at its first forward or backward, when it compiles or when it runs."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

import torchrig


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)

    def forward(self, x):
        return x + torch.relu(self.norm(self.drop(self.linear(x))))


class Model(nn.Module):
    def __init__(self, checkpointed=False):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.checkpointed = checkpointed

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


def fails(*args):
    raise RuntimeError("the backend's own words")


def works(graph, inputs):
    return make_boxed_func(graph.forward)


def runs_badly(graph, inputs):
    return make_boxed_func(fails)


class BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        fails()


def without_aot(graph, inputs):
    return lambda *args: [BadBackward.apply(each) for each in graph.forward(*args)]


BACKENDS = {
    "forward, compiling": aot_autograd(fw_compiler=fails, bw_compiler=works),
    "forward, running": aot_autograd(fw_compiler=runs_badly, bw_compiler=works),
    "backward, compiling": aot_autograd(fw_compiler=works, bw_compiler=fails),
    "backward, running": aot_autograd(fw_compiler=works, bw_compiler=runs_badly),
    "without AOTAutograd, compiling": fails,
    "without AOTAutograd, running": lambda graph, inputs: fails,
    "without AOTAutograd, backward": without_aot,
}
failing = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)


@pytest.fixture
def models():
    """Two models alike, in float64."""
    torch.manual_seed(0)
    model = Model().double()
    return model, copy.deepcopy(model)


def train(model, steps=3):
    torch.manual_seed(1)
    handles = [parameter.register_hook(lambda gradient: 2 * gradient) for parameter in model.parameters()]
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1e-3), []
    for step in range(steps):
        loss = model(torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4) + step).pow(2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for handle in handles:
        handle.remove()
    return losses


def assert_alike(one, other):
    # A checkpointed forward runs twice, and so updates batch norm twice; the one that failed in between does not.
    values = one.named_parameters() if one.checkpointed else one.state_dict().items()
    found = dict(other.named_parameters()) | other.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in values)


@failing
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_case_42_eager_goes_on_training_and_says_so_once(models, backend, checkpointed):
    eager, model = models
    eager.checkpointed = model.checkpointed = checkpointed
    torchrig.prepare(model, backend=backend, on_failure="eager")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        losses = train(model)
    assert losses == train(eager)
    assert_alike(eager, model)
    ours = [each for each in told if issubclass(each.category, torchrig.TorchrigWarning)]
    assert len(ours) == 1 and "Block" in str(ours[0].message) and "the backend's own words" in str(ours[0].message)
    report = torchrig.report(model)
    assert not report.ok and "the backend's own words" in report["Block"].fallbacks[0]


@pytest.mark.parametrize("name", ["forward, compiling", "backward, compiling", "without AOTAutograd, compiling"])
def test_case_42_raise_names_region_and_backend_before_the_loop_reaches_backward(models, name):
    _, model = models
    torchrig.prepare(model, backend=BACKENDS[name])
    with pytest.raises(torchrig.RegionCompileError, match=r"region Block.*the backend's own words") as caught:
        model(torch.ones(6, 4, dtype=torch.float64))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_only_the_kind_that_fails_runs_eager():
    class Other(Block):
        def forward(self, x):
            return torch.tanh(self.linear(x))

    def fails_on_relu(graph, inputs):
        if any("relu" in str(node.target) for node in graph.graph.nodes):
            fails()
        return graph.forward

    model = nn.Sequential(*(kind() for _ in range(2) for kind in (Block, Other)))
    torchrig.prepare(model, backend=fails_on_relu, on_failure="eager")
    with pytest.warns(torchrig.CompileProblemWarning, match="Region Block runs eager"):
        model(torch.ones(6, 4)).sum().backward()
    report = torchrig.report(model)
    assert (report["Block"].compiled, report["Other"].compiled) == (False, True)


def test_the_users_own_error_is_not_taken_for_the_backends():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(4, 4)

        def forward(self, x):
            return self.table(x)

    model = torchrig.prepare(Table(), backend="aot_eager", regions="whole", on_failure="eager")
    with pytest.raises(IndexError):
        model(torch.tensor([9]))
    assert not torchrig.report(model)["Table"].fallbacks


def test_second_derivatives_in_the_first_step_are_right(models):
    eager, model = models
    torchrig.prepare(model, backend="eager", on_failure="eager")

    def penalty(model):
        x = torch.full((6, 4), 0.1, dtype=torch.float64, requires_grad=True)
        torch.manual_seed(2)
        (gradient,) = torch.autograd.grad(model(x).pow(3).mean(), x, create_graph=True)
        gradient.pow(2).sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    for one, other in zip(penalty(eager), penalty(model), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-5)


def test_going_backward_twice_in_the_first_step_is_no_failure(models):
    eager, model = models
    torchrig.prepare(model, backend="eager", on_failure="eager")
    for each in models:
        torch.manual_seed(3)
        loss = each(torch.ones(6, 4, dtype=torch.float64)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    for one, other in zip(eager.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)
    assert torchrig.report(model).ok


def test_a_graph_that_writes_into_its_input_is_run_unshielded():
    class Writing(Block):
        def forward(self, x):
            x += self.linear.bias
            return x

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Writing(), Writing()).double()
    eager = copy.deepcopy(model)
    torchrig.prepare(model, backend="aot_eager", on_failure="eager")
    for each in (model, eager):
        each(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    for one, other in zip(eager.parameters(), model.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad)
    assert torchrig.report(model).ok


@pytest.mark.parametrize("learning", [True, False])
def test_a_backend_that_ran_the_graph_before_it_failed_leaves_nothing_twice(models, learning):
    def late(graph, inputs):
        def run(*args):
            graph.forward(*args)
            fails()

        return run

    eager, model = models
    torchrig.prepare(model, backend=late, on_failure="eager")
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4)
    outputs = []
    for each in models:
        torch.manual_seed(4)
        with torch.set_grad_enabled(learning), warnings.catch_warnings():
            warnings.simplefilter("ignore", torchrig.CompileProblemWarning)
            outputs.append(each(x))
    assert torch.equal(*outputs)
    assert_alike(eager, model)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_dynamo_raises_to_trace_once_more_is_no_failure(backend):
    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x):
            return torch.nn.functional.dropout(self.norm(self.linear(x)), 0.25, self.training)

    model = nn.Sequential(Dropping(), Dropping())
    torchrig.prepare(model, backend=backend, on_failure="eager", dynamic=True)
    model(torch.ones(6, 4)).sum().backward()
    assert torchrig.report(model).ok
