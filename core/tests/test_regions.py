"""Which regions are found in which shape of model (case 41 and its relatives, case 40)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from torchrig import Region, RegionError
from torchrig.regions import find_regions, resolve


class Runs(nn.Module):
    """Has a forward of its own, as a user's module has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Attention(Runs):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)


class MLP(Runs):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)


class RMSNorm(Runs):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


class Block(Runs):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm1 = RMSNorm(width)
        self.attention = Attention(width)
        self.norm2 = RMSNorm(width)
        self.mlp = MLP(width)


class SubBlock(Block):
    pass


class OtherBlock(Runs):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.mix = nn.Conv1d(width, width, 1)
        self.mlp = MLP(width)


class LeafBlock(Runs):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))


class MoEBlock(Runs):
    """Holds its experts in the way that asks for trouble: in a list of its own."""

    def __init__(self, experts: int = 8) -> None:
        super().__init__()
        self.attention = Attention()
        self.router = nn.Linear(4, experts)
        self.experts = nn.ModuleList(MLP() for _ in range(experts))


class Layer(Runs):
    """Dense or MoE, in one class, as DeepSeek has them."""

    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.attention = Attention()
        self.mlp: nn.Module = Experts(experts) if experts else MLP()


class Experts(Runs):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(4, experts)
        self.experts = nn.ModuleList(MLP() for _ in range(experts))


class ConvLayer(Runs):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3)
        self.norm = nn.BatchNorm2d(width)


class ResBlock(Runs):
    """Holds a row of layers, and the first of a stage holds a shortcut that the others lack."""

    def __init__(self, width: int, shortcut: bool) -> None:
        super().__init__()
        self.shortcut = nn.Conv2d(width, width, 1) if shortcut else nn.Identity()
        self.layer = nn.Sequential(ConvLayer(width), ConvLayer(width))


class Stage(Runs):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.downsample = nn.Conv2d(width, width, 2)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))


class Stack(Runs):
    def __init__(self, depth: int = 3, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(depth))
        self.norm = RMSNorm()


class Numbered(Runs):
    """A container class of the user's own."""

    def __init__(self, make: Callable[[], nn.Module], pattern: str = "layer{}", count: int = 3) -> None:
        super().__init__()
        for number in range(count):
            self.add_module(pattern.format(number), make())


