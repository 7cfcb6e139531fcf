"""The families by architecture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from forebay.attention.backend import AttentionBackend
from forebay.attention.cpu import CpuAttention
from forebay.layers.decoder import Decoder
from forebay.layers.ops import Ops
from forebay.layers.params import Parameters
from forebay.layers.rotary import at_context
from forebay.models import deepseek, llama, qwen2_5_vl, qwen3_vl
from forebay.models.bert import Bert
from forebay.models.called import CalledModel
from forebay.weights.called import CalledConfig
from forebay.weights.config import ModelConfig
from forebay.weights.encoder_config import EncoderConfig
from forebay.weights.errors import ModelError, UnsupportedModelError
from forebay.weights.parts import Latent
from forebay.weights.pooling import Pooling


def _by_attention(config: ModelConfig, params: Parameters, backend: AttentionBackend, ops: Ops) -> Decoder:
    """Of Mistral 3's texts one has latent attention."""
    build = deepseek.build if isinstance(config.attention, Latent) else llama.build
    return build(config, params, backend, ops)


FAMILIES: dict[str, Callable[[ModelConfig, Parameters, AttentionBackend, Ops], Decoder]] = {
    "LlamaForCausalLM": llama.build,
    "MistralForCausalLM": llama.build,
    "Qwen2ForCausalLM": llama.build,
    "Qwen3ForCausalLM": llama.build,
    "Qwen3MoeForCausalLM": llama.build,
    "Glm4MoeForCausalLM": llama.build,
    "DeepseekV2ForCausalLM": deepseek.build,
    "DeepseekV3ForCausalLM": deepseek.build,
    "DeepseekV32ForCausalLM": deepseek.build,
    "GlmMoeDsaForCausalLM": deepseek.build,
    "Qwen2_5_VLForConditionalGeneration": qwen2_5_vl.build,
    "Qwen3VLForConditionalGeneration": qwen3_vl.build,
    "Qwen3VLMoeForConditionalGeneration": qwen3_vl.build,
    "Ministral3ForCausalLM": llama.build,
    "Mistral3ForConditionalGeneration": _by_attention,
    "Mistral4ForCausalLM": deepseek.build,
    "Phi3ForCausalLM": llama.build,
    "SmolLM3ForCausalLM": llama.build,
    "GraniteForCausalLM": llama.build,
    "GraniteMoeHybridForCausalLM": llama.build,
    "GraniteMoeForCausalLM": llama.build,
    "GraniteMoeSharedForCausalLM": llama.build,
    "MiniMaxM2ForCausalLM": llama.build,
    "SeedOssForCausalLM": llama.build,
    "Ernie4_5ForCausalLM": llama.build,
    "MixtralForCausalLM": llama.build,
    "Qwen2MoeForCausalLM": llama.build,
    "Ernie4_5_MoeForCausalLM": llama.build,
    "HYV3ForCausalLM": llama.build,
    "Glm4MoeLiteForCausalLM": deepseek.build,
    "KimiK25ForConditionalGeneration": deepseek.build,
}


def build(config: ModelConfig, params: Parameters, backend: AttentionBackend, ops: Ops, context_length: int) -> Decoder:
    """The model of `config`. Its weights are allocated and not filled. Raises `UnsupportedModelError`."""
    if config.sliding_window is not None and config.sliding_window < context_length:
        raise UnsupportedModelError(
            f"the model attends to a sliding window of {config.sliding_window} positions, which is not supported: "
            f"serve it with a context length of at most that, not {context_length}"
        )
    scaling = at_context(config.rope_scaling, context_length)
    config = replace(config, rope_scaling=None if scaling is None else dict(scaling))
    return FAMILIES[config.architecture](config, params, backend, ops)


def build_called(
    config: CalledConfig, directory: str, params: Parameters, ops: Ops, context_length: int
) -> CalledModel:
    """The model of a folder that transformers computes, without its weights. Raises `UnsupportedModelError`."""
    return CalledModel(config, directory, params, CpuAttention(), ops, context_length)


def build_encoder(config: EncoderConfig, pooling: Pooling | None, params: Parameters) -> Bert:
    """The encoder of `config`. Its weights are allocated and not filled. Raises `ModelError` unless it pools."""
    if pooling is None:
        raise ModelError(f"{config.architecture} can't generate, and the config has no `pooling`")
    return Bert(config, pooling, params)
