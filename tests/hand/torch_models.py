"""Tiny models with latent attention, of Gemma 4 and of Llama 4, and sizes that other test models share."""

from __future__ import annotations

from typing import Any

from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    Gemma4UnifiedTextConfig,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    Kimi_K25Config,
    Kimi_K25ForConditionalGeneration,
    Llama4Config,
    Llama4ForCausalLM,
    Llama4ForConditionalGeneration,
    Llama4TextConfig,
    Mistral4Config,
    Mistral4ForCausalLM,
    PreTrainedConfig,
)

from tests.hand.support import LATENT, ROPE_YARN_LATENT, TINY

NO_IDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
"""Token ids within the tiny vocabulary, for configs whose default ids are larger."""
SIZES: dict[str, Any] = {**TINY, **NO_IDS}
GROWING = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
"""Rotary parameters that scale queries by position, in several steps within a prompt."""
SIGLIP: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 16,
}
KIMI_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 4,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}
GEMMA4: dict[str, Any] = {
    **SIZES,
    "num_hidden_layers": 7,
    "head_dim": 24,
    "global_head_dim": 40,
    "sliding_window": 15,
    "layer_types": [*["sliding_attention", "full_attention"] * 3, "full_attention"],
}
"""Layers of two kinds, with heads of two sizes and different rotary embeddings."""
SHARED_KEYS: dict[str, Any] = {"num_kv_shared_layers": 3, "use_double_wide_mlp": True}
KEYS_AS_VALUES: dict[str, Any] = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
OWN_INPUTS: dict[str, Any] = {"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 131}
NO_INPUTS: dict[str, Any] = {"hidden_size_per_layer_input": 0}

LLAMA4: dict[str, Any] = {
    **SIZES,
    "num_hidden_layers": 5,
    "head_dim": 24,
    "intermediate_size_mlp": 80,
    "num_local_experts": 5,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 15,
    "floor_scale": 7,
    "attn_scale": 0.4,
}
"""Queries are scaled by position, in several steps within a prompt."""

OF_LATENT = {**LATENT, **NO_IDS}
TORCH_NAMED: dict[str, tuple[type[Any], PreTrainedConfig]] = {
    "glm4-moe-lite": (
        Glm4MoeLiteForCausalLM,
        Glm4MoeLiteConfig(**{**OF_LATENT, "mlp_layer_types": ["dense", "dense", "sparse", "sparse"]}),
    ),
    "kimi-k25": (
        Kimi_K25ForConditionalGeneration,
        Kimi_K25Config(
            text_config=DeepseekV3Config(**OF_LATENT, rope_parameters=ROPE_YARN_LATENT),
            vision_config=KIMI_TOWER,
            tie_word_embeddings=False,
        ),
    ),
    "deepseek-v3-heads": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(**{**OF_LATENT, "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": None}),
    ),
    "mistral4": (Mistral4ForCausalLM, Mistral4Config(**OF_LATENT, rope_parameters=dict(GROWING))),
    "llama4": (Llama4ForCausalLM, Llama4TextConfig(**LLAMA4)),
    "llama4-usual": (
        Llama4ForCausalLM,
        Llama4TextConfig(**{**LLAMA4, "attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1}),
    ),
    "llama4-two": (
        Llama4ForCausalLM,
        Llama4TextConfig(
            **{**LLAMA4, "attention_chunk_size": 16, "interleave_moe_layer_step": 1, "num_key_value_heads": 1},
            num_experts_per_tok=2,
            use_qk_norm=False,
            no_rope_layers=[0, 1, 1, 0, 1],
            attention_bias=True,
        ),
    ),
    "llama4-tower": (
        Llama4ForConditionalGeneration,
        Llama4Config(
            text_config=Llama4TextConfig(**{**LLAMA4, "attention_chunk_size": 17}, attn_temperature_tuning=False),
            vision_config={
                **SIGLIP,
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
            },
        ),
    ),
    "gemma4": (Gemma4ForCausalLM, Gemma4TextConfig(**GEMMA4, **SHARED_KEYS, **OWN_INPUTS)),
    "gemma4-wide": (
        Gemma4ForCausalLM,
        Gemma4TextConfig(**GEMMA4, **SHARED_KEYS, **{**OWN_INPUTS, "hidden_size_per_layer_input": 32}),
    ),
    "gemma4-keys": (
        Gemma4ForCausalLM,
        Gemma4TextConfig(
            **{**GEMMA4, "sliding_window": 1},
            **KEYS_AS_VALUES,
            **NO_INPUTS,
            final_logit_softcapping=2.0,
            tie_word_embeddings=False,
        ),
    ),
    "gemma4-experts": (
        Gemma4ForCausalLM,
        Gemma4TextConfig(
            **{**GEMMA4, "sliding_window": 17},
            **KEYS_AS_VALUES,
            **NO_INPUTS,
            enable_moe_block=True,
            num_experts=5,
            top_k_experts=2,
            moe_intermediate_size=24,
        ),
    ),
    "gemma4-tower": (
        Gemma4ForConditionalGeneration,
        Gemma4Config(
            text_config=Gemma4TextConfig(**{**GEMMA4, "sliding_window": 16}, **SHARED_KEYS, **OWN_INPUTS),
            vision_config={**SIGLIP, "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 64},
        ),
    ),
    "gemma4-unified": (
        Gemma4UnifiedForConditionalGeneration,
        Gemma4UnifiedConfig(text_config=Gemma4UnifiedTextConfig(**{**GEMMA4, "sliding_window": 5}, **KEYS_AS_VALUES)),
    ),
}
