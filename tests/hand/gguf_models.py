"""GGUF files of transformers models with experts, written as llama.cpp's `convert_hf_to_gguf.py` writes them.

Names of tensors and of metadata are those of the `gguf` package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf.quants import dequantize, quantize

from tests.hand.support import is_gemma, whole_weights
from tests.weights.support import tiny_metadata, tiny_tensors, tiny_tokenizer, write_gguf

Q = gguf.GGMLQuantizationType
F32 = gguf.GGMLQuantizationType.F32
ARCHITECTURES = {
    "Qwen3MoeForCausalLM": gguf.MODEL_ARCH.QWEN3MOE,
    "Glm4MoeForCausalLM": gguf.MODEL_ARCH.GLM4_MOE,
    "DeepseekV2ForCausalLM": gguf.MODEL_ARCH.DEEPSEEK2,
    "DeepseekV3ForCausalLM": gguf.MODEL_ARCH.DEEPSEEK2,
    "Glm4MoeLiteForCausalLM": gguf.MODEL_ARCH.DEEPSEEK2,
    "Gemma2ForCausalLM": gguf.MODEL_ARCH.GEMMA2,
    "Gemma3ForCausalLM": gguf.MODEL_ARCH.GEMMA3,
}
SCORES = {
    "DeepseekV2ForCausalLM": gguf.ExpertGatingFuncType.SOFTMAX,
    "DeepseekV3ForCausalLM": gguf.ExpertGatingFuncType.SIGMOID,
    "Glm4MoeForCausalLM": gguf.ExpertGatingFuncType.SIGMOID,
    "Glm4MoeLiteForCausalLM": gguf.ExpertGatingFuncType.SIGMOID,
}
Named = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Form:
    """The differences between converters, and between their options."""

    kind: gguf.GGMLQuantizationType = F32
    """The type of matrices whose rows are whole blocks of it."""
    others: Mapping[str, gguf.GGMLQuantizationType] = field(default_factory=dict)
    """Other types, by the names of tensors."""
    split: bool = True
    """True if keys and values of latent rows have one tensor each."""
    fused: bool = False
    """True if gates and ups of experts are one tensor."""
    groups: bool = True
    """True if the file contains the expert groups and the gating function."""
    change: Callable[[dict[str, torch.Tensor]], Any] = lambda tensors: None
    """Changes the tensors, under their names in the file."""
    further_layers: int = 0
    """The number of layers after the decoder layers that predict further tokens (`nextn_predict_layers`)."""


def write(path: Path, model: Any, form: Form = Form()) -> Path:
    """Writes the file of a transformers model."""
    config = model.config
    arch = ARCHITECTURES[type(model).__name__]
    blocks = config.num_hidden_layers + form.further_layers
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _common(writer, config, blocks)
    if is_gemma(model):
        _gemma(writer, config)
    else:
        _experts(writer, config, type(model).__name__, form)
    if arch == gguf.MODEL_ARCH.DEEPSEEK2:
        _latent(writer, config, form)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if arch == gguf.MODEL_ARCH.GLM4_MOE:
        writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
        writer.add_nextn_predict_layers(form.further_layers)
    _tokenizer(writer, config.vocab_size)
    names = gguf.get_tensor_name_map(arch, blocks)
    tensors = {}
    for name, tensor in _merged(model, form):
        found = name if name.startswith("blk.") else names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        tensors[found] = tensor
    form.change(tensors)
    for name, tensor in tensors.items():
        _add(writer, name, tensor, form.others.get(name, form.kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, kind: gguf.GGMLQuantizationType) -> None:
    values = tensor.detach().float().contiguous().numpy()
    # The converter does not quantise vectors, routers, and matrices whose rows are not whole blocks.
    is_vector = values.ndim == 1 or name.endswith(".bias")
    plain = is_vector or "ffn_gate_inp" in name or values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]
    if plain or kind == F32:
        writer.add_tensor(name, values)
    else:
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)


def _common(writer: gguf.GGUFWriter, config: Any, blocks: int) -> None:
    writer.add_block_count(blocks)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    # Files of Gemma 3 contain the rotary parameters of the layers with full attention.
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def _gemma(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    rope = config.rope_parameters.get("full_attention", {})
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _experts(writer: gguf.GGUFWriter, config: Any, architecture: str, form: Form) -> None:
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture == "Qwen3MoeForCausalLM":
        writer.add_expert_count(config.num_experts)
        return
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    # Files of DeepSeek have this key only if the experts' weights are normalised.
    if config.norm_topk_prob:
        writer.add_expert_weights_norm(True)
    if form.groups:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        writer.add_expert_gating_func(SCORES[architecture])


def _latent(writer: gguf.GGUFWriter, config: Any, form: Form) -> None:
    rotary = config.qk_rope_head_dim
    heads = config.qk_nope_head_dim + rotary, config.v_head_dim
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(rotary)
    if form.split:
        writer.add_head_count_kv(1)
        writer.add_key_length(config.kv_lora_rank + rotary)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(heads[0])
        writer.add_value_length_mla(heads[1])
    else:
        writer.add_head_count_kv(config.num_attention_heads)
        writer.add_key_length(heads[0])
        writer.add_value_length(heads[1])
    if "mscale_all_dim" in config.rope_parameters:
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])


def _tokenizer(writer: gguf.GGUFWriter, vocabulary: int) -> None:
    """Writes the first tokens of a byte-level tokenizer, under the converter's keys."""
    metadata = tiny_tokenizer()
    writer.add_tokenizer_model(metadata["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(metadata["tokenizer.ggml.pre"])
    writer.add_token_list(metadata["tokenizer.ggml.tokens"][:vocabulary])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"][:vocabulary])
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.add_eos_token_id(0)


def _merged(model: Any, form: Form) -> Named:
    """Weights under the converter's names. Experts are stacked, and the matrices of latent rows are split."""
    config = model.config
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in whole_weights(model).items():
        before, is_expert, after = name.partition(".mlp.experts.")
        if is_gemma(model) and name == "lm_head.weight":
            # The head is tied, and the converter leaves it out.
            continue
        if is_expert:
            expert, matrix = after.split(".", 1)
            experts.setdefault(f"{before}.mlp.experts.{matrix}", {})[int(expert)] = tensor
        elif name.endswith(".kv_b_proj.weight") and form.split:
            made = tensor.view(config.num_attention_heads, -1, config.kv_lora_rank)
            keys, values = made.split((config.qk_nope_head_dim, config.v_head_dim), dim=1)
            yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
            yield name.replace("kv_b_proj", "v_b_proj"), values
        else:
            yield name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor
    stacked = {name: torch.stack([of[expert] for expert in range(len(of))]) for name, of in experts.items()}
    for name, tensor in stacked.items():
        if not form.fused:
            yield name, tensor
        elif ".gate_proj." in name:
            fused = gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.FFN_GATE_UP_EXP].format(bid=name.split(".")[2])
            both = torch.cat((tensor, stacked[name.replace(".gate_proj.", ".up_proj.")]), dim=1)
            yield f"{fused}.weight", both
        elif ".down_proj." in name:
            yield name, tensor


def dequantised(model: Any, kind: gguf.GGMLQuantizationType) -> dict[str, torch.Tensor]:
    """The weights of a file in split form whose matrices have this type, dequantised by the `gguf` package."""
    config, found = model.config, {}
    for name, tensor in whole_weights(model).items():
        if tensor.ndim == 1 or name.endswith(".mlp.gate.weight"):
            found[name] = tensor
        elif name.endswith(".kv_b_proj.weight"):
            made = tensor.view(config.num_attention_heads, -1, config.kv_lora_rank)
            keys, values = made.split((config.qk_nope_head_dim, config.v_head_dim), dim=1)
            keys = _rounded(keys.transpose(1, 2), kind).transpose(1, 2)
            found[name] = torch.cat((keys, _rounded(values, kind)), dim=1).flatten(0, 1)
        else:
            found[name] = _rounded(tensor, kind)
    return found


def _rounded(tensor: torch.Tensor, kind: gguf.GGMLQuantizationType) -> torch.Tensor:
    stored = quantize(tensor.detach().float().contiguous().numpy(), kind)
    return torch.from_numpy(dequantize(stored, kind))


MIXED = {"attn_q": Q.Q4_0, "attn_k": Q.Q4_1, "attn_v": Q.Q5_0, "attn_output": Q.F16, "token_embd": Q.Q8_0}
"""Types by tensor name; tests add Q4_1 for all other tensors. Fused matrices have parts of different types."""
WITHOUT_KERNELS = {"attn_q": Q.Q5_0, "attn_k": Q.Q4_0, "attn_v": Q.Q8_0, "ffn_down": Q.Q5_1, "token_embd": Q.Q5_0}
"""Types by tensor name. Most of them have no kernels of their own."""


def tiny(path: Path, types: dict[str, Any], architecture: str = "llama", *, tied: bool = True) -> Path:
    """Writes a small model.

    `types`: the types of its matrices, by tensor name; "" is the type of all other matrices.
    """
    tensors = {}
    for name, (values, kind) in tiny_tensors(architecture, tied=tied).items():
        stem = name.removesuffix(".weight").rpartition(".")[2]
        if values.ndim == 2:
            kind = types.get(stem, types[""])
            values = quantize(values * 0.12, kind)
        tensors[name] = (values, kind)
    return write_gguf(path, architecture, {**tiny_metadata(), **tiny_tokenizer()}, tensors)
