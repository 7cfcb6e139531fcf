"""Tiny random models of families that differ from others in names, factors and small parts, and their files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import gguf
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
from tests.hand.gguf_models import Form, _add, _tokenizer
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
    """Heads of 24, of which 18 elements are rotated, as in Phi-4-mini."""
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
    # Rows of experts are as long as blocks, and one head of keys serves all.
    "gpt-oss-blocks": (
        GptOssForCausalLM,
        GptOssConfig(
            **text(num_key_value_heads=1, intermediate_size=32, num_local_experts=6, num_experts_per_tok=3),
            sliding_window=17,
            rope_parameters=ROPE_GPT_OSS,
        ),
    ),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config(**SIZES)),
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
    """A random model, made once: nobody changes it."""
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
                # One takes all weight, one none.
                parameter.copy_(torch.tensor([30.0, -30.0, 1.5, -0.5]).roll(int(name.split(".")[2])))
            elif name.endswith("gate_up_proj_bias"):
                # Some gates and ups are beyond their bounds.
                parameter.mul_(40)
    return model


def save(folder: Path, family: str) -> dict[str, Any]:
    """The model of a hand's configuration, in safetensors under the names of the hub."""
    model_of(family).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    if family == "kimi-k25":
        # transformers gives the decoder's layers the name of the tower's as it saves them.
        tensors = {name.replace(".model.blocks.", ".model.layers."): tensor for name, tensor in _stored(folder)}
        save_file(tensors, folder / "model.safetensors")
    files = sorted(str(path) for path in folder.glob("*.safetensors"))
    return handshake_model(config, files)


Named = Iterator[tuple[str, torch.Tensor]]


def _stored(folder: Path) -> Named:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                yield name, file.get_tensor(name)


def _alternating(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of heads whose two halves alternate, as llama.cpp's converter writes them for Llama's kin."""
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
    "cohere2": _A.COHERE2,
}
"""Families with GGUF files of their own."""
PERMUTED = {_A.MISTRAL3, _A.SMOLLM3, _A.GRANITE, _A.GRANITE_MOE, _A.LLAMA}
"""Architectures whose converter makes the halves of heads alternate."""


PLAIN = Form()


def write_gguf(path: Path, family: str, folder: Path, form: Form = PLAIN) -> Path:
    """The file of a model that `save` has written, as llama.cpp's `convert_hf_to_gguf.py` writes it."""
    arch, config = ARCHITECTURES[family], NAMED[family][1]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    # Granite 4's dense part is its shared one.
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


def _cohere2(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_logit_scale(config.logit_scale)
    writer.add_sliding_window(config.sliding_window)
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
    _A.COHERE2: _cohere2,
}


def _converted(family: str, folder: Path, arch: gguf.MODEL_ARCH, config: Any) -> Named:
    """Weights under the names of a file: experts stacked, what Granite keeps together taken apart."""
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in _apart(family, folder):
        before, is_expert, after = name.partition(".experts.")
        if is_expert and after[0].isdigit():
            expert, matrix = after.split(".", 1)
            experts.setdefault(f"{before}.experts.{matrix}", {})[int(expert)] = tensor
            continue
        if arch in PERMUTED and ".self_attn.q_proj." in name:
            tensor = _alternating(tensor, config.num_attention_heads)
        elif arch in PERMUTED and ".self_attn.k_proj." in name:
            tensor = _alternating(tensor, config.num_key_value_heads)
        yield _name(names, name), tensor
    for name, of in experts.items():
        yield _name(names, name), torch.stack([of[expert] for expert in range(len(of))])
    factors = config.rope_parameters.get("long_factor")
    if factors is not None:
        yield "rope_factors_long.weight", torch.tensor(factors)
        yield "rope_factors_short.weight", torch.tensor(config.rope_parameters["short_factor"])


def _name(names: gguf.TensorNameMap, name: str) -> str:
    # Granite's own stacks have names of a file already.
    found = name if name.startswith("blk.") else names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def _apart(family: str, folder: Path) -> Named:
    for name, tensor in _stored(folder):
        layer = name.split(".")[2] if name.startswith("model.layers.") else ""
        if name.endswith("moe_statics.e_score_correction_bias"):
            yield f"blk.{layer}.exp_probs_b.bias", tensor.flatten()
        elif name.endswith("e_score_correction_bias"):
            yield f"blk.{layer}.exp_probs_b.bias", tensor
        elif name.endswith("self_attn.sinks"):
            yield f"blk.{layer}.attn_sinks.weight", tensor
        elif ".mlp.experts.gate_up_proj" in name and family.startswith("gpt-oss"):
            # Gates and ups alternate, and rows of a file are outputs.
            end = "bias" if name.endswith("_bias") else "weight"
            tensor = tensor if end == "bias" else tensor.transpose(1, 2)
            yield f"blk.{layer}.ffn_gate_exps.{end}", tensor[:, ::2]
            yield f"blk.{layer}.ffn_up_exps.{end}", tensor[:, 1::2]
        elif ".mlp.experts.down_proj" in name and family.startswith("gpt-oss"):
            end = "bias" if name.endswith("_bias") else "weight"
            yield f"blk.{layer}.ffn_down_exps.{end}", tensor if end == "bias" else tensor.transpose(1, 2)
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
