"""Models of the transformers library, with random small weights and 12 layers: one graph for each kind of block."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import torchrig

LAYERS = 12
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": LAYERS}
TEXT = {**SMALL, "num_key_value_heads": 1, "vocab_size": 32, "max_position_embeddings": 64, "pad_token_id": 0}


@dataclass(frozen=True)
class Family:
    """How to build a model of a family, and what is expected of it.

    Args:
        model: The class, of ``transformers``.
        config: The configuration's class.
        values: Its arguments.
        kinds: The expected graphs of each region kind in training.
        inputs: Makes one batch of keyword arguments.
        dtype: The precision; the experts' grouped matrix products have no float64.
    """

    model: str
    config: str
    values: dict[str, Any]
    kinds: dict[str, int]
    inputs: Callable[[], dict[str, torch.Tensor]] = field(default_factory=lambda: tokens)
    dtype: torch.dtype = torch.float64

    def build(self) -> nn.Module:
        transformers = importlib.import_module("transformers")
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.values)
        return getattr(transformers, self.model)(config).to(self.dtype).train()


def tokens(**more: Any) -> dict[str, Any]:
    drawn = torch.randint(1, 32, (2, 9), generator=torch.Generator().manual_seed(0))
    return {"input_ids": drawn, "labels": drawn, "use_cache": False, **more}


def masked_tokens() -> dict[str, Any]:
    drawn = tokens()
    del drawn["use_cache"]
    return drawn


def image() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "pixel_values": torch.randn(2, 3, 16, 16, generator=generator, dtype=torch.float64),
        "labels": torch.tensor([0, 1]),
    }


def speech() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "input_features": torch.randn(2, 8, 20, generator=generator, dtype=torch.float64),
        "labels": torch.randint(1, 32, (2, 9), generator=generator),
        "use_cache": False,
    }


MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
NO_DROPOUT_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

FAMILIES = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig", TEXT, {"LlamaDecoderLayer": 1}),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", {**TEXT, "head_dim": 8}, {"Qwen3DecoderLayer": 1}),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "n_embd": 16, "n_layer": LAYERS, "n_head": 2, "vocab_size": 32, "n_positions": 64,
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        },
        {"GPT2Block": 1},
    ),
    "mixtral": Family(
        "MixtralForCausalLM", "MixtralConfig", {**TEXT, **MOE}, {"MixtralDecoderLayer": 1}, dtype=torch.float32
    ),
    "qwen3-moe": Family(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**TEXT, **MOE, "head_dim": 8},
        {"Qwen3MoeDecoderLayer": 1},
        dtype=torch.float32,
    ),
    # Every second layer slides its window: the layers differ in their attention's kind.
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**TEXT, "head_dim": 8, "sliding_window": 4, "sliding_window_pattern": 2},
        {"Gemma3DecoderLayer": 2},
    ),
    "bert": Family(
        "BertForMaskedLM",
        "BertConfig",
        {**SMALL, **NO_DROPOUT_BERT, "vocab_size": 32, "max_position_embeddings": 64},
        {"BertLayer": 1},
        masked_tokens,
    ),
    "vit": Family(
        "ViTForImageClassification",
        "ViTConfig",
        {**SMALL, **NO_DROPOUT_BERT, "image_size": 16, "patch_size": 4, "num_labels": 2},
        {"ViTLayer": 1},
        image,
    ),
    "mamba": Family(
        "MambaForCausalLM",
        "MambaConfig",
        {"hidden_size": 16, "num_hidden_layers": LAYERS, "vocab_size": 32, "state_size": 4},
        {"MambaBlock": 1},
    ),
    # The first layer of each half holds the relative position bias, the others are given it.
    "t5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": LAYERS, "num_decoder_layers": LAYERS,
            "vocab_size": 32, "dropout_rate": 0.0, "decoder_start_token_id": 0,
        },
        {"T5Block": 4},
    ),
    "whisper": Family(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "d_model": 16, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_attention_heads": 2,
            "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_mel_bins": 8,
            "max_source_positions": 10, "max_target_positions": 16, "vocab_size": 32, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "dropout": 0.0,
        },
        {"WhisperEncoderLayer": 1, "WhisperDecoderLayer": 1},
        speech,
    ),
    # The first three layers are dense, the others a mixture of experts.
    "deepseek-v3": Family(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **TEXT, "num_key_value_heads": 2, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 2,
            "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 3, "kv_lora_rank": 8, "q_lora_rank": 8,
            "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
        },
        {"DeepseekV3DecoderLayer": 2},
        dtype=torch.float32,
    ),
}  # fmt: skip


@pytest.mark.models
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")  # Mamba's own
@pytest.mark.parametrize("name", FAMILIES)
def test_one_graph_for_each_kind_and_the_loss_of_eager(name: str) -> None:
    family = FAMILIES[name]
    bare = family.build()
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if family.dtype is torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
    prepared = torchrig.prepare(copy.deepcopy(bare), backend="aot_eager")
    for _ in range(2):
        expected, got = (_loss(model, family) for model in (bare, prepared))
        assert got == pytest.approx(expected, rel=tolerance["rtol"])
    for (parameter, one), other in zip(bare.named_parameters(), prepared.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, **tolerance, msg=lambda text, at=parameter: f"{at}: {text}")
    report = torchrig.report(prepared)
    assert {kind.kind: kind.graphs for kind in report.kinds} == family.kinds, str(report)
    assert report.ok, str(report)
    assert all(len(kind.recompiles) == kind.graphs - 1 and kind.instances >= LAYERS for kind in report.kinds), str(
        report
    )
    assert all(each.guard for kind in report.kinds for each in kind.recompiles)
    assert list(prepared.state_dict()) == list(bare.state_dict())


def _loss(model: nn.Module, family: Family) -> float:
    model.zero_grad()
    loss = model(**family.inputs()).loss
    loss.backward()
    return loss.item()
