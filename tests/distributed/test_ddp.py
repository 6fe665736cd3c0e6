"""Strategy ``ddp`` on two processes and four: what one process gets on the batches of all."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.utils.checkpoint import checkpoint

import torchrig

STEPS, BATCH = 4, 6  # a batch of all processes together; two and three divide it


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Checkpointed(Block):
    """A block that is computed again in its backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Net(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Wide(nn.Module):
    """A block of 3 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(600, 600), nn.Linear(600, 600)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class WideNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(600, 600)
        self.layers = nn.ModuleList([Wide(), Wide()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def build(block: Callable[[], nn.Module] = Block) -> Net:
    torch.manual_seed(0)
    return Net(block).double()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda: torch.randn(BATCH, 8, dtype=torch.float64, generator=generator)  # noqa: E731
    return [(draw(), torch.arange(BATCH) % 3) for _ in range(STEPS)]


def own(batch: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    """This process's part of a batch of all."""
    return [part[dist.get_rank() :: dist.get_world_size()] for part in batch]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, take: Callable) -> tuple[list[float], list[torch.Tensor]]:
    """The loss of each step over all processes, and the gradients of the last."""
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        x, y = take(batch)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    mean = torch.stack(losses)
    if take is own:
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return mean.tolist(), [parameter.grad.clone() for parameter in model.parameters()]


def close(actual: object, expected: object) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


two = pytest.mark.processes(2)


@two
@pytest.mark.parametrize("backend", ["no", "eager", "aot_eager"])
@pytest.mark.parametrize("block", [Block, Checkpointed])
def test_case_19_losses_gradients_and_parameters_are_those_of_one_process(block, backend):
    bare, model = build(block), build(block)
    prepared, optimizer = torchrig.prepare(model, adam(model), strategy="ddp", backend=backend)
    close(train(prepared, optimizer, own), train(bare, adam(bare), list))
    close(dict(prepared.state_dict()), dict(bare.state_dict()))
    if backend != "no":
        report = torchrig.report(prepared)
        assert (report.graphs, report.recompiles, report.breaks, report.ok) == (1, 0, 0, True)


@pytest.mark.processes(4)
def test_four_processes_begin_with_the_first_ones_values():
    size = dist.get_world_size()
    torch.manual_seed(dist.get_rank())
    model = Net()
    prepared = torchrig.prepare(model, backend="eager")
    torch.manual_seed(0)
    close(dict(prepared.state_dict()), dict(Net().state_dict()))
    prepared(torch.randn(size, 8)[dist.get_rank()][None]).sum().backward()
    every = [torch.zeros_like(model.first.weight) for _ in range(size)]
    dist.all_gather(every, model.first.weight.grad)
    assert all(torch.equal(each, every[0]) for each in every) and every[0].any()


@two
@pytest.mark.parametrize("placement", ["forward", "inplace", "wrap"])
def test_a_model_compiled_whole_is_one_graph_and_so_is_a_region_larger_than_a_bucket(placement):
    for regions in ("whole", "repeated"):
        model = WideNet()
        settings = {"regions": regions, "placement": placement, "fullgraph": True, "ddp": {"bucket_cap_mb": 1}}
        prepared = torchrig.prepare(model, strategy="ddp", backend="aot_eager", **settings)
        prepared(torch.ones(2, 600)).sum().backward()
        report = torchrig.report(prepared)
        assert (report.graphs, report.breaks, report.ok) == (1, 0, True)


@two
def test_case_28_unwrap_compile_in_ddp_in_compile():
    model = build()
    prepared = torchrig.prepare(torch.compile(model, backend="eager"), strategy="ddp", backend="eager")
    assert torchrig.unwrap(torch.compile(prepared, backend="eager")) is model
    nested = torch.compile(nn.parallel.DistributedDataParallel(torch.compile(model, backend="eager")), backend="eager")
    assert torchrig.unwrap(nested) is model
    assert torchrig.unwrap(prepared, keep_compile=False) is model and not torchrig.has_compiled_regions(model)


