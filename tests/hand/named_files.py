"""GGUF files of the models in `named_models`, written as llama.cpp's `convert_hf_to_gguf.py` writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.hand.gguf_models import Form, _add, _tokenizer
from tests.hand.named_models import NAMED, stored
from tests.hand.torch_models import TORCH_NAMED

Named = Iterator[tuple[str, torch.Tensor]]


def alternating(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Interleaves the rows of both halves of each head, as llama.cpp's converter does for Llama and similar models."""
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


_A = gguf.MODEL_ARCH
ARCHITECTURES: dict[str, gguf.MODEL_ARCH] = {
    "ministral3": _A.MISTRAL3,
    "phi3": _A.PHI3,
    "phi3-short": _A.PHI3,
    "phi3-long": _A.PHI3,
    "smollm3": _A.SMOLLM3,
    "granite": _A.GRANITE,
    "granite-biases": _A.GRANITE,
    "granite4": _A.GRANITE,
    "seed-oss": _A.SEED_OSS,
    "ernie4_5": _A.ERNIE4_5,
    "mixtral": _A.LLAMA,
    "qwen2-moe": _A.QWEN2MOE,
    "granite-moe": _A.GRANITE_MOE,
    "granite-moe-shared": _A.GRANITE_MOE,
    "ernie4_5-moe": _A.ERNIE4_5_MOE,
    "minimax-m2": _A.MINIMAXM2,
    "gpt-oss": _A.GPT_OSS,
    "gpt-oss-blocks": _A.GPT_OSS,
    "olmo2": _A.OLMO2,
    "olmo3": _A.OLMO2,
    "exaone4": _A.EXAONE4,
    "exaone4-windows": _A.EXAONE4,
    "cohere2": _A.COHERE2,
    "gemma4": _A.GEMMA4,
    "gemma4-wide": _A.GEMMA4,
    "gemma4-keys": _A.GEMMA4,
    "gemma4-experts": _A.GEMMA4,
    "llama4-usual": _A.LLAMA4,
}
"""The GGUF architecture of each family."""
PERMUTED = {_A.MISTRAL3, _A.SMOLLM3, _A.GRANITE, _A.GRANITE_MOE, _A.LLAMA}
"""Architectures for which the converter interleaves the halves of heads."""


PLAIN = Form()


