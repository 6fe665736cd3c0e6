"""Cases in which compile does silently less than it was asked to, or more often: shapes, breaks, limits, routing."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Iterable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import torchrig


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.relu(self.linear(x)))


class Model(nn.Module):
    """Blocks behind an embedding, checkpointed from outside where asked."""

    def __init__(self, block: type[nn.Module] = Block, checkpointed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(block() for _ in range(3))
        self.checkpointed = checkpointed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


def pair(*arguments: object) -> tuple[Model, Model]:
    """Two models alike, in float64."""
    torch.manual_seed(0)
    model = Model(*arguments).double()  # type: ignore[arg-type]
    return model, copy.deepcopy(model)


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(16, shape, generator=torch.Generator().manual_seed(sum(shape)))


def train(model: nn.Module, batches: Iterable[torch.Tensor]) -> list[float]:
    torch.manual_seed(1)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1e-2), []
    for batch in batches:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def ragged(samples: int = 103, length: int = 15) -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(tokens(samples, length)), batch_size=8)


@pytest.mark.parametrize("order", ["rising", "falling", "mixed"])
def test_case_15_a_ragged_last_batch_and_eleven_lengths_cost_one_recompile_and_the_report_names_it(order: str) -> None:
    class Own(Block):  # PyTorch remembers which dimensions of a function varied, from one test to the next
        forward = functions[order]

    eager, model = pair(Own)
    model, loader = torchrig.prepare(model, ragged(), backend="aot_eager")
    lengths = list(range(5, 16))
    {"rising": lengths.sort, "falling": lengths.reverse, "mixed": lambda: random.Random(3).shuffle(lengths)}[order]()
    batches = [batch[:, :length] for length in lengths for (batch,) in loader]
    assert {len(batch) for batch in batches} == {8, 7}
    assert train(model, batches) == train(eager, batches)
    own = torchrig.report(model)["Own"]
    assert own.graphs == 2 and len(own.recompiles) == 1 and own.compiled
    assert "size mismatch at index 1" in own.recompiles[0].guard and "shape varies" in own.recompiles[0].hint


def _forwards() -> dict[str, object]:
    """One and the same forward, as functions that PyTorch knows apart."""
    source = "def forward(self, x): return x + self.drop(torch.relu(self.linear(x)))"
    made = {}
    for name in ("rising", "falling", "mixed", "ragged", "loop", "one", "two", "ten", "static"):
        scope: dict[str, object] = {"torch": torch}
        exec(compile(source, f"<{name}>", "exec"), scope)
        made[name] = scope["forward"]
    return made


functions = _forwards()


def test_case_15_a_ragged_last_batch_alone_costs_none() -> None:
    class Own(Block):
        forward = functions["ragged"]

    eager, model = pair(Own)
    model, loader = torchrig.prepare(model, ragged(), backend="aot_eager")
    batches = [batch for (batch,) in loader]
    assert train(model, batches) == train(eager, batches)
    assert torchrig.report(model)["Own"].graphs == 1


def test_case_15_a_last_batch_of_one_is_said_in_plan_and_report() -> None:
    class Own(Block):
        forward = functions["one"]

    model, loader = torchrig.prepare(Model(Own), ragged(17), backend="aot_eager")
    assert "size 1 gets a graph of its own" in torchrig.plan(Model(Own), ragged(17), backend="aot_eager").notes[0]
    train(model, [batch for (batch,) in loader])
    own = torchrig.report(model)["Own"]
    assert own.graphs == 2 and "size 1" in own.recompiles[0].hint


def test_case_15_dynamic_false_gives_each_shape_its_graph_and_names_each() -> None:
    class Own(Block):
        forward = functions["static"]

    model, loader = torchrig.prepare(Model(Own), ragged(), backend="aot_eager", dynamic=False)
    train(model, [batch for (batch,) in loader])
    own = torchrig.report(model)["Own"]
    assert own.graphs == 2 and "expected 8, actual 7" in own.recompiles[0].guard


def test_a_loop_with_evaluation_ragged_batches_and_eleven_lengths() -> None:
    """At most one graph for each mode, and one dynamic one for each; the report names every one of them."""

    class Own(Block):
        forward = functions["loop"]

    model, loader = torchrig.prepare(Model(Own), ragged(), backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    steps = 0
    for length in range(5, 16):
        for (batch,) in loader:
            model(batch[:, :length]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if steps % 5 == 0:
                model.eval()
                with torch.no_grad():
                    model(batch[:, :length])
                model.train()
    own = torchrig.report(model)["Own"]
    assert own.compiled and set(own.modes) == {"train", "eval, no_grad"}
    assert all(graphs <= 2 for graphs in own.modes.values())
    assert own.graphs - len(own.modes) == len(own.recompiles)
    assert all("size mismatch at index 1" in each.guard for each in own.recompiles)


def test_evaluation_in_a_loop_of_mixed_lengths_costs_one_graph() -> None:
    class Own(Block):
        forward = functions["two"]

    model, loader = torchrig.prepare(Model(Own), ragged(), backend="aot_eager")
    for place, (batch,) in enumerate(loader):
        model(batch[:, : 5 + place % 11]).square().mean().backward()
        if place % 5 == 4:
            model.eval()
            with torch.no_grad():
                model(batch[:, : 5 + place % 11])
            model.train()
    assert torchrig.report(model)["Own"].modes == {"train": 2, "eval, no_grad": 1}


def test_a_sequence_as_long_as_the_batch_is_large_is_not_taken_for_it() -> None:
    class Own(Block):
        forward = functions["ten"]

    model = torchrig.prepare(Model(Own), ragged(), backend="aot_eager")[0]
    train(model, [tokens(8, length) for length in (5, 8, 6, 9)] + [tokens(7, 8)])
    assert torchrig.report(model)["Own"].graphs == 2


class Inside(Block):
    """Checkpoints a part of itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Outside(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.tanh(self.linear(x)))


