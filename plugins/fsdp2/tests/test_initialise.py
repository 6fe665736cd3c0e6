"""Models on the meta device: sharded first, then given the values that one process would have given them."""

from __future__ import annotations

import pytest
import torch
from ranks import Block, Language, adamw, batch, gathered, own, train
from torch import nn

import torchrig

FSDP = {"strategy": "fsdp2"}
two_processes = pytest.mark.processes(2)


def seeded() -> None:
    """The state of the random numbers from which initialisation starts after ``torch.manual_seed(5)``."""
    torch.manual_seed(5)
    torch.manual_seed(int(torch.randint(2**62, ())))


def on_meta(make, **choices):
    with torch.device("meta"):
        return make(**choices)


@pytest.mark.parametrize(
    "tied", [pytest.param(False, marks=pytest.mark.processes(2)), pytest.param(True, marks=pytest.mark.processes(4))]
)
def test_modules_are_initialised_by_their_own_reset_parameters(tied):
    model = on_meta(Language, tied=tied)
    torch.manual_seed(5)
    torchrig.prepare(model, backend="eager", **FSDP)
    torch.manual_seed(6)
    bare = Language(tied=tied)
    seeded()
    _reset_children_first(bare, set())
    for (name, value), expected in zip(model.named_parameters(), bare.parameters(), strict=True):
        assert value.placements[0].is_shard()
        assert torch.equal(gathered(value), expected), name
    assert (model.head.weight is model.embed.weight) is tied
    losses = train(model, adamw(model), range(4))
    assert losses[-1] < losses[0]


def _reset_children_first(module, done):
    for child in module.children():
        _reset_children_first(child, done)
    before = {id(each): each.detach().clone() for each in module.parameters(recurse=False) if id(each) in done}
    getattr(module, "reset_parameters", lambda: None)()
    for each in module.parameters(recurse=False):
        if id(each) in before:  # tied: the first place counts
            each.data.copy_(before[id(each)])
        done.add(id(each))


class Titan(Language):
    """Initialised from the root, buffers and a part of a tensor included."""

    def __init__(self):
        super().__init__()
        self.register_buffer("positions", torch.arange(8))
        self.scale = nn.Parameter(torch.ones(8))

    def init_weights(self, std=0.02):
        self.positions.copy_(torch.arange(8))
        nn.init.ones_(self.scale)
        nn.init.trunc_normal_(self.head.weight, std=std)
        self.embed.weight.data.normal_(0, std)
        for layer in self.layers:
            nn.init.kaiming_uniform_(layer.up.weight)
            layer.down.weight.data.mul_(0.5)


class Applied(Language):
    """Initialised module by module, as many libraries do."""

    def _init_weights(self, module):
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
            module.weight.data[3].zero_()
        if isinstance(module, Block):
            nn.init.orthogonal_(module.up.weight.data) if module is None else None


@two_processes
def test_the_models_own_init_weights_writes_into_whole_tensors():
    model = on_meta(Titan)
    torch.manual_seed(5)
    torchrig.prepare(model, backend="eager", **FSDP)
    bare = Titan()
    seeded()
    _reset_children_first(bare, set())
    bare.init_weights()
    for (name, value), expected in zip(model.named_parameters(), bare.parameters(), strict=True):
        assert torch.equal(gathered(value), expected), name
    assert torch.equal(model.positions, torch.arange(8))


@two_processes
def test_init_weights_of_a_module_may_write_into_a_part_of_its_tensor():
    model = on_meta(Applied)
    torchrig.prepare(model, **FSDP)
    embedded = gathered(model.embed.weight)
    assert not embedded[3].any() and embedded[[0, 1, 2, 4]].all(1).all()


class Lost(Language):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("table", torch.ones(3))


class Forgetful(Lost):
    def init_weights(self):
        nn.init.ones_(self.scale)


@two_processes
def test_what_has_no_way_to_be_initialised_is_named_before_anything_is_changed():
    model = on_meta(Lost)
    with pytest.raises(torchrig.StrategyError, match=r"the model itself \(Lost: scale, table\)"):
        torchrig.prepare(model, backend="eager", **FSDP)
    assert type(model) is Lost and all(each.is_meta and type(each) is nn.Parameter for each in model.parameters())


@two_processes
def test_what_the_initialisation_left_out_is_named_and_all_is_taken_back():
    model = on_meta(Forgetful)
    with pytest.raises(torchrig.StrategyError, match="left no values in table"):
        torchrig.prepare(model, backend="eager", **FSDP)
    assert type(model) is Forgetful
    assert all(each.is_meta and type(each) is nn.Parameter for each in model.parameters())
    assert not torchrig.has_compiled_regions(model)


@two_processes
@pytest.mark.models
def test_a_tied_llama_of_the_transformers_library():
    """Case 21."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    model = on_meta(lambda: LlamaForCausalLM(config))
    torchrig.prepare(model, backend="aot_eager", fullgraph=True, **FSDP)
    bare = LlamaForCausalLM(config)
    bare.load_state_dict({name: gathered(value) for name, value in model.state_dict().items()})
    assert 0.01 < bare.model.layers[0].mlp.up_proj.weight.std() < 0.03
    assert torch.equal(model.model.rotary_emb.inv_freq, bare.model.rotary_emb.inv_freq)
    pairs = [(each, adamw(each)) for each in (model, bare)]
    for step in range(2):
        losses = []
        for (each, optimizer), rows in zip(pairs, (own(batch(step)), batch(step)), strict=True):
            loss = each(input_ids=rows, labels=rows).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(_mean(loss) if each is model else loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    report = torchrig.report(model)
    assert [(kind.kind, kind.graphs) for kind in report.kinds] == [("LlamaDecoderLayer", 1)]


@two_processes
@pytest.mark.models
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft calls it
def test_lora_adapters_of_the_peft_library():
    """Cases 18, 29: frozen and trained parameters in one block."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    def make():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
            num_key_value_heads=2, use_cache=False,
        )  # fmt: skip
        adapted = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return get_peft_model(LlamaForCausalLM(config), adapted).double()

    bare, model = make(), make()
    pairs = [
        (each, torch.optim.AdamW((p for p in each.parameters() if p.requires_grad), lr=1e-2)) for each in (model, bare)
    ]
    torchrig.prepare(*pairs[0], backend="aot_eager", fullgraph=True, **FSDP)
    for step in range(3):
        for (each, optimizer), rows in zip(pairs, (own(batch(step)), batch(step)), strict=True):
            each(input_ids=rows, labels=rows).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, value), expected in zip(model.named_parameters(), bare.parameters(), strict=True):
        assert value.requires_grad == expected.requires_grad
        torch.testing.assert_close(gathered(value), expected, rtol=1e-6, atol=1e-9, msg=name)
    (kind,) = torchrig.report(model).kinds
    assert kind.kind == "LlamaDecoderLayer" and kind.graphs <= 2


def _mean(value):
    from ranks import mean

    return mean(value)
