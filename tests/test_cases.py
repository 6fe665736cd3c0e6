"""Real troubles that people had, each told as a small input; the numbers are those of the collected cases."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import io
import pickle
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import torchrig


class Block(nn.Module):
    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """Blocks of any class behind a trainable input layer."""

    def __init__(self, blocks: int = 6, block: Callable[[int], nn.Module] = Block) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(block(index) for index in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(0))


def step(model: nn.Module, x: torch.Tensor) -> float:
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return loss.item()


def prepare(model: nn.Module, **settings: object) -> nn.Module:
    return torchrig.prepare(model, **{"backend": "aot_eager", **settings})


regionwise = pytest.mark.parametrize("regions", ["auto", "whole"])


@regionwise
def test_case_1_a_checkpoint_of_a_compiled_model_loads_in_the_bare_one(regions: str, x: torch.Tensor) -> None:
    model = prepare(Stack(2), regions=regions)
    step(model, x)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    bare = Stack(2)
    bare.load_state_dict(torch.load(file), strict=True)
    assert torch.equal(bare(x), model(x))


@regionwise
@pytest.mark.parametrize("placement", ["forward", "inplace"])  # PyTorch insists on _orig_mod in a wrapper's keys
def test_case_3_distributed_state_dicts_have_clean_keys_both_times(
    regions: str, placement: str, x: torch.Tensor
) -> None:
    model = prepare(Stack(2), regions=regions, placement=placement)
    step(model, x)
    before = get_model_state_dict(model)
    set_model_state_dict(model, get_model_state_dict(Stack(2)))
    assert list(before) == list(get_model_state_dict(model)) == list(Stack(2).state_dict())


@pytest.mark.parametrize("placement", ["forward", "inplace"])
@pytest.mark.parametrize("order", ["checkpoint then compile", "compile then checkpoint"])
def test_case_4_activation_checkpointing_and_compile_keep_the_keys(order: str, placement: str, x: torch.Tensor) -> None:
    model = Stack(3)
    if order == "checkpoint then compile":
        model.layers = nn.ModuleList(checkpoint_wrapper(each) for each in model.layers)
    prepare(model, placement=placement)
    if order == "compile then checkpoint":
        model.layers = nn.ModuleList(checkpoint_wrapper(each) for each in model.layers)
    loss = step(model, x)
    assert list(get_model_state_dict(model)) == list(Stack(3).state_dict())
    bare = Stack(3)
    bare.load_state_dict(get_model_state_dict(model), strict=True)
    assert step(bare, x) == loss
    assert torchrig.report(model).ok


class Generator(Stack):
    def generate(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        for _ in range(steps):
            x = self(x)
        return x

    def inverse(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x


@regionwise
def test_case_5_other_methods_run_the_compiled_regions(regions: str, x: torch.Tensor) -> None:
    model = prepare(Generator(4), regions=regions)
    torch.testing.assert_close(
        model.generate(x, 3), torchrig.unwrap(copy.deepcopy(model), keep_compile=False).generate(x, 3)
    )
    calls = torchrig.report(model).kinds[0].calls
    assert calls == 3 * (4 if regions == "auto" else 1)
    model.inverse(x)
    assert torchrig.report(model).kinds[0].calls == calls + (4 if regions == "auto" else 0)


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.named = nn.ModuleDict({"a": Block(), "b": Block()})
        self.listed = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.named:
            x = self.named[name](x)
        for each in self.listed[:1]:
            x = each(x)
        return self.listed[-1](x) + len(self.named) + ("a" in self.named)


@regionwise
@pytest.mark.parametrize("placement", ["forward", "inplace", "wrap"])
def test_case_6_containers_keep_their_protocol(regions: str, placement: str, x: torch.Tensor) -> None:
    bare = Containers()
    expected = bare(x)
    model = prepare(bare, regions=regions, placement=placement)
    torch.testing.assert_close(model(x), expected)
    assert list(model.named) == ["a", "b"] and len(model.listed) == 2
    assert model.named["a"] is next(iter(model.named.values()))


@regionwise
def test_case_7_type_name_and_signature_are_the_models_own(regions: str, x: torch.Tensor) -> None:
    model = Stack(3)
    signature = inspect.signature(model.forward)
    prepared = prepare(model, regions=regions)
    step(prepared, x)
    for module, cls in ((prepared, Stack), (prepared.layers[0], Block)):
        assert isinstance(module, cls) and type(module) is cls and type(module).__name__ == cls.__name__
    assert inspect.signature(prepared.forward) == signature
    assert inspect.signature(prepared.layers[0].forward) == inspect.signature(Block().forward)


def test_case_8_forward_hooks_put_on_after_the_first_step_fire(x: torch.Tensor) -> None:
    model = prepare(Stack(4))
    step(model, x)
    fired: list[str] = []
    model.layers[1].register_forward_hook(lambda *_: fired.append("block"))
    model.layers[2].up.register_forward_hook(lambda module, args, output: fired.append("child") or output * 0)
    got = model(x)
    assert sorted(fired) == ["block", "child"]
    bare = torchrig.unwrap(model, keep_compile=False)
    torch.testing.assert_close(got, bare(x))


def test_case_9_backward_hooks_put_on_after_the_first_step_change_gradients_as_in_eager(x: torch.Tensor) -> None:
    def hooked(model: Stack) -> dict[str, torch.Tensor]:
        step(model, x)
        model.layers[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,))
        model.layers[2].up.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 3,))
        step(model, x)
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    bare = Stack(4)
    model = prepare(copy.deepcopy(bare), on_problem="ignore")
    torch.testing.assert_close(hooked(model), hooked(bare))


@pytest.mark.parametrize("placement", ["auto", "forward", "inplace", "wrap"])
@pytest.mark.parametrize(
    "block",
    [
        lambda _: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        lambda _: nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
    ],
    ids=["TransformerEncoderLayer", "Sequential"],
)
def test_case_11_blocks_of_torch_nn_are_compiled_or_reported(
    block: Callable[[int], nn.Module], placement: str, x: torch.Tensor
) -> None:
    model = Stack(4, block)
    expected = model(x.unsqueeze(0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepare(model, placement=placement)
        torch.testing.assert_close(model(x.unsqueeze(0)), expected)
    report = torchrig.report(model)
    told = [str(each.message) for each in caught if issubclass(each.category, torchrig.CompileProblemWarning)]
    if placement in ("auto", "forward"):
        assert report.graphs == 1 and report.ok and not told
    assert report.ok or (len(told) == 1 and told[0].startswith("RegionNotCompiled"))


@regionwise
@pytest.mark.parametrize("placement", ["forward", "inplace", "wrap"])
def test_case_12_train_and_eval_agree_everywhere(regions: str, placement: str, x: torch.Tensor) -> None:
    model = Stack(3, lambda _: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)))
    prepared = prepare(model, regions=regions, placement=placement, on_problem="ignore")
    for mode in (False, True, False, True):
        assert prepared.train(mode) is prepared
        prepared(x)
        flags = {each.training for each in (*prepared.modules(), *model.modules())}
        assert flags == {mode}
    assert torchrig.report(prepared).graphs <= 2


class ReadsInt(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (self.index + 1)


class ComparesInt(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.index == 0 else super().forward(x) * 0.5


class ReadsString(Block):
    table = {f"layer{index}": float(index) for index in range(12)}

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.key = f"layer{index}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.table[self.key]


@pytest.mark.parametrize("block", [ReadsInt, ComparesInt])
def test_case_13_a_layers_own_number_costs_two_graphs_at_most(block: type[Block], x: torch.Tensor) -> None:
    model = Stack(12, block)
    expected = model(x)
    prepared = prepare(model)
    torch.testing.assert_close(prepared(x), expected)
    report = torchrig.report(prepared)
    assert report.graphs <= 2 and report.ok


def test_case_13_a_layers_own_string_is_reported_before_the_limit_and_at_it(x: torch.Tensor) -> None:
    model = Stack(12, ReadsString)
    expected = model(x)
    prepared = prepare(model)
    with pytest.warns(torchrig.CompileProblemWarning) as caught:
        torch.testing.assert_close(prepared(x), expected)
    early, late = (str(each.message) for each in caught)
    assert "was recompiled 4 times" in early and "key ==" in early and "limit of 8" in early
    assert "RecompileLimitReached" in late and "ReadsString" in late and "key ==" in late
    report = torchrig.report(prepared)
    assert not report.ok and "recompile limit" in report["ReadsString"].fallbacks[0]
    assert all("key ==" in each.guard for each in report["ReadsString"].recompiles)


def test_case_13_the_limit_raises_where_the_settings_say_so(x: torch.Tensor) -> None:
    prepared = prepare(Stack(12, ReadsString), on_problem={"recompile_limit": "raise"})
    with (
        pytest.warns(torchrig.CompileProblemWarning),
        pytest.raises(torchrig.RecompileLimitReached, match="ReadsString"),
    ):
        prepared(x)


def test_case_18_a_frozen_embedding_costs_one_more_graph_at_most_and_the_report_says_why(x: torch.Tensor) -> None:
    model = Stack(6)
    model.first.requires_grad_(False)
    prepared = prepare(model)
    step(prepared, x)
    report = torchrig.report(prepared)
    assert report.graphs <= 2 and report.ok
    assert all("requires_grad" in each.guard and "frozen" in each.hint for each in report["Block"].recompiles)


def test_case_24_an_average_of_weights_by_name_and_by_copy(x: torch.Tensor) -> None:
    prepared = prepare(Stack(3))
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.5)
    average = torch.optim.swa_utils.AveragedModel(prepared)
    shadow = {name: value.clone() for name, value in prepared.named_parameters()}
    step(prepared, x)
    optimizer.step()
    average.update_parameters(prepared)
    step(prepared, x)
    optimizer.step()
    average.update_parameters(prepared)
    for name, value in prepared.named_parameters():
        assert not torch.equal(value, shadow[name])
        assert not torch.equal(value, dict(average.module.named_parameters())[name])
    assert not torch.equal(average(x), prepared(x))
    assert torchrig.has_compiled_regions(average.module)


def undecorated(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def wrapper(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return function(self, x)

    return wrapper


def fast(self: Block, x: torch.Tensor) -> torch.Tensor:
    return x + 1


class Decorated(Block):
    forward = undecorated(Block.forward)


class Assigned(Block):
    forward = fast

    def fast(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0


class Partial(Block):
    def scaled(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        return Block.forward(self, x) * factor

    forward = functools.partialmethod(scaled, factor=0.5)


class Static(Block):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.mark.parametrize("block", [Decorated, Assigned, Partial, Static])
def test_case_24_a_forward_of_any_make_survives_pickling(block: type[Block], x: torch.Tensor) -> None:
    model = Stack(3, block)
    expected = model(x)
    prepared = prepare(model, on_problem="ignore")
    torch.testing.assert_close(prepared(x), expected)
    torch.testing.assert_close(pickle.loads(pickle.dumps(prepared))(x), expected)
    torch.testing.assert_close(copy.deepcopy(prepared)(x), expected)


def test_a_forward_that_is_no_plain_method_is_refused_for_placement_forward() -> None:
    with pytest.raises(torchrig.RegionError, match="Static is no plain method"):
        prepare(Stack(3, Static), placement="forward", regions=["Static"])


class Copies(Block):
    copies = 0

    def __deepcopy__(self, memo: dict[int, object]) -> Copies:
        type(self).copies += 1
        made = Copies()
        made.load_state_dict(self.state_dict())
        return made


def test_case_24_a_deepcopy_of_the_users_own_stays(x: torch.Tensor) -> None:
    prepared = prepare(Stack(3, Copies), placement="inplace")
    before = Copies.copies
    torch.testing.assert_close(copy.deepcopy(prepared)(x), prepared(x))
    assert Copies.copies == before + 3


@pytest.mark.parametrize("where", ["root", "blocks"])
@pytest.mark.parametrize("spelling", ["closure", "method"])
@regionwise
def test_case_27_an_instances_own_forward_runs_the_compiled_regions(
    where: str, spelling: str, regions: str, x: torch.Tensor
) -> None:
    def own(module: nn.Module) -> None:
        original = module.forward

        @functools.wraps(original)
        def closure(*args: object) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return original(*args).float()

        def method(self: nn.Module, *args: object) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return type(self).forward(self, *args).float()

        module.forward = closure if spelling == "closure" else method.__get__(module)

    model = Stack(4)
    for module in [model] if where == "root" else model.layers:
        own(module)
    expected = model(x)
    prepared = prepare(model, regions=regions)
    torch.testing.assert_close(prepared(x), expected)
    report = torchrig.report(prepared)
    assert report.ok and report.kinds[0].calls == report.kinds[0].instances
    assert torchrig.unwrap(prepared, keep_compile=False) is model
    torch.testing.assert_close(model(x), expected)
    assert "forward" in vars(model if where == "root" else model.layers[0])


def test_case_28_unwrap_where_only_one_submodule_is_compiled(x: torch.Tensor) -> None:
    model = Stack(3)
    inner = model.layers[1]
    model.layers[1] = torch.compile(inner, backend="eager")
    assert torchrig.unwrap(model) is model and model.layers[1] is not inner
    assert torchrig.unwrap(model, keep_compile=False) is model and model.layers[1] is inner


@pytest.fixture
def one_process(tmp_path: object) -> object:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_case_28_unwrap_compile_in_ddp_in_compile(one_process: None, x: torch.Tensor) -> None:
    model = Stack(3)
    nested = torch.compile(nn.parallel.DistributedDataParallel(torch.compile(model, backend="eager")), backend="eager")
    assert torchrig.unwrap(nested) is model
    assert torchrig.unwrap(nested, keep_compile=False) is model


def test_case_32_the_result_dropped_the_model_is_prepared_all_the_same(x: torch.Tensor) -> None:
    model = Stack(3)
    prepare(model)
    step(model, x)
    assert torchrig.report(model).graphs == 1 and torchrig.report(model).ok


def test_case_32_a_wrapper_dropped_is_told_at_the_first_forward(x: torch.Tensor) -> None:
    model = Stack(3)
    prepare(model, regions="whole", placement="wrap")
    with pytest.warns(torchrig.TorchrigWarning, match=r"what prepare gave back was dropped.*model = torchrig.prepare"):
        model(x)
    model(x)
    kept = prepare(model, regions="whole", placement="wrap")
    kept(x)
    del kept
    model(x)


@pytest.mark.parametrize(
    ("settings", "naming"),
    [
        ({"backend": "inductor", "mode": "default", "options": {"shape_padding": True}}, ["mode", "options"]),
        ({"backend": "eager", "mode": "max-autotune"}, ["eager", "mode", "max-autotune"]),
        ({"backend": "inductor", "mode": "max-autotun"}, ["max-autotun", "'max-autotune'", "reduce-overhead"]),
        ({"backend": "inductor", "options": {"shape_paddin": True}}, ["shape_paddin", "'shape_padding'"]),
        ({"backend": "inductor", "options": {"shape_padding": "yes"}}, ["shape_padding", "bool"]),
        ({"backend": "inducto"}, ["inducto", "'inductor'"]),
        ({"backend": "aot_eager", "regions": "repeatd"}, ["repeatd", "'repeated'"]),
        ({"backend": "aot_eager", "placemnt": "wrap"}, ["placemnt", "'placement'"]),
    ],
)
def test_case_33_a_bad_setting_is_named_with_the_valid_ones_before_anything_is_touched(
    settings: dict[str, object], naming: list[str]
) -> None:
    model = Stack(2)
    with pytest.raises(torchrig.SettingsError) as caught:
        torchrig.prepare(model, **settings)
    for part in [*naming, "argument"]:
        assert part in str(caught.value)
    assert not torchrig.has_compiled_regions(model)


@regionwise
@pytest.mark.parametrize("placement", ["forward", "inplace"])  # PyTorch insists on _orig_mod in a wrapper's keys
def test_case_36_a_prepared_model_is_freed(regions: str, placement: str, x: torch.Tensor) -> None:
    model = prepare(Stack(3), regions=regions, placement=placement)
    step(model, x)
    torchrig.report(model)
    watched = [weakref.ref(torchrig.unwrap(model)), weakref.ref(model.first.weight)]
    del model
    gc.collect()
    assert [each() for each in watched] == [None, None]


class Lazy(Block):
    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.up = nn.LazyLinear(16)


def test_a_lazy_module_is_refused_until_it_has_shapes(x: torch.Tensor) -> None:
    model = Stack(3, Lazy)
    with pytest.raises(torchrig.ArgumentError, match=r"'layers.0.up.weight' has no shape yet.*one batch"):
        prepare(model)
    expected = model(x)
    torch.testing.assert_close(prepare(model)(x), expected)


def test_parts_prepared_and_unwrapped_leave_nothing_behind(x: torch.Tensor) -> None:
    model = nn.Sequential(Stack(2), Stack(2))
    prepare(model[0])
    torchrig.unwrap(model[0], keep_compile=False)
    assert not model[0]._forward_hooks
    prepare(model[1], regions="whole")
    prepare(model, regions="whole", fullgraph=True)(x)
    assert torchrig.report(model).ok


class Awkward(nn.Module):
    """Attributes named as wrappers name theirs, and access of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._orig_mod = nn.Linear(8, 8)
        self.module = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.dynamo = "mine"

    def __getattr__(self, name: str) -> object:
        return f"no {name}" if name.startswith("odd") else super().__getattr__(name)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "forward" and not callable(value):
            raise AttributeError(name)
        super().__setattr__(name, value)

    def __eq__(self, other: object) -> bool:
        raise TypeError("not comparable")

    __hash__ = object.__hash__

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.module(self._orig_mod(x))
        for layer in self.layers:
            x = layer(x)
        return x


def test_case_54_a_model_with_awkward_names_is_unharmed(x: torch.Tensor) -> None:
    model = Awkward()
    expected, keys = model(x), list(model.state_dict())
    prepared = prepare(model)
    assert prepared is model and torchrig.unwrap(prepared) is model
    torch.testing.assert_close(prepared(x), expected)
    assert list(model.state_dict()) == keys and model.oddly == "no oddly" and model.dynamo == "mine"
    assert torchrig.report(model).graphs == 1
    assert torchrig.unwrap(model, keep_compile=False) is model and isinstance(model._orig_mod, nn.Linear)


def test_case_54_a_forward_patched_later_is_the_one_that_runs(x: torch.Tensor) -> None:
    model = prepare(Stack(3))
    model(x)
    model.forward = lambda x: x * 0
    assert not model(x).any()
    model.layers[1].forward = lambda x: x * 0
    del model.forward
    model(x)
    with pytest.warns(torchrig.TorchrigWarning, match=r"forward of 'layers.1' was replaced after prepare"):
        assert torchrig.unwrap(model, keep_compile=False) is model
    assert not torchrig.has_compiled_regions(model)
