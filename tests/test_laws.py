"""The nine laws of a prepared model, each for every strategy and backend (and each placement where it matters)."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import torchrig
from torchrig import dtensors

BLOCKS = 12
TOLERANCE = {"no": 0.0, "eager": 0.0, "aot_eager": 0.0, "inductor": 1e-9}  # of fp64; Inductor may reorder sums


class Block(nn.Module):
    def __init__(self, width: int, index: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("steps", torch.zeros((), dtype=torch.float64))
        self.index = index

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        if self.training:
            self.steps += 1
        return x + scale * self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    """A stack of blocks between an embedding and a head, with batch norm and a method of its own."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.layers = nn.ModuleList(Block(width, index) for index in range(BLOCKS))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x.flatten(0, 1)))

    def predict(self, tokens: torch.Tensor) -> torch.Tensor:
        return self(tokens).argmax(-1)


@dataclass(frozen=True)
class Way:
    """A strategy, a backend and a placement."""

    strategy: str
    backend: str
    placement: str = "auto"
    regions: str = "auto"

    def settings(self) -> dict[str, object]:
        compiled = {"fullgraph": True} if self.backend != "no" else {}
        # Inductor would draw random numbers of its own, and dropout could not be compared.
        own = {"options": {"fallback_random": True}} if self.backend == "inductor" else {}
        return {**vars(self), **compiled, **own}

    def __str__(self) -> str:
        return "-".join(vars(self).values())


def _ways() -> Iterator[object]:
    for backend in ("no", "eager", "aot_eager", "inductor"):
        marks = [pytest.mark.slow_compile] if backend == "inductor" else []
        yield pytest.param(Way("single", backend), marks=marks, id=str(Way("single", backend)))
    for placement in ("inplace", "wrap"):
        way = Way("single", "aot_eager", placement)
        yield pytest.param(way, id=str(way))
    way = Way("single", "aot_eager", regions="whole")
    yield pytest.param(way, id=str(way))
    for way in (Way("ddp", "no"), Way("ddp", "aot_eager")):
        yield pytest.param(way, id=str(way))  # one process; tests/distributed has more
    for way in (Way("fsdp2", "no"), Way("fsdp2", "aot_eager"), Way("fsdp2", "aot_eager", "inplace")):
        yield pytest.param(way, id=str(way))


every_way = pytest.mark.parametrize("way", list(_ways()))


@pytest.fixture(autouse=True)
def no_group_left() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():  # as strategy ddp leaves it, to the end of the process
        torch.distributed.destroy_process_group()


@pytest.fixture
def build() -> Callable[[], Model]:
    def make() -> Model:
        torch.manual_seed(0)
        return Model().double()

    return make