@pytest.mark.parametrize(("block", "checkpointed"), [(Outside, True), (Inside, False)], ids=["outside", "inside"])
def test_case_38_the_limit_in_a_checkpointed_block_trains_on_as_eager(
    block: type[nn.Module], checkpointed: bool
) -> None:
    eager, model = pair(block, checkpointed)
    torchrig.prepare(model, backend="aot_eager", dynamic=False)
    batches = [tokens(2, length) for length in range(2, 13)]
    with pytest.warns(torchrig.CompileProblemWarning, match="was recompiled"):
        losses = train(model, batches)
    assert losses == train(eager, batches)
    assert "recompile limit" in torchrig.report(model)[block.__name__].fallbacks[0]


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Gathering(nn.Module):
    """Eight experts; each takes the tokens routed to it, however many, none included."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 8)
        self.experts = nn.ModuleList(Expert() for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, 8)
        weights, chosen = self.router(flat).softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        for place, expert in enumerate(self.experts):
            rows, slot = torch.where(chosen == place)
            out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, slot, None])
        return x + out.reshape(x.shape)


class Skipping(Gathering):
    """Leaves an expert out that got no token."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, 8)
        weights, chosen = self.router(flat).softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        for place, expert in enumerate(self.experts):
            mask = (chosen == place).any(-1)
            if mask.any():
                out[mask] += expert(flat[mask]) * weights.sum(-1, keepdim=True)[mask]
        return x + out.reshape(x.shape)


class Splitting(Gathering):
    """Sorts the tokens by expert, and splits them by the counts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, 8)
        weights, chosen = self.router(flat).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        parts = flat[order].split(torch.bincount(chosen, minlength=8).tolist())
        out = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        return x + (torch.empty_like(out).index_copy(0, order, out) * weights[:, None]).reshape(x.shape)


@pytest.mark.parametrize("block", [Gathering, Skipping, Splitting])
def test_case_40_a_mixture_of_experts_is_one_region_and_its_graphs_are_bounded(block: type[nn.Module]) -> None:
    eager, model = pair(block)
    torchrig.prepare(model, backend="eager", on_problem="ignore")
    assert [region.kind for region in torchrig.plan(eager, backend="eager").regions] == [block.__name__]
    batches = [tokens(*shape) for shape in ((4, 2), (3, 2), (4, 3), (5, 2), (2, 2))]
    torch.testing.assert_close(train(model, batches), train(eager, batches), rtol=1e-12, atol=1e-12)
    own = torchrig.report(model)[block.__name__]
    assert own.graphs <= 8 and not any("recompile limit" in each for each in own.fallbacks)
    if block is Gathering:  # nothing in it depends on the data but sizes
        assert own.compiled and not own.breaks
    else:
        assert own.breaks and "test_proof.py:" in own.breaks[0].where


class Loop(nn.Module):
    """Branches on its data inside a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.relu(self.linear(x))
            if x.sum() > 1:
                x = x * 0.5
        return x


@pytest.mark.parametrize("checkpointed", [False, True])
def test_case_49_a_break_in_a_loop_is_reported_with_its_line_and_runs_right(checkpointed: bool) -> None:
    eager, model = pair(Loop, checkpointed)
    torchrig.prepare(model, backend="aot_eager")
    batches = [tokens(2, 3), tokens(2, 3)]
    with pytest.warns(torchrig.CompileProblemWarning, match=r"GraphBreak: Region Loop breaks at .*test_proof.py:\d+"):
        losses = train(model, batches)
    assert losses == train(eager, batches)
    own = torchrig.report(model)["Loop"]
    assert not own.compiled and "Data-dependent" in own.breaks[0].reason and own.fallbacks


def test_case_49_and_raised_where_the_settings_say_so() -> None:
    model = torchrig.prepare(Model(Loop), backend="aot_eager", on_problem={"graph_break": "raise"})
    with pytest.raises(torchrig.GraphBreak, match=r"test_proof.py:\d+"):
        model(tokens(2, 3))


@pytest.mark.slow_compile
def test_a_compiler_that_is_gone_at_run_time_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config

    class Own(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(self.linear(x)) * 0.123

    eager, model = pair(Own)
    torchrig.prepare(model, backend="inductor", on_failure="eager")
    with (
        torch._inductor.config.patch({"cpp.cxx": ("/no/such/compiler",), "force_disable_caches": True}),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        losses = train(model, [tokens(2, 3), tokens(2, 3)])
    assert losses == train(eager, [tokens(2, 3), tokens(2, 3)])
    assert len([each for each in told if issubclass(each.category, torchrig.CompileProblemWarning)]) == 1
    assert not torchrig.report(model).ok
