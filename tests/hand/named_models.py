"""Tiny random models of families that differ from others in names, factors and small parts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    GraniteMoeSharedConfig,
    GraniteMoeSharedForCausalLM,
    HYV3Config,
    HYV3ForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from benchmarks.described import handshake_model
from tests.hand.support import random_model
from tests.hand.torch_models import GROWING, SIGLIP, SIZES, TORCH_NAMED

FACTORS: dict[str, Any] = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.3,
    "logits_scaling": 0.5,
}
TOWER: dict[str, Any] = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "image_size": 16,
}
OF_KINDS = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 20000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
}
ROPE_GPT_OSS = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}


def divisors(count: int, last: float) -> list[float]:
    return np.linspace(1.0, last, count).round(3).tolist()


def longrope(original: int) -> dict[str, Any]:
    """Heads of 24 elements, of which 18 are rotated, as in Phi-4-mini."""
    return {
        "num_attention_heads": 4,
        "hidden_size": 96,
        "original_max_position_embeddings": original,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "short_factor": divisors(9, 1.5),
            "long_factor": divisors(9, 6.0),
            "original_max_position_embeddings": original,
        },
    }


def text(**changes: Any) -> dict[str, Any]:
    return {**SIZES, "head_dim": 24, **changes}


NAMED: dict[str, tuple[type[Any], PreTrainedConfig]] = {
    "ministral3": (Ministral3ForCausalLM, Ministral3Config(**text(rope_parameters=GROWING))),
    "mistral3-small": (
        Mistral3ForConditionalGeneration,
        Mistral3Config(
            text_config=MistralConfig(**text(sliding_window=None)), vision_config=TOWER, tie_word_embeddings=False
        ),
    ),
    "mistral3-ministral": (
        Mistral3ForConditionalGeneration,
        Mistral3Config(
            text_config=Ministral3Config(**text(rope_parameters=GROWING)),
            vision_config=TOWER,
            tie_word_embeddings=True,
        ),
    ),
    "phi3": (Phi3ForCausalLM, Phi3Config(**{**SIZES, "num_attention_heads": 6, "hidden_size": 96})),
    "phi3-short": (Phi3ForCausalLM, Phi3Config(**{**SIZES, **longrope(96)})),
    "phi3-long": (Phi3ForCausalLM, Phi3Config(**{**SIZES, **longrope(16), "tie_word_embeddings": True})),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config(**{**SIZES, "num_hidden_layers": 5})),
    "smollm3-list": (SmolLM3ForCausalLM, SmolLM3Config(**SIZES, no_rope_layers=[0, 1, 0], attention_bias=True)),
    "granite": (GraniteForCausalLM, GraniteConfig(**SIZES, **FACTORS, tie_word_embeddings=True)),
    "granite-biases": (GraniteForCausalLM, GraniteConfig(**SIZES, **FACTORS, attention_bias=True, mlp_bias=True)),
    "granite4": (
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig(
            **SIZES,
            **FACTORS,
            num_local_experts=0,
            shared_intermediate_size=80,
            layer_types=["full_attention"] * 3,
            position_embedding_type="rope",
            mamba_n_heads=8,
        ),
    ),
    "granite4-nope": (
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig(
            **SIZES,
            **FACTORS,
            num_local_experts=0,
            shared_intermediate_size=80,
            layer_types=["full_attention"] * 3,
            mamba_n_heads=8,
        ),
    ),
    "seed-oss": (SeedOssForCausalLM, SeedOssConfig(**text(attention_out_bias=True))),
    "ernie4_5": (Ernie4_5ForCausalLM, Ernie4_5Config(**text(use_bias=True))),
    "mixtral": (MixtralForCausalLM, MixtralConfig(**SIZES, num_local_experts=5, num_experts_per_tok=2)),
    "qwen2-moe": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig(
            **SIZES,
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=40,
        ),
    ),
    "qwen2-moe-some-dense": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig(
            **SIZES,
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=40,
            mlp_only_layers=[1],
            norm_topk_prob=True,
        ),
    ),
    "granite-moe": (
        GraniteMoeForCausalLM,
        GraniteMoeConfig(**SIZES, **FACTORS, num_local_experts=5, num_experts_per_tok=2),
    ),
    "granite-moe-shared": (
        GraniteMoeSharedForCausalLM,
        GraniteMoeSharedConfig(
            **SIZES, **FACTORS, num_local_experts=5, num_experts_per_tok=1, shared_intermediate_size=40
        ),
    ),
    "ernie4_5-moe": (
        Ernie4_5_MoeForCausalLM,
        Ernie4_5_MoeConfig(**SIZES, moe_num_experts=6, moe_k=2, moe_intermediate_size=24, moe_num_shared_experts=2),
    ),
    "minimax-m2": (
        MiniMaxM2ForCausalLM,
        MiniMaxM2Config(
            **text(
                intermediate_size=32,
                num_local_experts=5,
                num_experts_per_tok=2,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            )
        ),
    ),
    "hy3": (
        HYV3ForCausalLM,
        HYV3Config(
            **text(
                num_experts=6,
                num_experts_per_tok=2,
                moe_intermediate_size=24,
                num_shared_experts=2,
                mlp_layer_types=["dense", "sparse", "sparse"],
            )
        ),
    ),
    "gpt-oss": (
        GptOssForCausalLM,
        GptOssConfig(
            **text(num_hidden_layers=5, intermediate_size=40, num_local_experts=5, num_experts_per_tok=2),
            sliding_window=15,
            rope_parameters=ROPE_GPT_OSS,
        ),
    ),
    # Rows of experts are one block long, and all query heads share one key head.
    "gpt-oss-blocks": (
        GptOssForCausalLM,
        GptOssConfig(
            **text(num_key_value_heads=1, intermediate_size=32, num_local_experts=6, num_experts_per_tok=3),
            sliding_window=17,
            rope_parameters=ROPE_GPT_OSS,
        ),
    ),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config(**SIZES)),
    "exaone4": (
        Exaone4ForCausalLM,
        Exaone4Config(**text(sliding_window=None, layer_types=["full_attention"] * SIZES["num_hidden_layers"])),
    ),
    "exaone4-windows": (
        Exaone4ForCausalLM,
        Exaone4Config(**text(num_hidden_layers=5, sliding_window=9, sliding_window_pattern=4)),
    ),
    "olmo3": (
        Olmo3ForCausalLM,
        Olmo3Config(**{**SIZES, "num_hidden_layers": 5}, sliding_window=15, rope_parameters=OF_KINDS),
    ),
    "cohere2": (
        Cohere2ForCausalLM,
        Cohere2Config(**{**SIZES, "num_hidden_layers": 5}, sliding_window=17, logit_scale=0.4),
    ),
    "cohere2-one": (
        Cohere2ForCausalLM,
        Cohere2Config(**SIZES, sliding_window=1, layer_types=["full_attention", *["sliding_attention"] * 2]),
    ),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config(**text(sliding_window=17, query_pre_attn_scalar=20))),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig(**text(num_hidden_layers=7, sliding_window=15))),
    "gemma3-tower": (
        Gemma3ForConditionalGeneration,
        Gemma3Config(
            text_config=Gemma3TextConfig(**text(num_hidden_layers=7, sliding_window=16)),
            vision_config=SIGLIP,
            mm_tokens_per_image=4,
        ),
    ),
}
"""Families that the hand in Rust computes."""


@cache
def model_of(family: str) -> Any:
    """A random model. It is made once, because no test changes it."""
    model = random_model(*{**NAMED, **TORCH_NAMED}[family])
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.3 * torch.randn_like(buffer))
        for name, parameter in model.named_parameters():
            if name.endswith("e_score_correction_bias"):
                parameter.copy_(torch.rand_like(parameter) * 0.2)
            elif name.endswith(("layernorm_1.weight", "layernorm_2.weight", "router.scale", "per_expert_scale")):
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif name.endswith("sinks"):
                # One sink takes all weight, and another takes none.
                parameter.copy_(torch.tensor([30.0, -30.0, 1.5, -0.5]).roll(int(name.split(".")[2])))
            elif name.endswith("gate_up_proj_bias"):
                # Some gates and ups exceed the limits at which they are clamped.
                parameter.mul_(40)
    return model


def save(folder: Path, family: str) -> dict[str, Any]:
    """The model entry of a hand's configuration: safetensors under the names of the hub."""
    model_of(family).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    if family == "kimi-k25":
        # transformers saves the decoder's layers under the names of the tower's layers.
        tensors = {name.replace(".model.blocks.", ".model.layers."): tensor for name, tensor in stored(folder)}
        save_file(tensors, folder / "model.safetensors")
    files = sorted(str(path) for path in folder.glob("*.safetensors"))
    return handshake_model(config, files)


def stored(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a folder's files, by their names there."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                yield name, file.get_tensor(name)
