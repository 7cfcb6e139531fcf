"""A gpt-oss of 1.2 billion weights in its experts, as a GGUF file in MXFP4: random weights.

    python -m benchmarks.gpt_oss_model         # makes benchmarks/.models/gpt-oss-MXFP4.gguf if it is missing

32 experts in each of 12 layers, of which a token uses 4, as in gpt-oss-20b. Other weights have blocks of Q8_0. The
tokenizer is SmolLM2's. Codes are random, and scales are such that a product's output is about as large as its input.
Answers make no sense.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, RopeScalingType

from benchmarks import models
from benchmarks.described import gguf_metadata
from benchmarks.expert_model import Bytes, made_once

NAME = "gpt-oss"
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 12, 1024, 16, 4, 64
EXPERTS, PER_TOKEN, INNER = 32, 4, 1024
CONTEXT, WINDOW = 8192, 128
SEED = 0
_SHARED, _BIAS = 32, 127
"""Weights of a block, and the exponent's bias."""
_DEVIATIONS = {GGMLQuantizationType.MXFP4: 2.93, GGMLQuantizationType.Q8_0: 73.9}
"""Standard deviations of random codes."""


def path() -> Path:
    """The path of the file."""
    return models.MODELS / f"{NAME}-MXFP4.gguf"


def blocks(random: np.random.Generator, kind: GGMLQuantizationType, *shape: int) -> Bytes:
    """A random matrix, or several; outputs are about as large as inputs."""
    scale = 1 / (_DEVIATIONS[kind] * np.sqrt(shape[-1]))
    size = (*shape[:-1], shape[-1] // _SHARED)
    if kind == GGMLQuantizationType.MXFP4:
        made = random.integers(0, 256, (*size, 1 + _SHARED // 2), np.uint8)
        made[..., 0] = _BIAS + round(np.log2(scale))
    else:
        made = random.integers(0, 256, (*size, 2 + _SHARED), np.uint8)
        made[..., :2] = np.array([scale], np.float16).view(np.uint8)
    return made.reshape(*shape[:-1], -1)


def build() -> Path:
    """Creates the file, and the tokenizer for the load generator, if they are missing."""
    return made_once(path(), NAME, _write)


def _write(target: Path) -> None:
    tokens = gguf_metadata(models.default_model())
    vocabulary = len(tokens["tokenizer.ggml.tokens"])
    writer = GGUFWriter(target, "gpt-oss")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(150000.0)
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(2.0)
    writer.add_rope_scaling_orig_ctx_len(CONTEXT // 2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    writer.add_sliding_window(WINDOW)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(PER_TOKEN)
    writer.add_expert_feed_forward_length(INNER)
    writer.add_file_type(LlamaFileType.MOSTLY_MXFP4_MOE)
    models.add_tokenizer(writer, tokens)
    random = np.random.default_rng(SEED)

    def matrix(name: str, *shape: int, kind: GGMLQuantizationType = GGMLQuantizationType.Q8_0) -> None:
        writer.add_tensor(f"{name}.weight", blocks(random, kind, *shape), raw_dtype=kind)

    def numbers(name: str, *shape: int, size: float = 0.1, mean: float = 0.0) -> None:
        values = random.standard_normal(shape, dtype=np.float32) * np.float32(size) + np.float32(mean)
        writer.add_tensor(name, values)

    matrix("token_embd", vocabulary, HIDDEN)
    matrix("output", vocabulary, HIDDEN)
    numbers("output_norm.weight", HIDDEN, mean=1.0)
    for layer in range(LAYERS):
        at = f"blk.{layer}"
        for norm in ("attn_norm", "post_attention_norm"):
            numbers(f"{at}.{norm}.weight", HIDDEN, mean=1.0)
        for name, rows, columns in (
            ("attn_q", HEADS * HEAD_DIM, HIDDEN),
            ("attn_k", KV_HEADS * HEAD_DIM, HIDDEN),
            ("attn_v", KV_HEADS * HEAD_DIM, HIDDEN),
            ("attn_output", HIDDEN, HEADS * HEAD_DIM),
        ):
            matrix(f"{at}.{name}", rows, columns)
            numbers(f"{at}.{name}.bias", rows)
        numbers(f"{at}.attn_sinks.weight", HEADS, size=1.0)
        numbers(f"{at}.ffn_gate_inp.weight", EXPERTS, HIDDEN, size=HIDDEN**-0.5)
        numbers(f"{at}.ffn_gate_inp.bias", EXPERTS)
        for kind, rows, columns in (("gate", INNER, HIDDEN), ("up", INNER, HIDDEN), ("down", HIDDEN, INNER)):
            matrix(f"{at}.ffn_{kind}_exps", EXPERTS, rows, columns, kind=GGMLQuantizationType.MXFP4)
            numbers(f"{at}.ffn_{kind}_exps.bias", EXPERTS, rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    print(build())