def batches(count: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randint(16, shape, generator=generator)  # noqa: E731
    return [(draw(4, 5), draw(20)) for _ in range(count)]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    losses = []
    torch.manual_seed(2)
    for tokens, targets in batches(steps):
        loss = nn.functional.cross_entropy(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def whole(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dict with every sharded tensor put together."""
    return {name: dtensors.whole(value) for name, value in state.items()}


def check_shows(model: nn.Module, shown: tuple[object, ...], *, also_more: bool) -> None:
    *named, attributes = what_shows(model)
    assert isinstance(model, shown[0])
    assert named[1:] == list(shown[1:-1])
    assert attributes >= shown[-1] if also_more else (named[0], attributes) == (shown[0], shown[-1])


def what_shows(model: nn.Module) -> tuple[object, ...]:
    # Dynamo, and copying, mark classes with names that begin so.
    attributes = {name for name in dir(model) if not name.startswith("__")}
    return type(model), type(model).__name__, str(inspect.signature(model.forward)), attributes


@every_way
def test_law_1_the_original_object_comes_back(way: Way, build: Callable[[], Model]) -> None:
    model = build()
    shown = what_shows(model)
    prepared = torchrig.prepare(model, **way.settings())
    train(prepared, adam(prepared), 1)
    assert torchrig.unwrap(prepared) is model
    assert torchrig.unwrap(torchrig.unwrap(prepared)) is model
    assert (prepared is model) == (way.strategy != "ddp")
    if way.placement != "wrap":
        check_shows(model, shown, also_more=way.strategy == "fsdp2")  # the methods of FSDP2's own class
        assert model.predict(batches(1)[0][0]).shape == (20,)
    assert torchrig.has_compiled_regions(prepared) == (way.backend != "no"), "unwrap must not change what is alive"


@every_way
def test_law_1_keep_compile_false_leaves_the_model_as_written(way: Way, build: Callable[[], Model]) -> None:
    model = build()
    before = {name: sorted(vars(module)) for name, module in model.named_modules()}
    prepared = torchrig.prepare(model, **way.settings())
    train(prepared, adam(prepared), 1)
    assert torchrig.unwrap(prepared, keep_compile=False) is model
    if way.strategy == "fsdp2":  # what is sharded stays so
        assert all("forward" not in vars(module) for module in model.modules())
    else:
        assert {name: sorted(vars(module)) for name, module in model.named_modules()} == before
    assert not torchrig.has_compiled_regions(model)


@every_way
def test_law_2_keys_are_the_bare_models(way: Way, build: Callable[[], Model]) -> None:
    bare, model = build(), build()
    prepared = torchrig.prepare(model, **way.settings())
    train(prepared, adam(prepared), 1)
    assert list(prepared.state_dict()) == list(bare.state_dict())
    file = io.BytesIO()
    torch.save(whole(prepared.state_dict()), file)
    file.seek(0)
    bare.load_state_dict(torch.load(file), strict=True)
    torch.testing.assert_close(whole(bare.state_dict()), whole(prepared.state_dict()), rtol=0, atol=0)
    prepared.load_state_dict(build().state_dict(), strict=True)
    torch.testing.assert_close(whole(prepared.state_dict()), whole(build().state_dict()), rtol=0, atol=0)


@every_way
@pytest.mark.parametrize("built", ["before", "after"])
def test_law_3_the_optimizer_owns_the_live_parameters(way: Way, built: str, build: Callable[[], Model]) -> None:
    bare, model = build(), build()
    expected, optimizer = adam(bare), adam(model)
    train(bare, expected, 1)
    train(model, optimizer, 1)  # so that there is state to keep
    if built == "before":
        prepared, optimizer = torchrig.prepare(model, optimizer, **way.settings())
    else:
        kept, named = optimizer.state_dict(), get_optimizer_state_dict(model, optimizer)
        prepared = torchrig.prepare(model, **way.settings())
        optimizer = adam(prepared)
        if way.strategy == "fsdp2":  # the optimizer alone cannot cut a state that is whole
            set_optimizer_state_dict(prepared, optimizer, named, options=StateDictOptions(full_state_dict=True))
        else:
            optimizer.load_state_dict(kept)
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert owned == {id(parameter) for parameter in prepared.parameters()}
    assert train(prepared, optimizer, 2) == pytest.approx(train(bare, expected, 2), rel=TOLERANCE[way.backend], abs=0)


@every_way
def test_law_4_losses_gradients_and_buffers_are_eagers(way: Way, build: Callable[[], Model]) -> None:
    bare, model = build(), build()
    prepared, optimizer = torchrig.prepare(model, adam(model), **way.settings())
    assert train(prepared, optimizer) == pytest.approx(train(bare, adam(bare)), rel=TOLERANCE[way.backend], abs=0)
    tokens, targets = batches(1)[0]
    for module in (bare, prepared):
        torch.manual_seed(3)
        nn.functional.cross_entropy(module(tokens), targets).backward()
    tolerance = {"rtol": TOLERANCE[way.backend], "atol": TOLERANCE[way.backend]}
    for (name, one), other in zip(bare.named_parameters(), prepared.parameters(), strict=True):
        message = lambda text, name=name: f"{name}: {text}"  # noqa: E731
        torch.testing.assert_close(dtensors.whole(other.grad), one.grad, **tolerance, msg=message)
    torch.testing.assert_close(whole(prepared.state_dict()), whole(bare.state_dict()), **tolerance)


@every_way
def test_law_5_hooks_fire_as_often_as_in_eager(way: Way, build: Callable[[], Model]) -> None:
    def count(model: nn.Module, late: bool) -> list[str]:
        fired: list[str] = []
        core = torchrig.unwrap(model)
        places = {"root": core, "block": core.layers[3], "child": core.layers[3].up}
        for name, module in places.items():
            module = torchrig.unwrap(module)
            module.register_forward_pre_hook(lambda *_, name=name: fired.append(f"{name} pre {late}"))
            module.register_forward_hook(lambda *_, name=name: fired.append(f"{name} forward {late}"))
            if name != "root":  # its input is integers: PyTorch warns that such a hook has no gradient to show
                module.register_full_backward_hook(lambda *_, name=name: fired.append(f"{name} backward {late}"))
        return fired

    def run(model: nn.Module, prepare: Callable[[nn.Module], nn.Module]) -> list[str]:
        early = count(model, late=False)
        prepared = prepare(model)
        optimizer = adam(model)
        train(prepared, optimizer, 1)
        late = count(prepared, late=True)
        train(prepared, optimizer, 2)
        return sorted(early) + sorted(late)

    settings = {**way.settings(), "fullgraph": False, "on_problem": "ignore"}
    expected = run(build(), lambda model: model)
    assert run(build(), lambda model: torchrig.prepare(model, **settings)) == expected


@every_way
def test_law_6_each_kind_compiles_once_a_mode(way: Way, build: Callable[[], Model]) -> None:
    model = build()
    prepared = torchrig.prepare(model, **way.settings())
    optimizer = adam(prepared)
    train(prepared, optimizer, 2)
    prepared.eval()
    with torch.no_grad():
        prepared(batches(1)[0][0])
    prepared.train()
    train(prepared, optimizer, 2)
    report = torchrig.report(prepared)
    if way.backend == "no":
        assert report.graphs == 0 and not report.kinds
        return
    (kind,) = report.kinds
    assert kind.modes == {"train": 1, "eval, no_grad": 1}
    assert (report.graphs, report.recompiles, report.breaks, report.ok) == (2, 0, 0, True)
    assert kind.instances == (1 if way.regions == "whole" else BLOCKS)
    assert kind.calls == 5 * kind.instances


@every_way
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_law_7_a_copy_runs_its_own_weights(way: Way, how: str, build: Callable[[], Model]) -> None:
    prepared = torchrig.prepare(build(), **way.settings())
    prepared.eval()
    tokens = batches(1)[0][0]
    with torch.no_grad():
        expected = prepared(tokens)
        copied = _copy(prepared, how)
        for parameter in copied.parameters():
            parameter.zero_()
        assert torch.equal(prepared(tokens), expected)
        assert not copied(tokens).any(), "the copy computes with the original's weights"
        before = torchrig.report(prepared).graphs
        copied(tokens)
    if how == "deepcopy" and way.backend != "no":
        assert torchrig.has_compiled_regions(copied)
        assert torchrig.report(copied).graphs == before
    assert torchrig.unwrap(copied, keep_compile=False)(tokens).shape == expected.shape


def _copy(model: nn.Module, how: str) -> nn.Module:
    if how == "deepcopy":
        return copy.deepcopy(model)
    if how == "pickle":
        return pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@every_way
def test_law_8_global_configuration_is_as_before(way: Way, build: Callable[[], Model]) -> None:
    import torch._dynamo
    import torch._functorch.config
    import torch._inductor.config

    def configuration() -> dict[str, object]:
        parts = (
            torch._dynamo.config,
            torch._inductor.config,
            torch._functorch.config,
            torch.fx.experimental._config,
        )
        return {part.__name__: copy.deepcopy(part.get_config_copy()) for part in parts}

    before = configuration()
    prepared = torchrig.prepare(build(), **way.settings())
    assert configuration() == before
    train(prepared, adam(prepared), 1)
    assert configuration() == before
    torchrig.unwrap(prepared, keep_compile=False)
    assert configuration() == before


@every_way
def test_law_9_a_prepare_that_raises_leaves_all_as_it_was(
    way: Way, build: Callable[[], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    optimizer = adam(model)
    loader = torch.utils.data.DataLoader(range(4))
    before = {name: (id(module), sorted(vars(module))) for name, module in model.named_modules()}
    owned = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    monkeypatch.setattr("torchrig.loaders.place", _raise)  # the last step there is
    with pytest.raises(ZeroDivisionError):
        torchrig.prepare(model, optimizer, loader, **way.settings())
    assert {name: (id(module), sorted(vars(module))) for name, module in model.named_modules()} == before
    assert [id(parameter) for group in optimizer.param_groups for parameter in group["params"]] == owned
    with pytest.raises(torchrig.TorchrigError, match="not prepared"):
        torchrig.report(model)


def _raise(*_: object) -> None:
    raise ZeroDivisionError
