"""Tiny random models with recurrent layers, and their files."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    PreTrainedConfig,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from benchmarks.described import handshake_model
from tests.hand.named_models import FACTORS, SIZES

LINEAR, FULL, CONV = "linear_attention", "full_attention", "conv"
DELTA: dict[str, Any] = {
    **SIZES,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 40,
    "linear_conv_kernel_dim": 4,
    "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
}
EXPERTS: dict[str, Any] = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
TOWER: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
CONVOLUTIONS: dict[str, Any] = {**SIZES, "num_hidden_layers": 4, "layer_types": [CONV, FULL, CONV, CONV]}
MAMBA: dict[str, Any] = {
    **SIZES,
    **FACTORS,
    "num_hidden_layers": 4,
    "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 24,
    "mamba_n_groups": 2,
    "shared_intermediate_size": 40,
}
"""Layers with states around one that attends. Two key heads are shared by six value heads, all of odd lengths."""

MODELS: dict[str, tuple[type[Any], PreTrainedConfig]] = {
    "qwen3-next": (Qwen3NextForCausalLM, Qwen3NextConfig(**DELTA, **EXPERTS)),
    "qwen3-next-some-dense": (
        Qwen3NextForCausalLM,
        Qwen3NextConfig(**DELTA, **EXPERTS, mlp_only_layers=[1], norm_topk_prob=False, tie_word_embeddings=True),
    ),
    "qwen3.5-text": (Qwen3_5ForCausalLM, Qwen3_5TextConfig(**DELTA)),
    "qwen3.5-one-key-head": (
        Qwen3_5ForCausalLM,
        Qwen3_5TextConfig(**{**DELTA, "linear_num_key_heads": 1, "linear_num_value_heads": 3}),
    ),
    "qwen3.5": (
        Qwen3_5ForConditionalGeneration,
        Qwen3_5Config(text_config=DELTA, vision_config=TOWER, tie_word_embeddings=False),
    ),
    "qwen3.5-moe-text": (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig(**DELTA, **EXPERTS)),
    "qwen3.5-moe": (
        Qwen3_5MoeForConditionalGeneration,
        Qwen3_5MoeConfig(text_config={**DELTA, **EXPERTS}, vision_config=TOWER, tie_word_embeddings=False),
    ),
    "lfm2": (Lfm2ForCausalLM, Lfm2Config(**CONVOLUTIONS, block_multiple_of=16)),
    "lfm2-biases": (
        Lfm2ForCausalLM,
        Lfm2Config(**CONVOLUTIONS, conv_bias=True, conv_L_cache=5, block_auto_adjust_ff_dim=False),
    ),
    "lfm2-moe": (
        Lfm2MoeForCausalLM,
        Lfm2MoeConfig(
            **CONVOLUTIONS, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24, num_dense_layers=1
        ),
    ),
    "granite4-h": (GraniteMoeHybridForCausalLM, GraniteMoeHybridConfig(**MAMBA, num_local_experts=0)),
    "granite4-h-moe": (
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig(
            **MAMBA, num_local_experts=5, num_experts_per_tok=2, mamba_proj_bias=True, mamba_conv_bias=False
        ),
    ),
}


@cache
def model_of(name: str) -> Any:
    """The model, with noise on everything that its code initialises with zeros and ones."""
    kind, config = MODELS[name]
    torch.manual_seed(7)
    model = kind(config).eval()
    beside_one = "qwen" in model.config.model_type
    with torch.no_grad():
        for at, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if at.endswith("norm.weight"):
                own = "linear_attn.norm" in at
                parameter.copy_(noise * 0.3 + (0 if beside_one and not own else 1))
            elif at.endswith(("A_log", "dt_bias")):
                parameter.copy_(noise * 0.7)
            elif at.endswith((".D", "bias")):
                parameter.copy_(noise * 0.5)
            elif "conv" in at:
                parameter.copy_(noise * 0.4)
            else:
                parameter.copy_(noise * 0.12)
        for at, buffer in model.named_buffers():
            if at.endswith("expert_bias"):
                buffer.copy_(torch.rand_like(buffer) * 0.2)
    return model


def save(folder: Path, name: str) -> dict[str, Any]:
    """Saves the model. Gives it as a hand gets it."""
    model = model_of(name)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    return handshake_model(config, [folder / "model.safetensors"])
