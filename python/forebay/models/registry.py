"""Which family computes which architecture."""

from __future__ import annotations

from collections.abc import Callable

from forebay.attention.backend import AttentionBackend
from forebay.layers.decoder import Decoder
from forebay.layers.params import Parameters
from forebay.models import llama, qwen2, qwen3
from forebay.weights.config import ModelConfig
from forebay.weights.errors import UnsupportedModelError

FAMILIES: dict[str, Callable[[ModelConfig, Parameters, AttentionBackend], Decoder]] = {
    "LlamaForCausalLM": llama.build,
    "MistralForCausalLM": llama.build,
    "Qwen2ForCausalLM": qwen2.build,
    "Qwen3ForCausalLM": qwen3.build,
}


def build(config: ModelConfig, params: Parameters, backend: AttentionBackend, context_length: int) -> Decoder:
    """The model of `config`, its weights allocated and not filled; raises `UnsupportedModelError`."""
    if config.sliding_window is not None and config.sliding_window < context_length:
        raise UnsupportedModelError(
            f"the model attends to a sliding window of {config.sliding_window} positions, which is not supported: "
            f"serve it with a context length of at most that, not {context_length}"
        )
    return FAMILIES[config.architecture](config, params, backend)
