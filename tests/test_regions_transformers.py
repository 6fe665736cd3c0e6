"""The regions of real models: of transformers with 4 layers, and of diffusers; built without weights."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from torchrig.regions import find_regions, resolve

pytestmark = pytest.mark.models

LAYERS = 4
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": LAYERS}
TEXT = {**SMALL, "num_key_value_heads": 1, "vocab_size": 32, "pad_token_id": 0}
MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
STAGED = {"depths": [1, 1, 3, 1], "image_size": 64, "num_labels": 2}


@dataclass(frozen=True)
class Family:
    """A model's class, its configuration, and how many instances of each kind are expected."""

    model: str
    config: str
    kinds: dict[str, int]
    values: dict[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        transformers = importlib.import_module("transformers")
        with torch.device("meta"):
            model = getattr(transformers, self.model)(getattr(transformers, self.config)(**self.values))
        assert isinstance(model, nn.Module)
        return model


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig", {"LlamaDecoderLayer": LAYERS}, TEXT),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", {"Qwen3DecoderLayer": LAYERS}, TEXT),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"GPT2Block": LAYERS},
        {"n_embd": 16, "n_layer": LAYERS, "n_head": 2, "vocab_size": 32},
    ),
    "mixtral": Family("MixtralForCausalLM", "MixtralConfig", {"MixtralDecoderLayer": LAYERS}, {**TEXT, **MOE}),
    "qwen3-moe": Family("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {"Qwen3MoeDecoderLayer": LAYERS}, {**TEXT, **MOE}),
    "gemma3": Family("Gemma3ForCausalLM", "Gemma3TextConfig", {"Gemma3DecoderLayer": LAYERS}, TEXT),
    "bert": Family("BertForMaskedLM", "BertConfig", {"BertLayer": LAYERS}, {**SMALL, "vocab_size": 32}),
    "vit": Family("ViTForImageClassification", "ViTConfig", {"ViTLayer": LAYERS}, {**SMALL, "image_size": 32}),
    "mamba": Family(
        "MambaForCausalLM",
        "MambaConfig",
        {"MambaBlock": LAYERS},
        {"hidden_size": 16, "num_hidden_layers": LAYERS, "vocab_size": 32, "state_size": 4},
    ),
    # The first block of each stack holds the position bias that the others lack.
    "t5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {"T5Block": 2 * LAYERS},
        {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": LAYERS, "num_heads": 2, "vocab_size": 32},
    ),
    "whisper": Family(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {"WhisperEncoderLayer": LAYERS, "WhisperDecoderLayer": LAYERS},
        {
            "d_model": 16,
            "encoder_layers": LAYERS,
            "decoder_layers": LAYERS,
            "vocab_size": 32,
            "pad_token_id": 0,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
        },
    ),
    # One class; the first layer is dense, the others are MoE.
    "deepseek-v3": Family(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {"DeepseekV3DecoderLayer": LAYERS},
        {
            **SMALL,
            "vocab_size": 32,
            "num_key_value_heads": 2,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 4,
        },
    ),
    # One layer in one group, called 4 times: the tree cannot tell, so it is the whole model.
    "albert": Family(
        "AlbertModel", "AlbertConfig", {"AlbertModel": 1}, {**SMALL, "embedding_size": 8, "vocab_size": 32}
    ),
    # Hints its stages, which all differ; the blocks are wanted.
    "swin": Family(
        "SwinForImageClassification",
        "SwinConfig",
        {"SwinLayer": 6},
        {**STAGED, "embed_dim": 8, "num_heads": [1, 1, 2, 2], "window_size": 2, "patch_size": 4},
    ),
    # Hints both its stages and its layers.
    "convnext": Family(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"ConvNextLayer": 6},
        {**STAGED, "hidden_sizes": [4, 8, 8, 16]},
    ),
    "resnet": Family(
        "ResNetForImageClassification",
        "ResNetConfig",
        {"ResNetBasicLayer": 8},
        {"layer_type": "basic", "depths": [2, 2, 2, 2], "hidden_sizes": [4, 8, 8, 16], "embedding_size": 4},
    ),
    # Two towers, each with layers of the same class.
    "clip": Family(
        "CLIPModel",
        "CLIPConfig",
        {"CLIPEncoderLayer": 2 * LAYERS},
        {"text_config": {**SMALL, "vocab_size": 32}, "vision_config": {**SMALL, "image_size": 32}},
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers(family: str) -> None:
    model = FAMILIES[family].build()
    regions = find_regions(model, "auto")
    assert {region.kind: len(region.instances) for region in regions} == FAMILIES[family].kinds
    assert all(isinstance(resolve(model, name), region.cls) for region in regions for name in region.instances)


def test_a_wrapper_of_the_users_own_around_a_model() -> None:
    class Reward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy = FAMILIES["bert"].build()
            self.reference = FAMILIES["bert"].build()

        def forward(self, **inputs: Any) -> Any:
            return self.policy(**inputs)

    (region,) = find_regions(Reward(), "auto")
    assert (region.kind, len(region.instances)) == ("BertLayer", 2 * LAYERS)
    assert "named in BertForMaskedLM._no_split_modules" in region.reason


def test_diffusers_says_itself_what_repeats() -> None:
    diffusers = importlib.import_module("diffusers")
    with torch.device("meta"):
        model = diffusers.FluxTransformer2DModel(
            num_layers=1,
            num_single_layers=3,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=16,
            pooled_projection_dim=8,
            axes_dims_rope=(2, 2, 4),
            in_channels=4,
        )
    kinds = {region.kind: len(region.instances) for region in find_regions(model, "auto")}
    assert kinds == {"FluxTransformerBlock": 1, "FluxSingleTransformerBlock": 3}


def test_diffusers_unet() -> None:
    diffusers = importlib.import_module("diffusers")
    with torch.device("meta"):
        model = diffusers.UNet2DConditionModel(
            block_out_channels=(8, 16),
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=8,
            norm_num_groups=4,
            attention_head_dim=4,
        )
    assert {region.kind for region in find_regions(model, "auto")} == {"BasicTransformerBlock"}