def write_gguf(path: Path, family: str, folder: Path, form: Form = PLAIN) -> Path:
    """Writes the GGUF file of a model that `save` has written, as llama.cpp's `convert_hf_to_gguf.py` does."""
    arch, config = ARCHITECTURES[family], deepcopy({**NAMED, **TORCH_NAMED}[family][1])
    # If layers have heads of two sizes, attributes of the config then have the values of the local layers.
    config.allow_global_per_layer_attribute_access = True
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    # The dense feed-forward part of Granite 4 is its shared expert.
    writer.add_feed_forward_length(80 if family == "granite4" else config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if arch == _A.COHERE2:
        writer.add_layer_norm_eps(config.layer_norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_freq_base(config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"])
    more = _METADATA.get(arch)
    if more is not None:
        more(writer, config)
    _tokenizer(writer, config.vocab_size)
    tensors = dict(_converted(family, folder, arch, config))
    form.change(tensors)
    for name, tensor in tensors.items():
        _add(writer, name, tensor, form.others.get(name, form.kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _experts(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)


def _granite(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def _granite_moe(writer: gguf.GGUFWriter, config: Any) -> None:
    _granite(writer, config)
    _experts(writer, config)
    shared = getattr(config, "shared_intermediate_size", 0)
    if shared:
        writer.add_expert_shared_feed_forward_length(shared)


def _phi3(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    head = config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(int(head * rope.get("partial_rotary_factor", 1.0)))
    original = rope.get("original_max_position_embeddings")
    if original:
        writer.add_rope_scaling_orig_ctx_len(original)
        factor = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(np.sqrt(1 + np.log(factor) / np.log(original)) if factor > 1 else 1.0)


def _ministral3(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _qwen2_moe(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _ernie_moe(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.moe_num_experts)
    writer.add_expert_used_count(config.moe_k)
    writer.add_interleave_moe_layer_step(config.moe_layer_interval)
    writer.add_leading_dense_block_count(config.moe_layer_start_index)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.moe_num_shared_experts)


def _minimax(writer: gguf.GGUFWriter, config: Any) -> None:
    _experts(writer, config)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))


def _gpt_oss(writer: gguf.GGUFWriter, config: Any) -> None:
    _experts(writer, config)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_dimension_count(config.head_dim)
    rope = config.rope_parameters
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _olmo(writer: gguf.GGUFWriter, config: Any) -> None:
    if not hasattr(config, "sliding_window"):
        return
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    rope = config.rope_parameters["full_attention"]
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _exaone4(writer: gguf.GGUFWriter, config: Any) -> None:
    if config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])


def _cohere2(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_logit_scale(config.logit_scale)
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_dimension_count(config.head_dim)


def _gemma4(writer: gguf.GGUFWriter, config: Any) -> None:
    is_local = [kind == "sliding_attention" for kind in config.layer_types]
    heads = [config.per_layer_config[layer] for layer in range(config.num_hidden_layers)]
    whole_dim, local_dim = (heads[is_local.index(local)].head_dim for local in (False, True))
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(is_local)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    for add, length in [
        (writer.add_key_length, whole_dim),
        (writer.add_value_length, whole_dim),
        (writer.add_rope_dimension_count, whole_dim),
        (writer.add_key_length_swa, local_dim),
        (writer.add_value_length_swa, local_dim),
        (writer.add_rope_dimension_count_swa, local_dim),
    ]:
        add(length)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if config.use_double_wide_mlp:
        own, size = config.num_hidden_layers - config.num_kv_shared_layers, config.intermediate_size
        sizes = [size if layer < own else 2 * size for layer in range(config.num_hidden_layers)]
        writer.add_feed_forward_length(sizes)
    writer.add_head_count_kv([own.num_key_value_heads for own in heads])
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _llama4(writer: gguf.GGUFWriter, config: Any) -> None:
    _experts(writer, config)
    writer.add_feed_forward_length(config.intermediate_size_mlp)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
    writer.add_rope_dimension_count(config.head_dim)


_METADATA: dict[gguf.MODEL_ARCH, Callable[[gguf.GGUFWriter, Any], None]] = {
    _A.GRANITE: _granite,
    _A.GRANITE_MOE: _granite_moe,
    _A.PHI3: _phi3,
    _A.MISTRAL3: _ministral3,
    _A.LLAMA: _experts,
    _A.QWEN2MOE: _qwen2_moe,
    _A.ERNIE4_5_MOE: _ernie_moe,
    _A.MINIMAXM2: _minimax,
    _A.GPT_OSS: _gpt_oss,
    _A.OLMO2: _olmo,
    _A.EXAONE4: _exaone4,
    _A.COHERE2: _cohere2,
    _A.GEMMA4: _gemma4,
    _A.LLAMA4: _llama4,
}


def _converted(family: str, folder: Path, arch: gguf.MODEL_ARCH, config: Any) -> Named:
    """Yields the weights under their GGUF names. Experts are stacked, and Granite's fused tensors are split."""
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in _apart(family, folder):
        before, is_expert, after = name.partition(".experts.")
        if is_expert and after[0].isdigit():
            expert, matrix = after.split(".", 1)
            experts.setdefault(f"{before}.experts.{matrix}", {})[int(expert)] = tensor
            continue
        if arch in PERMUTED and ".self_attn.q_proj." in name:
            tensor = alternating(tensor, config.num_attention_heads)
        elif arch in PERMUTED and ".self_attn.k_proj." in name:
            tensor = alternating(tensor, config.num_key_value_heads)
        yield _name(names, name), tensor
    for name, of in experts.items():
        yield _name(names, name), torch.stack([of[expert] for expert in range(len(of))])
    factors = config.rope_parameters.get("long_factor")
    if arch == _A.GEMMA4:
        last = config.per_layer_config[config.num_hidden_layers - 1]
        dim, part = last.head_dim, config.rope_parameters["full_attention"]["partial_rotary_factor"]
        turned = int(dim * part / 2)
        yield "rope_freqs.weight", torch.tensor([1.0] * turned + [1e30] * (dim // 2 - turned))
    if factors is not None:
        yield "rope_factors_long.weight", torch.tensor(factors)
        yield "rope_factors_short.weight", torch.tensor(config.rope_parameters["short_factor"])


def _name(names: gguf.TensorNameMap, name: str) -> str:
    # Granite's stacked tensors already have GGUF names.
    found = name if name.startswith("blk.") else names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


_OF_GEMMA4 = {
    ".layer_scalar": "layer_output_scale.weight",
    ".router.scale": "ffn_gate_inp.scale",
    ".router.per_expert_scale": "ffn_down_exps.scale",
    ".experts.gate_up_proj": "ffn_gate_up_exps.weight",
    ".experts.down_proj": "ffn_down_exps.weight",
}
"""Suffixes of Gemma 4's tensor names, each with the tensor name in a GGUF file."""


def _apart(family: str, folder: Path) -> Named:
    for name, tensor in stored(folder):
        layer = name.split(".")[2] if name.startswith("model.layers.") else ""
        if name.endswith("moe_statics.e_score_correction_bias"):
            yield f"blk.{layer}.exp_probs_b.bias", tensor.flatten()
        elif name.endswith("e_score_correction_bias"):
            yield f"blk.{layer}.exp_probs_b.bias", tensor
        elif name.endswith("self_attn.sinks"):
            yield f"blk.{layer}.attn_sinks.weight", tensor
        elif ".mlp.experts.gate_up_proj" in name and family.startswith("gpt-oss"):
            # Here gates and ups alternate, and columns are outputs. In a GGUF file rows are outputs.
            end = "bias" if name.endswith("_bias") else "weight"
            tensor = tensor if end == "bias" else tensor.transpose(1, 2)
            yield f"blk.{layer}.ffn_gate_exps.{end}", tensor[:, ::2]
            yield f"blk.{layer}.ffn_up_exps.{end}", tensor[:, 1::2]
        elif ".mlp.experts.down_proj" in name and family.startswith("gpt-oss"):
            end = "bias" if name.endswith("_bias") else "weight"
            yield f"blk.{layer}.ffn_down_exps.{end}", tensor if end == "bias" else tensor.transpose(1, 2)
        elif family.startswith("gemma4") and name.endswith(tuple(_OF_GEMMA4)):
            end = next(end for end in _OF_GEMMA4 if name.endswith(end))
            yield f"blk.{layer}.{_OF_GEMMA4[end]}", tensor
        elif name.endswith(".feed_forward.experts.gate_up_proj"):
            gate, up = tensor.transpose(1, 2).chunk(2, dim=1)
            yield f"blk.{layer}.ffn_gate_exps.weight", gate
            yield f"blk.{layer}.ffn_up_exps.weight", up
        elif name.endswith(".feed_forward.experts.down_proj"):
            yield f"blk.{layer}.ffn_down_exps.weight", tensor.transpose(1, 2)
        elif name.endswith("shared_expert_gate.weight"):
            yield name, tensor.flatten()
        elif name.endswith("block_sparse_moe.input_linear.weight"):
            gate, up = tensor.chunk(2, dim=1)
            yield f"blk.{layer}.ffn_gate_exps.weight", gate
            yield f"blk.{layer}.ffn_up_exps.weight", up
        elif name.endswith("block_sparse_moe.output_linear.weight"):
            yield f"blk.{layer}.ffn_down_exps.weight", tensor
        elif name.endswith("shared_mlp.input_linear.weight"):
            end = "" if family == "granite4" else "_shexp"
            gate, up = tensor.chunk(2)
            yield f"blk.{layer}.ffn_gate{end}.weight", gate
            yield f"blk.{layer}.ffn_up{end}.weight", up
        elif name.endswith("shared_mlp.output_linear.weight"):
            yield f"blk.{layer}.ffn_down{'' if family == 'granite4' else '_shexp'}.weight", tensor
        else:
            yield name, tensor
