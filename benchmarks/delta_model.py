"""A model in the shape of Qwen3.5-0.8B, as a GGUF file: random weights in blocks of Q8_0.

    python -m benchmarks.delta_model         # makes benchmarks/.models/qwen3.5-shape-Q8_0.gguf if it is missing

24 layers, of which three of four are gated delta nets. The tokenizer is SmolLM2's, so the vocabulary is a fifth of the
real one. Codes are random, and scales are such that a product's output is about as large as its input. Answers make no
sense.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType

from benchmarks import models
from benchmarks.described import gguf_metadata
from benchmarks.expert_model import made_once
from benchmarks.gpt_oss_model import blocks

NAME = "qwen3.5-shape"
LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 24, 1024, 3584, 8, 2, 256
CYCLE, ROTATED = 4, 64
"""One of this many layers has attention, whose RoPE rotates this many elements of a head."""
STATE_HEADS, STATE_DIM, TAPS = 16, 128, 4
CONTEXT = 8192
SEED = 0


def path() -> Path:
    """The path of the file."""
    return models.MODELS / f"{NAME}-Q8_0.gguf"


def build() -> Path:
    """Creates the file, and the tokenizer for the load generator, if they are missing."""
    return made_once(path(), NAME, _write)


def _write(target: Path) -> None:
    tokens = gguf_metadata(models.default_model())
    vocabulary = len(tokens["tokenizer.ggml.tokens"])
    inner = STATE_HEADS * STATE_DIM
    writer = GGUFWriter(target, "qwen35")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_dimension_count(ROTATED)
    # For text, all three position numbers of a token are the same.
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_rope_freq_base(10_000_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(vocabulary)
    writer.add_ssm_conv_kernel(TAPS)
    writer.add_ssm_state_size(STATE_DIM)
    writer.add_ssm_group_count(STATE_HEADS)
    writer.add_ssm_time_step_rank(STATE_HEADS)
    writer.add_ssm_inner_size(inner)
    writer.add_full_attention_interval(CYCLE)
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0)
    models.add_tokenizer(writer, tokens)
    random = np.random.default_rng(SEED)

    def matrix(name: str, rows: int, columns: int) -> None:
        kind = GGMLQuantizationType.Q8_0
        writer.add_tensor(f"{name}.weight", blocks(random, kind, rows, columns), raw_dtype=kind)

    def numbers(name: str, *shape: int, size: float = 0.1, mean: float = 0.0) -> None:
        values = random.standard_normal(shape, dtype=np.float32) * np.float32(size) + np.float32(mean)
        writer.add_tensor(name, values)

    matrix("token_embd", vocabulary, HIDDEN)
    numbers("output_norm.weight", HIDDEN, mean=1.0)
    for layer in range(LAYERS):
        at = f"blk.{layer}"
        for norm in ("attn_norm", "post_attention_norm"):
            numbers(f"{at}.{norm}.weight", HIDDEN, mean=1.0)
        if (layer + 1) % CYCLE:
            matrix(f"{at}.attn_qkv", 3 * inner, HIDDEN)
            matrix(f"{at}.attn_gate", inner, HIDDEN)
            matrix(f"{at}.ssm_beta", STATE_HEADS, HIDDEN)
            matrix(f"{at}.ssm_alpha", STATE_HEADS, HIDDEN)
            matrix(f"{at}.ssm_out", HIDDEN, inner)
            numbers(f"{at}.ssm_conv1d.weight", 3 * inner, TAPS, size=0.5)
            numbers(f"{at}.ssm_dt.bias", STATE_HEADS)
            numbers(f"{at}.ssm_norm.weight", STATE_DIM, mean=1.0)
            # State decays by a factor between 0.5 and 1 a step.
            writer.add_tensor(f"{at}.ssm_a", -random.uniform(0.01, 1.0, STATE_HEADS).astype(np.float32))
        else:
            # Each head has its query, followed by its gate.
            matrix(f"{at}.attn_q", 2 * HEADS * HEAD_DIM, HIDDEN)
            matrix(f"{at}.attn_k", KV_HEADS * HEAD_DIM, HIDDEN)
            matrix(f"{at}.attn_v", KV_HEADS * HEAD_DIM, HIDDEN)
            matrix(f"{at}.attn_output", HIDDEN, HEADS * HEAD_DIM)
            numbers(f"{at}.attn_q_norm.weight", HEAD_DIM, mean=1.0)
            numbers(f"{at}.attn_k_norm.weight", HEAD_DIM, mean=1.0)
        matrix(f"{at}.ffn_gate", INNER, HIDDEN)
        matrix(f"{at}.ffn_up", INNER, HIDDEN)
        matrix(f"{at}.ffn_down", HIDDEN, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    print(build())