class Holder(Runs):
    """Holds what it is given, beside an embedding and a head."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 4)
        for name, part in parts.items():
            self.add_module(name, part)
        self.head = nn.Linear(4, 100)


def linear_relu() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)


def blocks(count: int = 3, make: Callable[[], nn.Module] = Block) -> nn.ModuleList:
    return nn.ModuleList(make() for _ in range(count))


def shared(places: int = 12) -> nn.Module:
    block = Block()
    return Holder(layers=nn.ModuleList([block] * places))


def shared_rotary() -> nn.Module:
    """Every block holds one and the same module, which only the first one owns by name."""
    model = Holder(layers=blocks(3))
    rotary = Attention()
    for layer in model.layers:
        layer.rotary = rotary
    return model


def cycle() -> nn.Module:
    model = Holder(layers=blocks(2))
    for layer in model.layers:
        vars(layer)["_modules"]["owner"] = model
    return model


class Hinted(Holder):
    _no_split_modules = ["Embedding", "Block", "NotThere"]  # as transformers writes it


class HintsStages(Holder):
    _no_split_modules = frozenset({"Stage"})


class HintsBoth(Holder):
    _no_split_modules = ("Stage", "Block")


class HintsNothing(Holder):
    _no_split_modules = None


class Authored(Holder):
    _repeated_blocks = ["Block"]  # as diffusers writes it


class HintedTower(Stack):
    _no_split_modules = ["Block"]


def names(pattern: str, count: int = 3) -> list[str]:
    return [pattern.format(number) for number in range(count)]


L3 = names("layers.{}")
SHAPES: dict[str, tuple[Callable[[], nn.Module], dict[str, list[str]]]] = {
    # Containers (case 41)
    "ModuleList": (lambda: Holder(layers=blocks()), {"Block": L3}),
    "Sequential": (lambda: Holder(layers=nn.Sequential(*blocks())), {"Block": L3}),
    "root Sequential": (lambda: nn.Sequential(*blocks()), {"Block": ["0", "1", "2"]}),
    "Sequential with stem and head": (
        lambda: nn.Sequential(nn.Embedding(9, 4), *blocks(), nn.Linear(4, 9)),
        {"Block": ["1", "2", "3"]},
    ),
    "root ModuleList": (blocks, {"Block": ["0", "1", "2"]}),
    "ModuleDict": (
        lambda: Holder(layers=nn.ModuleDict({"first": Block(), "second": Block()})),
        {"Block": ["layers.first", "layers.second"]},
    ),
    "ModuleDict of roles": (
        lambda: Holder(parts=nn.ModuleDict({"wte": nn.Embedding(9, 4), "h": blocks(), "ln_f": RMSNorm()})),
        {"Block": names("parts.h.{}")},
    ),
    "numbered attributes": (lambda: Holder(body=Numbered(Block)), {"Block": names("body.layer{}")}),
    "numbered with an underscore": (lambda: Numbered(Block, "h_{}"), {"Block": names("h_{}")}),
    "numbered only": (lambda: Numbered(Block, "{}"), {"Block": names("{}")}),
    "numbered beside others": (
        lambda: Holder(block0=Block(), block1=Block(), pool=MLP()),
        {"Block": ["block0", "block1"]},
    ),
    "leaf blocks in a container class": (lambda: Holder(b=Numbered(LeafBlock)), {"LeafBlock": names("b.layer{}")}),
    "two attributes": (
        lambda: Holder(enc_attn=Attention(), dec_attn=Attention()),
        {"Attention": ["enc_attn", "dec_attn"]},
    ),
    # Mixed stacks
    "A B A B": (
        lambda: Holder(layers=nn.ModuleList([Block(), OtherBlock(), Block(), OtherBlock()])),
        {"Block": ["layers.0", "layers.2"], "OtherBlock": ["layers.1", "layers.3"]},
    ),
    "A B A B in a Sequential": (
        lambda: nn.Sequential(Block(), OtherBlock(), Block(), OtherBlock()),
        {"Block": ["0", "2"], "OtherBlock": ["1", "3"]},
    ),
    "one of another class in the stack": (
        lambda: Holder(layers=nn.ModuleList([OtherBlock(), Block(), Block()])),
        {"OtherBlock": ["layers.0"], "Block": ["layers.1", "layers.2"]},
    ),
    "subclass mix": (
        lambda: Holder(layers=nn.ModuleList([SubBlock(), Block()])),
        {"SubBlock": ["layers.0"], "Block": ["layers.1"]},
    ),
    "dense and MoE in one class": (
        lambda: Holder(layers=nn.ModuleList([Layer(), Layer(4), Layer(4)])),
        {"Layer": L3},
    ),
    "dense and MoE in two classes": (
        lambda: Holder(layers=nn.ModuleList([Block(), MoEBlock(), MoEBlock()])),
        {"Block": ["layers.0"], "MoEBlock": ["layers.1", "layers.2"]},
    ),
    # The right level (case 40)
    "MoE": (lambda: Holder(layers=blocks(3, MoEBlock)), {"MoEBlock": L3}),
    "one MoE block in a list": (lambda: Holder(layers=blocks(1, MoEBlock)), {"Holder": [""]}),
    "one dense and one MoE layer": (lambda: Holder(layers=nn.ModuleList([Layer(), Layer(4)])), {"Holder": [""]}),
    "nested lists": (
        lambda: Holder(groups=nn.ModuleList([blocks(2), blocks(2)])),
        {"Block": ["groups.0.0", "groups.0.1", "groups.1.0", "groups.1.1"]},
    ),
    "Sequential of Sequentials": (
        lambda: nn.Sequential(nn.Sequential(*blocks(2)), nn.Sequential(*blocks(2))),
        {"Block": ["0.0", "0.1", "1.0", "1.1"]},
    ),
    "stages of different width": (
        lambda: Holder(stages=nn.ModuleList([Stage(4, 2), Stage(8, 2)])),
        {"Block": ["stages.0.blocks.0", "stages.0.blocks.1", "stages.1.blocks.0", "stages.1.blocks.1"]},
    ),
    "stages of different depth": (
        lambda: Holder(stages=nn.ModuleList([Stage(4, 1), Stage(4, 1), Stage(4, 2)])),
        {"Block": ["stages.0.blocks.0", "stages.1.blocks.0", "stages.2.blocks.0", "stages.2.blocks.1"]},
    ),
    "stages as numbered Sequentials": (
        lambda: Holder(layer1=nn.Sequential(Block(4), Block(4)), layer2=nn.Sequential(Block(8), Block(8))),
        {"Block": ["layer1.0", "layer1.1", "layer2.0", "layer2.1"]},
    ),
    "blocks of rows of layers": (
        lambda: Holder(
            stages=nn.ModuleList(nn.Sequential(*[ResBlock(w, n == 0) for n in range(d)]) for w, d in [(4, 3), (8, 2)])
        ),
        {"ResBlock": ["stages.0.0", "stages.0.1", "stages.0.2", "stages.1.0", "stages.1.1"]},
    ),
    "one stage in a list": (
        lambda: Holder(stages=nn.ModuleList([Stage(4, 2)])),
        {"Block": ["stages.0.blocks.0", "stages.0.blocks.1"]},
    ),
    "a single block of attributes": (
        lambda: Holder(norm1=RMSNorm(), attn1=Attention(), norm2=RMSNorm(), attn2=Attention(), mlp=MLP(16)),
        {"Holder": [""]},
    ),
    "encoder and decoder of one class": (
        lambda: Holder(encoder=Stack(2), decoder=Stack(2)),
        {"Block": ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"]},
    ),
    "encoder and decoder of two kinds": (
        lambda: Holder(encoder=Stack(2), decoder=Stack(2, OtherBlock)),
        {
            "Block": ["encoder.layers.0", "encoder.layers.1"],
            "OtherBlock": ["decoder.layers.0", "decoder.layers.1"],
        },
    ),
    "the same class alone elsewhere": (
        lambda: Holder(layers=blocks(2), extra=Block()),
        {"Block": ["layers.0", "layers.1", "extra"]},
    ),
    # Sharing
    "one block in 12 places": (shared, {"Block": ["layers.0"]}),
    "a module that all blocks share": (shared_rotary, {"Block": L3}),
    "a cycle": (cycle, {"Block": ["layers.0", "layers.1"]}),
    # torch.nn's own blocks (case 11)
    "Sequential(Linear, ReLU)": (lambda: Holder(layers=blocks(3, linear_relu)), {"Sequential": L3}),
    "TransformerEncoderLayer": (lambda: Holder(layers=blocks(3, encoder_layer)), {"TransformerEncoderLayer": L3}),
    "TransformerEncoder": (
        lambda: nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False),
        {"TransformerEncoderLayer": ["layers.0", "layers.1"]},
    ),
    "Transformer": (
        lambda: nn.Transformer(4, 2, 2, 2, 8, batch_first=True),
        {
            "TransformerEncoderLayer": ["encoder.layers.0", "encoder.layers.1"],
            "TransformerDecoderLayer": ["decoder.layers.0", "decoder.layers.1"],
        },
    ),
    # Nothing that is worth it: the whole model
    "no children": (lambda: nn.Linear(2, 2), {"Linear": [""]}),
    "one block in a list": (lambda: Holder(layers=blocks(1)), {"Holder": [""]}),
    "one block by itself": (Block, {"Block": [""]}),
    "empty list": (lambda: Holder(layers=nn.ModuleList()), {"Holder": [""]}),
    "Sequential MLP": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU()),
        {"Sequential": [""]},
    ),
    "list of Linear": (lambda: Holder(heads=blocks(3, lambda: nn.Linear(4, 4))), {"Holder": [""]}),
    "list of Embedding": (lambda: Holder(tables=blocks(3, lambda: nn.Embedding(4, 4))), {"Holder": [""]}),
    "list of Dropout": (lambda: Holder(drops=blocks(3, nn.Dropout)), {"Holder": [""]}),
    "list of ParameterLists": (
        lambda: Holder(tables=blocks(2, lambda: nn.ParameterList([torch.ones(2)]))),
        {"Holder": [""]},
    ),
    "blocks that all differ in width": (
        lambda: Holder(layers=nn.ModuleList([Block(4), Block(8), Block(16)])),
        {"Holder": [""]},
    ),
    # An empty list and a mixed dict beside the blocks
    "empty containers beside": (
        lambda: Holder(none=nn.ModuleList(), mixed=nn.ModuleDict({"a": nn.Linear(2, 2)}), layers=blocks()),
        {"Block": L3},
    ),
    # Hints
    "hint beside structure": (
        lambda: Hinted(layers=blocks(2), others=blocks(2, OtherBlock)),
        {"Block": ["layers.0", "layers.1"], "OtherBlock": ["others.0", "others.1"]},
    ),
    "hint of what occurs once": (lambda: Hinted(layers=blocks(1)), {"Hinted": [""]}),
    "hint of blocks that all differ": (
        lambda: Hinted(layers=nn.ModuleList([Block(4), Block(8), Block(16)])),
        {"Block": L3},
    ),
    "hint of stages": (
        lambda: HintsStages(stages=nn.ModuleList([Stage(4, 2), Stage(8, 1)])),
        {"Block": ["stages.0.blocks.0", "stages.0.blocks.1", "stages.1.blocks.0"]},
    ),
    "hint of stages and blocks": (
        lambda: HintsBoth(stages=nn.ModuleList([Stage(4, 2), Stage(8, 1)])),
        {"Block": ["stages.0.blocks.0", "stages.0.blocks.1", "stages.1.blocks.0"]},
    ),
    "hint is None": (lambda: HintsNothing(layers=blocks()), {"Block": L3}),
    "hint on a submodel": (
        lambda: Holder(tower=HintedTower(2)),
        {"Block": ["tower.layers.0", "tower.layers.1"]},
    ),
    "hints inside a list of alike models": (
        lambda: Holder(towers=blocks(2, lambda: HintedTower(2))),
        {"Block": ["towers.0.layers.0", "towers.0.layers.1", "towers.1.layers.0", "towers.1.layers.1"]},
    ),
    "_repeated_blocks alone": (
        lambda: Authored(layers=blocks(2), others=blocks(2, OtherBlock)),
        {"Block": ["layers.0", "layers.1"]},
    ),
}


def found(regions: tuple[Region, ...]) -> dict[str, list[str]]:
    return {region.kind: list(region.instances) for region in regions}


@pytest.mark.parametrize("shape", SHAPES)
def test_auto_finds_the_blocks(shape: str) -> None:
    build, expected = SHAPES[shape]
    model = build()
    regions = find_regions(model, "auto")
    assert found(regions) == expected
    for region in regions:
        assert region.reason
        assert all(isinstance(resolve(model, name), region.cls) for name in region.instances)


def test_whole() -> None:
    model = Holder(layers=blocks())
    (region,) = find_regions(model, "whole")
    assert (region.kind, region.cls, region.instances, region.whole) == ("Holder", Holder, ("",), True)


def test_repeated_is_auto_where_blocks_repeat() -> None:
    model = Holder(layers=blocks())
    assert find_regions(model, "repeated") == find_regions(model, "auto")


def test_repeated_without_any_says_what_was_looked_at() -> None:
    with pytest.raises(RegionError, match=r"no blocks repeat in Holder.*1 Block.*regions=\"whole\""):
        find_regions(Holder(layers=blocks(1)), "repeated")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (["Block"], {"Block": ["layers.0", "layers.1", "extra"]}),
        ([Block], {"Block": ["layers.0", "layers.1", "extra"]}),
        (Block, {"Block": ["layers.0", "layers.1", "extra"]}),
        ([f"{Block.__module__}.Block"], {"Block": ["layers.0", "layers.1", "extra"]}),
        (["layers.*"], {"Block": ["layers.0", "layers.1"]}),
        (["layers.?", "head"], {"Block": ["layers.0", "layers.1"], "Linear": ["head"]}),
        (["*.mlp"], {"MLP": ["layers.0.mlp", "layers.1.mlp", "extra.mlp"]}),
        (["MLP", "Block"], {"Block": ["layers.0", "layers.1", "extra"]}),
        (["Holder"], {"Holder": [""]}),
    ],
)
def test_a_list_selects(spec: list[str | type[nn.Module]], expected: dict[str, list[str]]) -> None:
    assert found(find_regions(Holder(layers=blocks(2), extra=Block()), spec)) == expected


def test_a_class_stands_for_its_subclasses() -> None:
    model = Holder(layers=nn.ModuleList([SubBlock(), Block()]))
    assert found(find_regions(model, ["Block"])) == {"SubBlock": ["layers.0"], "Block": ["layers.1"]}


def test_nested_items_leave_the_outermost_and_say_so() -> None:
    (region,) = find_regions(Holder(layers=blocks(2)), ["Block", "MLP"])
    assert "2 more asked for inside" in region.reason


def test_a_shared_module_is_selected_by_either_name() -> None:
    model = Holder(first=Block())
    model.add_module("second", model.first)
    assert found(find_regions(model, ["second"])) == {"Block": ["first"]}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (["Blok"], "'Blok'.*Nearest: Block"),
        (["layer.*"], r"'layer\.\*'"),
        ([Stage], "an instance of Stage"),
        ([int], "int is no nn.Module"),
        (["ModuleList"], r"ModuleList alone, which is never called.*'layers\.\*'"),
        ([], "empty list"),
    ],
)
def test_a_list_that_selects_nothing(spec: list[str | type], message: str) -> None:
    with pytest.raises(RegionError, match=message):
        find_regions(Holder(layers=blocks()), spec)


@pytest.mark.parametrize(
    ("exclude", "expected"),
    [
        (["layers.0"], {"Block": ["layers.1", "layers.2"], "OtherBlock": ["others.0", "others.1"]}),
        (["OtherBlock"], {"Block": L3}),
        ([OtherBlock], {"Block": L3}),
        (["layers"], {"OtherBlock": ["others.0", "others.1"]}),
        (["head"], {"Block": L3, "OtherBlock": ["others.0", "others.1"]}),
    ],
)
def test_exclude(exclude: list[str | type[nn.Module]], expected: dict[str, list[str]]) -> None:
    model = Holder(layers=blocks(), others=blocks(2, OtherBlock))
    assert found(find_regions(model, "auto", exclude)) == expected


@pytest.mark.parametrize(
    ("exclude", "message"),
    [
        (["Block"], "exclude takes out every region"),
        (["Blocks"], "exclude: .*Nearest: Block"),
        (["MLP"], "part of the region Block"),
    ],
)
def test_exclude_that_cannot_be(exclude: list[str], message: str) -> None:
    with pytest.raises(RegionError, match=message):
        find_regions(Holder(layers=blocks()), "auto", exclude)


def test_classes_of_one_name_have_kinds_of_their_own() -> None:
    def make() -> type[nn.Module]:
        class Block(Runs):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(2, 2)

        return Block

    one, other = make(), make()
    model = Holder(a=blocks(2, one), b=blocks(2, other), c=blocks(2, Block))
    kinds = [region.kind for region in find_regions(model)]
    assert len(set(kinds)) == 3
    assert f"{Block.__module__}.Block" in kinds


def test_reasons_are_for_people() -> None:
    (region,) = find_regions(Holder(layers=blocks(3)))
    assert region.reason == "3 alike in layers (ModuleList)"
    (region,) = find_regions(Hinted(layers=blocks(3)))
    assert region.reason == "named in Hinted._no_split_modules; 3 alike in layers (ModuleList)"
    (region,) = find_regions(Holder(layers=nn.ModuleList([Layer(), Layer(4), Layer(4)])))
    assert region.reason == "3 of 2 structures in layers (ModuleList)"
    (region,) = find_regions(shared(12))
    assert region.reason == "one module in 12 places of layers (ModuleList)"
    (region,) = find_regions(nn.Linear(2, 2))
    assert region.reason == "nothing repeats: the whole model"


def test_parametrized_blocks_are_of_the_class_they_were_built_from() -> None:
    model = Holder(layers=blocks(3, LeafBlock), more=blocks(2))
    parametrizations.orthogonal(model.layers[0], "weight")
    for block in model.more:
        parametrizations.weight_norm(block.mlp.up)
    regions = find_regions(model)
    assert found(regions) == {"LeafBlock": L3, "Block": ["more.0", "more.1"]}
    assert {region.cls for region in regions} == {LeafBlock, Block}


def test_torchscript_is_no_region() -> None:
    with pytest.warns(DeprecationWarning, match="script"):
        scripted = [torch.jit.script(linear_relu()) for _ in range(2)]
    assert found(find_regions(Holder(layers=nn.ModuleList(scripted)))) == {"Holder": [""]}
    with pytest.raises(RegionError, match="TorchScript already"):
        find_regions(scripted[0])


def test_blocks_that_torch_compile_wrapped_are_seen_through() -> None:
    model = Holder(layers=nn.ModuleList(torch.compile(Block(), backend="eager") for _ in range(2)))
    regions = find_regions(model)
    assert found(regions) == {"Block": ["layers.0._orig_mod", "layers.1._orig_mod"]}
    assert isinstance(resolve(model, "layers.0._orig_mod"), Block)


def test_lazy_parameters_have_no_shape_yet() -> None:
    assert found(find_regions(Holder(layers=blocks(2, lambda: nn.Sequential(nn.LazyLinear(4), nn.ReLU()))))) == {
        "Sequential": ["layers.0", "layers.1"]
    }


def test_a_model_without_a_forward_and_without_blocks() -> None:
    with pytest.raises(RegionError, match="no forward of its own"):
        find_regions(nn.ModuleList([nn.Linear(2, 2)]))


class Hostile(Block):
    """Overrides what a careless reader of the tree would call (case 54)."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise AssertionError

    def __len__(self) -> int:
        return 0

    def __getattr__(self, name: str) -> object:
        if name in ("weight", "_no_split_modules", "_repeated_blocks"):
            raise AssertionError
        return super().__getattr__(name)

    def named_modules(self, *args: object, **kwargs: object) -> None:  # type: ignore[override]
        raise AssertionError

    def named_children(self) -> None:  # type: ignore[override]
        raise AssertionError


def test_overridden_protocols_are_not_called() -> None:
    assert found(find_regions(Holder(layers=blocks(3, Hostile)))) == {"Hostile": L3}


def test_a_chain_deeper_than_the_recursion_limit() -> None:
    model = inner = LeafBlock()
    for _ in range(1200):
        inner.next = LeafBlock()
        inner = inner.next
    assert found(find_regions(model)) == {"LeafBlock": [""]}


@pytest.mark.parametrize("name", ["layers.9", "nowhere", "layers.0.weight", "layers.0.norm1.weight"])
def test_resolve_refuses_what_is_no_module(name: str) -> None:
    with pytest.raises(RegionError, match="has no module"):
        resolve(Holder(layers=blocks()), name)


def test_resolve() -> None:
    model = Holder(layers=blocks())
    assert resolve(model, "") is model
    assert resolve(model, "layers.1.mlp") is model.layers[1].mlp