@two
@pytest.mark.parametrize("compiled", [False, True])
def test_case_47_a_step_function_around_the_model_averages_gradients(compiled):
    bare, model = build(), build()
    settings = {"on_problem": "ignore"} if compiled else {}  # then the regions are part of the step's own graph
    prepared = torchrig.prepare(model, strategy="ddp", backend="eager", **settings)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(prepared(x), y)

    batch = batches()[0]
    run = torch.compile(step, backend="eager") if compiled else step
    run(*own(batch)).backward()
    nn.functional.cross_entropy(bare(batch[0]), batch[1]).backward()
    close([each.grad for each in model.parameters()], [each.grad for each in bare.parameters()])


@two
@pytest.mark.parametrize("ddp", [{}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 1}])
def test_no_sync_adds_up_on_each_process_and_the_last_backward_averages(ddp):
    bare, model = build(), build()
    prepared = torchrig.prepare(model, strategy="ddp", backend="aot_eager", ddp=ddp)
    given = batches()[:3]
    for index, batch in enumerate(given):
        with torchrig.no_sync(prepared, enabled=index < 2):
            x, y = own(batch)
            nn.functional.cross_entropy(prepared(x), y).backward()
        nn.functional.cross_entropy(bare(batch[0]), batch[1]).backward()
        expected = [each.grad for each in bare.parameters()]
        alone = not torch.allclose(model.first.weight.grad, expected[0])
        assert alone == (index < 2)
    close([each.grad for each in model.parameters()], expected)
    assert torchrig.report(prepared).graphs == 1


@two
def test_clipping_gives_the_norm_of_the_whole_models_gradients_on_every_process():
    bare, model = build(), build()
    prepared = torchrig.prepare(model, strategy="ddp", backend="eager")
    batch = batches()[0]
    x, y = own(batch)
    nn.functional.cross_entropy(prepared(x), y).backward()
    nn.functional.cross_entropy(bare(batch[0]), batch[1]).backward()
    expected = nn.utils.clip_grad_norm_(bare.parameters(), 0.1)
    close(torchrig.clip_grad_norm_(prepared, 0.1), expected)
    close([each.grad for each in model.parameters()], [each.grad for each in bare.parameters()])


@two
def test_hooks_of_the_model_and_of_the_wrapper_fire_as_in_eager():
    def hooked(model: nn.Module, root: nn.Module, late: bool) -> list[str]:
        fired: list[str] = []
        for name, module in {"root": root, "block": model.layers[1], "child": model.layers[1].up}.items():
            module.register_forward_hook(lambda *_, name=name: fired.append(f"{name} forward {late}"))
            module.register_full_backward_hook(lambda *_, name=name: fired.append(f"{name} backward {late}"))
        return fired

    def run(strategy: str) -> list[str]:
        model = build()
        x = own(batches()[0])[0].requires_grad_()
        early = hooked(model, model, late=False)
        prepared = model if strategy == "none" else torchrig.prepare(model, strategy=strategy, backend="aot_eager")
        prepared(x).sum().backward()
        late = hooked(model, prepared, late=True)
        prepared(x).sum().backward()
        return sorted(early) + sorted(late)

    assert run("ddp") == run("none")


@two
def test_fp16_a_step_that_overflowed_on_one_process_is_skipped_on_all():
    torch.manual_seed(0)
    model = Net()
    prepared, optimizer = torchrig.prepare(model, adam(model), strategy="ddp", backend="eager", mixed_precision="fp16")
    scaling = torchrig.precision.scaling_of(prepared)
    before, scale = model.first.weight.detach().clone(), scaling.scale
    x = torch.ones(3, 8)

    def step(factor: float) -> None:
        optimizer.zero_grad()
        (prepared(x).float().square().mean() * factor).backward()
        optimizer.step()

    step(float("inf") if dist.get_rank() == 1 else 1.0)
    assert torch.equal(model.first.weight, before)
    assert (scaling.skipped_steps, scaling.scale) == (1, scale / 2)
    for _ in range(8):  # until the scale is one that the gradients bear
        step(1.0)
    assert not torch.equal(model.first.weight, before) and model.first.weight.isfinite().all()
    weights = [torch.zeros_like(model.first.weight) for _ in range(2)]
    dist.all_gather(weights, model.first.weight.detach())
    assert torch.equal(*weights)


