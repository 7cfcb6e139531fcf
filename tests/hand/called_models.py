"""Tiny random models of many architectures, which the hand computes with the model code of transformers."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from forebay.models.probe import probe
from forebay.runner.runner import ModelRunner
from forebay.state.config import RunnerConfig
from forebay.weights.called import Calls
from tests.hand.support import hf_config, wire_config

VOCABULARY = 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": 8,
    "attention_chunk_size": 8,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Experts.
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "top_k": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    # Latent attention.
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    # Recurrent layers.
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_d_state": 16,
    "ssm_state_size": 16,
    "mamba_n_groups": 1,
    "n_groups": 1,
    "mamba_d_ssm": 128,
    # Per-layer inputs, as in Gemma 3n.
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 8,
    "num_kv_shared_layers": 2,
}
"""Sizes by their config keys. Each config takes the keys that it has."""
FULL, WINDOW, LINEAR, CONV = "full_attention", "sliding_attention", "linear_attention", "conv"
HYBRID = {"layer_types": [LINEAR, FULL] * 2}
CONVOLUTIONS = {"layer_types": [CONV, FULL] * 2}
OWN: dict[str, dict[str, Any]] = {
    "falcon": {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    "gemma3n_text": {
        "num_hidden_layers": 5,
        "activation_sparsity_pattern": [0.0] * 5,
        "layer_types": [WINDOW, WINDOW, FULL, WINDOW, FULL],
    },
    "gemma4_text": {"num_hidden_layers": 6, "global_head_dim": 32, "layer_types": [WINDOW, FULL] * 3},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 48},
    "kimi_linear": HYBRID,
    "lfm2": CONVOLUTIONS,
    "lfm2_moe": CONVOLUTIONS,
    "minimax_m3_vl_text": {"layer_types": ["minimax_m3_sparse", FULL] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "expand": 2},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "moe", "mamba", "mlp", "attention"]},
    "qwen3_5_moe_text": HYBRID,
    "qwen3_5_text": HYBRID,
    "qwen3_next": HYBRID,
}
"""The settings that an architecture needs beyond `SIZES`."""
WITH_STATES = (
    *("falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2", "lfm2_moe", "mamba2", "nemotron_h", "olmo_hybrid"),
    *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
)
PLAIN = (
    *("apertus", "cohere2", "deepseek_v3", "ernie4_5", "exaone4", "gemma2", "gemma3_text", "gemma3n_text"),
    *("gemma4_text", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_oss", "granite", "granitemoe"),
    *("hunyuan_v1_dense", "hy_v3", "laguna", "llama", "llama4_text", "mimo_v2_flash", "minimax_m2", "ministral3"),
    *("mistral", "mixtral", "olmo2", "olmo3", "phi", "phi3", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss"),
    *("smollm3", "stablelm", "starcoder2"),
)
ARCHITECTURES = (*PLAIN, *WITH_STATES)


def config_of(name: str, **changes: Any) -> PreTrainedConfig:
    """The configuration of a tiny model, by its `model_type`."""
    kind = CONFIG_MAPPING[name]
    known = set(inspect.signature(kind.__init__).parameters) | set(kind.attribute_map)
    # With latent attention `head_dim` is `qk_rope_head_dim`, and there are as many key heads as query heads.
    latent = {"head_dim": 8, "num_key_value_heads": 4} if "kv_lora_rank" in known else {}
    sizes = {key: value for key, value in {**SIZES, **latent}.items() if key in known}
    config: PreTrainedConfig = kind(**{**sizes, **OWN.get(name, {}), **changes})
    return config


@torch.no_grad()
def model_of(name: str, **changes: Any) -> Any:
    """A random model. Its norms, sinks and biases are not 0 or 1, because these would hide an omitted operation."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config_of(name, **changes), attn_implementation="eager", dtype=torch.float32
    ).eval()
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def called_runner(model: Any, folder: Path, **changes: Any) -> ModelRunner:
    """A runner that computes `model` with transformers' code, from a checkpoint in `folder`."""
    model.save_pretrained(folder)
    config = hf_config(model.config, type(model).__name__)
    described = {"format": "safetensors", "directory": str(folder), "files": [], "config": config}
    described["called"] = probe(folder).to_dict()
    settings = wire_config({}, load_format="auto", **changes)
    runner = ModelRunner(RunnerConfig.from_dict({**settings, "model": described}))
    runner.load(lambda done, total: None)
    return runner


def calls_of(name: str, folder: Path) -> Calls:
    """The result of `probe` for a tiny model."""
    config_of(name).save_pretrained(folder)
    return probe(folder)
