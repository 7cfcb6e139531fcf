"""Tiny random models with recurrent layers, and their files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
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
from tests.hand.gguf_models import F32, _add, _tokenizer
from tests.hand.named_files import alternating
from tests.hand.named_models import FACTORS
from tests.hand.torch_models import SIZES

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
"""Recurrent layers around one attention layer. Eight heads are divided into two groups."""
SINGLE: dict[str, Any] = {
    **{key: value for key, value in SIZES.items() if key not in ("num_hidden_layers", "rms_norm_eps")},
    "head_dim": 24,
    "intermediate_size": 96,
    "mamba_num_heads": 6,
    "mamba_head_dim": 20,
    "ssm_state_size": 24,
    "n_groups": 2,
    # Disables a lower bound that transformers applies to prompts only, and that no other engine has.
    "time_step_min": 1e-30,
}
"""Each layer is one part: a recurrence, attention or a feed-forward part."""
PARALLEL: dict[str, Any] = {
    **SIZES,
    "num_hidden_layers": 3,
    "mamba_d_ssm": 120,
    "mamba_n_heads": 6,
    "mamba_d_head": 20,
    "mamba_d_state": 24,
    "mamba_n_groups": 2,
    "embedding_multiplier": 5.0,
    "lm_head_multiplier": 0.4,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.9, 1.4, 0.8, 1.1, 0.7],
    "mlp_multipliers": [0.75, 1.25],
}
"""Each layer has attention and a recurrent state in parallel."""
CHANNELS: dict[str, Any] = {
    **SIZES,
    "num_hidden_layers": 5,
    "num_key_value_heads": SIZES["num_attention_heads"],
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 12,
    "v_head_dim": 20,
    "linear_head_dim": 24,
    "linear_num_heads": 3,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "layer_types": [LINEAR, LINEAR, FULL, LINEAR, FULL],
}
"""Recurrent layers with a decay per channel, and layers with latent attention."""

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
    "nemotron-h": (
        NemotronHForCausalLM,
        NemotronHConfig(**SINGLE, layers_block_type=[LINEAR, "mlp", LINEAR, FULL, LINEAR, LINEAR, "mlp"]),
    ),
    "nemotron-h-biases": (
        NemotronHForCausalLM,
        NemotronHConfig(
            **{**SINGLE, "n_groups": 1, "head_dim": 16},
            layers_block_type=["mlp", "mlp", FULL, FULL, LINEAR],
            mlp_bias=True,
            use_bias=True,
            use_conv_bias=False,
            conv_kernel=3,
        ),
    ),
    "nemotron-3": (
        NemotronHForCausalLM,
        NemotronHConfig(
            **SINGLE,
            layers_block_type=[LINEAR, "moe", LINEAR, FULL, "moe", "mlp"],
            n_routed_experts=6,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            moe_intermediate_size=24,
            moe_shared_expert_intermediate_size=40,
            routed_scaling_factor=2.5,
        ),
    ),
    "nemotron-3-latent": (
        NemotronHForCausalLM,
        NemotronHConfig(
            **SINGLE,
            layers_block_type=[LINEAR, "moe", FULL, "moe"],
            n_routed_experts=5,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            moe_shared_expert_intermediate_size=40,
            moe_latent_size=28,
            norm_topk_prob=False,
        ),
    ),
    "falcon-h1": (FalconH1ForCausalLM, FalconH1Config(**PARALLEL)),
    "falcon-h1-norm": (
        FalconH1ForCausalLM,
        FalconH1Config(
            **{**PARALLEL, "mamba_n_groups": 1, "num_key_value_heads": 1},
            mamba_rms_norm=True,
            mamba_norm_before_gate=False,
            mamba_proj_bias=True,
            projectors_bias=True,
            attention_bias=True,
            mlp_bias=True,
            mamba_conv_bias=False,
            mamba_d_conv=3,
            tie_word_embeddings=True,
        ),
    ),
    "falcon-h1-norm-last": (
        FalconH1ForCausalLM,
        FalconH1Config(**PARALLEL, mamba_rms_norm=True, mamba_norm_before_gate=False),
    ),
    "falcon-h1-norm-first": (FalconH1ForCausalLM, FalconH1Config(**PARALLEL, mamba_rms_norm=True)),
    "kimi-linear": (KimiLinearForCausalLM, KimiLinearConfig(**CHANNELS, num_local_experts=5, n_group=1)),
    "kimi-linear-groups": (
        KimiLinearForCausalLM,
        KimiLinearConfig(
            **{**CHANNELS, "qk_rope_head_dim": 8, "layer_types": [LINEAR, FULL, FULL, LINEAR, LINEAR]},
            num_local_experts=8,
            n_group=4,
            topk_group=2,
            q_lora_rank=28,
            n_shared_experts=2,
            norm_topk_prob=False,
            linear_conv_kernel_dim=3,
            mlp_layer_types=["dense", "dense", "sparse", "sparse", "sparse"],
        ),
    ),
}
COMPILED = list(MODELS)
"""Models that the hand in Rust computes too."""


@cache
def model_of(name: str) -> Any:
    """The model, with noise on all weights that its code initialises with zeros or ones."""
    return noisy(*MODELS[name])


def noisy(kind: type[Any], config: PreTrainedConfig) -> Any:
    """A random model with recurrent layers."""
    torch.manual_seed(7)
    model = kind(config).eval()
    beside_one = "qwen" in model.config.model_type
    with torch.no_grad():
        for at, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if at.endswith(("norm.weight", "norm_f.weight")):
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
            if at.endswith(("expert_bias", "e_score_correction_bias")):
                buffer.copy_(torch.rand_like(buffer) * 0.2)
    return model


GGUF = {
    "qwen3-next": gguf.MODEL_ARCH.QWEN3NEXT,
    "qwen3.5-text": gguf.MODEL_ARCH.QWEN35,
    "qwen3.5-one-key-head": gguf.MODEL_ARCH.QWEN35,
    "qwen3.5-moe-text": gguf.MODEL_ARCH.QWEN35MOE,
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "lfm2-biases": gguf.MODEL_ARCH.LFM2,
    "lfm2-moe": gguf.MODEL_ARCH.LFM2MOE,
    "granite4-h": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "granite4-h-moe": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "nemotron-h": gguf.MODEL_ARCH.NEMOTRON_H,
    "nemotron-3": gguf.MODEL_ARCH.NEMOTRON_H_MOE,
    "nemotron-3-latent": gguf.MODEL_ARCH.NEMOTRON_H_MOE,
    "falcon-h1": gguf.MODEL_ARCH.FALCON_H1,
    "falcon-h1-norm-last": gguf.MODEL_ARCH.FALCON_H1,
}
"""Models with GGUF files."""


def write_gguf(path: Path, name: str, kind: gguf.GGMLQuantizationType = F32) -> Path:
    """Writes a model's file as llama.cpp's `convert_hf_to_gguf.py` does.

    `kind`: the type of matrices whose rows are whole blocks.
    """
    model = model_of(name)
    arch, config = GGUF[name], model.config
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    attends = [kind == FULL for kind in config.layer_types]
    of_layers = [config.num_key_value_heads if attention else 0 for attention in attends]
    alike = "qwen" in name or "falcon" in name
    writer.add_head_count_kv(config.num_key_value_heads if alike else of_layers)
    writer.add_vocab_size(config.vocab_size)
    if "nemotron" not in name:
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    kinds = {
        "qwen": _of_qwen,
        "granite": _of_granite,
        "lfm2": _of_lfm2,
        "nemotron": _of_nemotron,
        "falcon": _of_falcon,
    }
    tensors = next(found for kind, found in kinds.items() if kind in name)(writer, model)
    _tokenizer(writer, config.vocab_size)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for at, tensor in tensors:
        found = at if at.startswith("blk.") else names.get_name(at, try_suffixes=(".weight", ".bias"))
        assert found is not None, at
        # As with some tools, the small matrices of decays and strengths are not quantised.
        plain = any(part in found for part in ("norm", "ssm_alpha", "ssm_beta"))
        _add(writer, found, tensor, F32 if plain else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _of_qwen(writer: gguf.GGUFWriter, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Reorders value heads as in files of Qwen3.5: the first one of each key head, then each second one, and so on."""
    config, tiled = model.config, "qwen3_5" in model.config.model_type
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    writer.add_full_attention_interval(config.layer_types.index(FULL) + 1)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(dim)
    writer.add_ssm_group_count(keys)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * value_dim)
    if hasattr(config, "num_experts"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    else:
        writer.add_feed_forward_length(config.intermediate_size)

    def ordered(values: torch.Tensor, size: int) -> torch.Tensor:
        """Reorders the rows of value heads of this size."""
        if not tiled:
            return values
        return values.unflatten(0, (keys, heads // keys, size)).transpose(0, 1).flatten(0, 2)

    def behind_keys(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat((rows[: 2 * keys * dim], ordered(rows[2 * keys * dim :], value_dim)))

    for at, tensor in model.state_dict().items():
        at = at.replace("model.language_model.", "model.")
        layer, kind = at.split(".")[2] if at.startswith("model.layers.") else "", at.split("linear_attn.")[-1]
        if kind == "in_proj_qkvz.weight":
            of_values = heads // keys * value_dim
            parts = tensor.unflatten(0, (keys, -1)).split((dim, dim, of_values, of_values), dim=1)
            *qkv, gates = (part.flatten(0, 1) for part in parts)
            yield f"blk.{layer}.attn_qkv.weight", torch.cat(qkv)
            yield f"blk.{layer}.attn_gate.weight", gates
        elif kind == "in_proj_qkv.weight":
            yield f"blk.{layer}.attn_qkv.weight", behind_keys(tensor)
        elif kind == "conv1d.weight":
            yield f"blk.{layer}.ssm_conv1d.weight", behind_keys(tensor.squeeze(1))
        elif kind == "in_proj_z.weight":
            yield at, ordered(tensor, value_dim)
        elif kind in ("in_proj_a.weight", "in_proj_b.weight"):
            yield at, ordered(tensor, 1)
        elif kind == "A_log":
            yield f"blk.{layer}.ssm_a", -ordered(tensor, 1).exp()
        elif kind == "dt_bias":
            yield f"blk.{layer}.ssm_dt.bias", ordered(tensor, 1)
        elif kind == "out_proj.weight":
            yield at, ordered(tensor.T, value_dim).T
        elif at.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            yield f"blk.{layer}.ffn_gate_exps.weight", gate
            yield f"blk.{layer}.ffn_up_exps.weight", up
        elif at.endswith("experts.down_proj"):
            yield f"blk.{layer}.ffn_down_exps.weight", tensor
        elif at.endswith("norm.weight") and kind != "norm.weight":
            yield at, tensor + 1
        else:
            yield at, tensor


def _of_lfm2(writer: gguf.GGUFWriter, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    config = model.config
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_shortconv_l_cache(config.conv_L_cache)
    dense = next(layer.feed_forward for layer in model.model.layers if hasattr(layer.feed_forward, "w1"))
    writer.add_feed_forward_length(dense.w1.weight.shape[0])
    if hasattr(config, "num_experts"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    for at, tensor in model.state_dict().items():
        layer = at.split(".")[2] if at.startswith("model.layers.") else ""
        if at.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            yield f"blk.{layer}.ffn_gate_exps.weight", gate
            yield f"blk.{layer}.ffn_up_exps.weight", up
        elif at.endswith("experts.down_proj"):
            yield f"blk.{layer}.ffn_down_exps.weight", tensor
        elif at.endswith("expert_bias"):
            yield f"blk.{layer}.exp_probs_b.bias", tensor
        elif at != "lm_head.weight":
            yield at, tensor.squeeze(1) if at.endswith("conv.conv.weight") else tensor


def _of_granite(writer: gguf.GGUFWriter, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    config, experts = model.config, model.config.num_local_experts
    inner = config.mamba_n_heads * config.mamba_d_head
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_feed_forward_length(config.intermediate_size if experts else config.shared_intermediate_size)
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)
    writer.add_rope_scaling_finetuned(False)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)
    writer.add_attention_scale(config.attention_multiplier)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    end = "_shexp" if experts else ""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for at, tensor in model.state_dict().items():
        layer, last = at.split(".")[2] if at.startswith("model.layers.") else "", at.split(".")[-2]
        if last in heads:
            yield at, alternating(tensor, heads[last])
        elif at.endswith("shared_mlp.input_linear.weight"):
            gate, up = tensor.chunk(2)
            yield f"blk.{layer}.ffn_gate{end}.weight", gate
            yield f"blk.{layer}.ffn_up{end}.weight", up
        elif at.endswith("shared_mlp.output_linear.weight"):
            yield f"blk.{layer}.ffn_down{end}.weight", tensor
        elif at.endswith(("experts.gate_up_proj", "input_linear.weight")):
            gate, up = tensor.chunk(2, dim=1)
            yield f"blk.{layer}.ffn_gate_exps.weight", gate
            yield f"blk.{layer}.ffn_up_exps.weight", up
        elif at.endswith(("experts.down_proj", "output_linear.weight")):
            yield f"blk.{layer}.ffn_down_exps.weight", tensor
        elif at.endswith(("gate.weight", "router.layer.weight", "router.weight")):
            yield f"blk.{layer}.ffn_gate_inp.weight", tensor
        else:
            yield _of_mamba(at, tensor, layer, config.mamba_n_groups)


def _of_nemotron(writer: gguf.GGUFWriter, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Writes the feed-forward length of each layer: 0 for layers without a feed-forward part."""
    config = model.config
    sparse = "moe" in config.layer_types
    inner = config.moe_intermediate_size if sparse else config.intermediate_size
    writer.add_feed_forward_length([inner * (kind == ("moe" if sparse else "mlp")) for kind in config.layer_types])
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    _mamba(writer, config.conv_kernel, config.ssm_state_size, config.n_groups, config.mamba_num_heads)
    writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
    if sparse:
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
        if config.moe_latent_size is not None:
            writer.add_moe_latent_size(config.moe_latent_size)
    for at, tensor in model.state_dict().items():
        at, layer = at.replace("model.", "backbone.", 1), at.split(".")[2] if at.startswith("model.layers.") else ""
        if at.endswith("experts.up_proj"):
            yield f"blk.{layer}.ffn_up_exps.weight", tensor
        elif at.endswith("experts.down_proj"):
            yield f"blk.{layer}.ffn_down_exps.weight", tensor
        elif at.endswith("e_score_correction_bias"):
            yield f"blk.{layer}.exp_probs_b.bias", tensor
        else:
            yield _of_mamba(at, tensor, layer, config.n_groups)


def _mamba(writer: gguf.GGUFWriter, taps: int, state: int, groups: int, heads: int) -> None:
    writer.add_ssm_conv_kernel(taps)
    writer.add_ssm_state_size(state)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_time_step_rank(heads)


def _of_mamba(at: str, tensor: torch.Tensor, layer: str, groups: int) -> tuple[str, torch.Tensor]:
    """Converts a tensor of Mamba 2 to the form of a GGUF file. Other tensors are unchanged."""
    if at.endswith("conv1d.weight"):
        return at, tensor.squeeze(1)
    if at.endswith("A_log"):
        return f"blk.{layer}.ssm_a", -tensor.exp()[:, None]
    if at.endswith(".D"):
        return f"blk.{layer}.ssm_d", tensor[:, None]
    if at.endswith("dt_bias"):
        return f"blk.{layer}.ssm_dt.bias", tensor
    if at.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        return at, tensor.view(groups, -1)
    return at, tensor


def _of_falcon(writer: gguf.GGUFWriter, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Multiplies the factors of the config into the weights."""
    config = model.config
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.hidden_size // config.num_attention_heads)
    writer.add_value_length(config.hidden_size // config.num_attention_heads)
    groups, state, inner = config.mamba_n_groups, config.mamba_d_state, config.mamba_d_ssm
    _mamba(writer, config.mamba_d_conv, state, groups, config.mamba_n_heads)
    writer.add_ssm_inner_size(inner)
    gate, down = config.mlp_multipliers
    factors = {
        "mamba.out_proj": config.ssm_out_multiplier,
        "down_proj": down,
        "gate_proj": gate,
        "k_proj": config.key_multiplier * config.attention_in_multiplier,
        "q_proj": config.attention_in_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    widths = torch.tensor([inner, inner, groups * state, groups * state, config.mamba_n_heads])
    of_rows = torch.tensor(config.ssm_multipliers).repeat_interleave(widths)[:, None] * config.ssm_in_multiplier
    for at, tensor in model.state_dict().items():
        layer = at.split(".")[2] if at.startswith("model.layers.") else ""
        if at.endswith("mamba.in_proj.weight"):
            yield at, tensor * of_rows
        else:
            factor = next((factor for part, factor in factors.items() if f"{part}.weight" in at), 1.0)
            yield _of_mamba(at, tensor * factor, layer, groups)


def save(folder: Path, name: str) -> dict[str, Any]:
    """Saves the model, and returns its description for a hand."""
    model = model_of(name)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    return handshake_model(config, [folder / "model.safetensors"])