@two
def test_keys_are_the_bare_models_by_every_way_of_saving():
    model, bare = build(), build()
    prepared = torchrig.prepare(model, strategy="ddp", backend="eager")
    keys = list(bare.state_dict())
    assert list(prepared.state_dict()) == list(get_model_state_dict(prepared)) == keys
    set_model_state_dict(prepared, {name: value + 1 for name, value in bare.state_dict().items()})
    close(dict(model.state_dict()), {name: value + 1 for name, value in bare.state_dict().items()})
    prepared.load_state_dict(bare.state_dict())
    close(dict(prepared.state_dict()), dict(bare.state_dict()))
    around = nn.Sequential(prepared)
    around.load_state_dict(around.state_dict())


@two
def test_a_parameter_that_is_not_used_is_found_where_the_settings_say_so():
    class Unused(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x)

    prepared = torchrig.prepare(Unused(), strategy="ddp", backend="no", ddp={"find_unused_parameters": True})
    for _ in range(2):
        prepared(torch.ones(2, 8)).sum().backward()
    assert torchrig.unwrap(prepared).first.weight.grad is not None


@two
def test_buffers_are_the_first_processs_unless_the_settings_say_otherwise():
    for broadcast in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        prepared = torchrig.prepare(model, strategy="ddp", backend="no", ddp={"broadcast_buffers": broadcast})
        for _ in range(2):
            prepared(torch.randn(4, 8) + dist.get_rank())
        prepared.eval()
        prepared(torch.ones(1, 8))  # begins with the buffers of the first
        means = [torch.zeros(8) for _ in range(2)]
        dist.all_gather(means, model[1].running_mean)
        assert torch.equal(*means) == broadcast
        assert type(model[1]) is nn.BatchNorm1d, "batch norm was made to synchronise"


@two
def test_a_prepare_that_raises_on_a_process_leaves_its_values(monkeypatch):
    torch.manual_seed(dist.get_rank())
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("torchrig.loaders.place", fail)
    with pytest.raises(ZeroDivisionError):
        torchrig.prepare(model, torch.utils.data.DataLoader(range(4)), strategy="ddp", backend="eager")
    close(dict(model.state_dict()), before)
    assert not torchrig.has_compiled_regions(model) and dist.is_initialized()


@pytest.mark.processes(2, group=False)
def test_models_that_differ_between_processes_are_refused():
    model = nn.Sequential(nn.Linear(8, 8 + dist.get_rank()))
    with pytest.raises(torchrig.StrategyError, match="DistributedDataParallel refuses this Sequential"):
        torchrig.prepare(model, strategy="ddp", backend="no")


@two
def test_case_32_the_wrapper_dropped_is_told_at_the_first_forward():
    model = build()
    torchrig.prepare(model, strategy="ddp", backend="eager")
    gc.collect()
    with pytest.warns(torchrig.TorchrigWarning, match=r"what prepare gave back was dropped.*model = torchrig.prepare"):
        model(own(batches()[0])[0])


@pytest.mark.processes(2, group=False)
def test_prepare_starts_the_group_by_torchruns_variables_and_plan_does_not():
    model = build()
    plan = torchrig.plan(model)
    assert plan.strategy == "ddp" and not dist.is_initialized()
    prepared = torchrig.prepare(model)
    assert (dist.get_world_size(), str(dist.get_rank())) == (2, os.environ["RANK"])
    assert isinstance(prepared, nn.parallel.DistributedDataParallel)
    assert torchrig.prepare(model) is prepared


@pytest.mark.processes(2, group=False)
def test_a_group_that_a_failed_prepare_started_is_gone_again(monkeypatch):
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("torchrig.loaders.place", fail)
    model = build()
    with pytest.raises(ZeroDivisionError):
        torchrig.prepare(model, torch.utils.data.DataLoader(range(4)))
    assert not dist.is_initialized()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(batches()[0][0]).sum().backward()
