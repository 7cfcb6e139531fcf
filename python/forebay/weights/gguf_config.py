"""GGUF metadata as a Hugging Face `config.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from forebay.weights.errors import ModelError, UnsupportedModelError
from forebay.weights.gguf_families import family_keys, layer_count, required, shortest
from forebay.weights.gguf_file import GgufFiles

__all__ = ["eos_token_ids", "hf_config"]

_DEFAULT_FREQ_BASE = 10000.0
# Where a file names no end of turn, these control tokens are it (llama.cpp goes by the same texts).
_END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<|end_of_turn|>")
_CONTROL = 3
_POOLINGS = ("", "mean", "cls", "last", "rank")


def hf_config(files: GgufFiles) -> dict[str, Any]:
    """The model's `config.json`, made of its metadata. Raises UnsupportedModelError or ModelError."""
    family = family_keys(files)
    if not files.get("attention.causal", True):
        raise UnsupportedModelError("positions that see what is behind them (attention.causal) are not supported")
    embedding = files.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError("the GGUF file has no token embedding: it isn't a whole model")
    context = int(required(files, "context_length"))
    theta = float(files.get("rope.freq_base", _DEFAULT_FREQ_BASE))
    window = files.get("attention.sliding_window")
    eos = eos_token_ids(files)
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": int(required(files, "embedding_length")),
        "intermediate_size": int(required(files, "feed_forward_length")),
        "num_hidden_layers": layer_count(files),
        "hidden_act": "silu",
        "rms_norm_eps": shortest(float(required(files, "attention.layer_norm_rms_epsilon"))),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(files, theta, family, context),
        "max_position_embeddings": context,
        "sliding_window": int(window) if window else None,
        "tie_word_embeddings": "output.weight" not in files.tensors,
        "bos_token_id": files.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "pad_token_id": files.metadata.get("tokenizer.ggml.padding_token_id"),
        **family,
        **_pooling_type(files),
    }


def _pooling_type(files: GgufFiles) -> dict[str, str]:
    """The way of pooling that the file states (`gguf.PoolingType`)."""
    number = files.get("pooling_type") or 0
    if number not in range(len(_POOLINGS)):
        raise UnsupportedModelError(f"pooling_type {number} is not supported")
    return {"pooling_type": _POOLINGS[number]} if number else {}


def eos_token_ids(files: GgufFiles) -> tuple[int, ...]:
    """The tokens that end a generation: the ends of a sequence, of a turn and of a message."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [files.metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    if found[1] is None:
        tokens = files.metadata.get("tokenizer.ggml.tokens", [])
        types = files.metadata.get("tokenizer.ggml.token_type", [])
        found += [
            index
            for index, (token, kind) in enumerate(zip(tokens, types, strict=False))
            if kind == _CONTROL and token in _END_OF_TURN
        ]
    return tuple(dict.fromkeys(int(token) for token in found if token is not None))


def _rope_scaling(files: GgufFiles, theta: float, family: Mapping[str, Any], context: int) -> dict[str, Any] | None:
    latent = "kv_lora_rank" in family
    factors = files.tensors.get("rope_freqs.weight")
    if factors is not None:
        rotated = family["qk_rope_head_dim"] if latent else family["head_dim"]
        return _llama3_scaling(factors.data.view(np.float32).ravel().astype(np.float64), theta, rotated)
    kind = files.get("rope.scaling.type")
    factor = float(files.get("rope.scaling.factor") or files.get("rope.scale_linear") or 1.0)
    if kind in (None, "linear"):
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    if kind == "none":
        return None
    if kind != "yarn":
        raise UnsupportedModelError(f"rope scaling {kind!r} is not supported; supported: linear, yarn")
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": int(files.get("rope.scaling.original_context_length") or context / factor),
    }
    for key in ("beta_fast", "beta_slow"):
        value = files.get(f"rope.scaling.yarn_{key}")
        if value is not None:
            scaling[key] = float(value)
    weight = files.get("rope.scaling.yarn_log_multiplier")
    if latent and weight is not None:
        # A tenth of it is written, and it stands for both weights: no model is known in which they differ.
        scaling["mscale"] = scaling["mscale_all_dim"] = shortest(10 * shortest(float(weight)))
    multiplier = files.get("rope.scaling.attn_factor") or files.get("rope.scaling.yarn_attn_factor")
    if multiplier is not None and float(multiplier) != 1.0:
        if latent:
            raise UnsupportedModelError("yarn with an attn_factor is not supported with latent attention")
        # GGUF's factor multiplies YaRN's own, Hugging Face's replaces it.
        scaling["attention_factor"] = float(multiplier) * (0.1 * math.log(factor) + 1.0)
    return scaling


def _llama3_scaling(factors: np.ndarray[Any, Any], theta: float, head_dim: int) -> dict[str, Any] | None:
    """The parameters of Llama 3's scaling that give these divisors of the frequencies, [head_dim / 2].

    Between its two bounds the scaling is linear in `1 / wavelength`, so the parameters can be solved for. They are only
    known up to a common scale, which is fixed by `low_freq_factor` 1, the value of every published model.
    """
    if factors.shape != (head_dim // 2,):
        raise ModelError(f"rope_freqs.weight has {factors.size} elements, not {head_dim // 2}")
    if np.all(factors == 1.0):
        return None
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    factor = float(factors.max())
    candidates = [(8192, 4.0)]
    middle = (factors > 1.0) & (factors < factor)
    if middle.sum() >= 2:
        smooth = (1.0 / factors[middle] - 1.0 / factor) / (1.0 - 1.0 / factor)
        slope, intercept = np.polyfit(1.0 / wavelengths[middle], smooth, 1)
        candidates.append((round(slope / -intercept), round(1.0 - 1.0 / intercept, 4)))
    for original, high in candidates:
        scaling = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }
        if np.allclose(_llama3_factors(scaling, wavelengths), factors, rtol=1e-5, atol=0):
            return scaling
    raise UnsupportedModelError("the frequency factors in rope_freqs.weight are not those of Llama 3's rope scaling")


def _llama3_factors(scaling: dict[str, Any], wavelengths: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / factor + smooth))
