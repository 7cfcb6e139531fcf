"""A mixture of experts of 1 GB, as a GGUF file in 4 bits: random weights in the shape of Qwen3-MoE.

    python -m benchmarks.expert_model          # makes benchmarks/.models/experts-Q4_0.gguf if it is missing

64 experts in each of 16 layers, of which a token uses 8: 1.6 billion weights, an eighth of them for a token. The
tokenizer is SmolLM2's. Codes are random, and scales are such that a layer's output is about as large as its input.
Answers make no sense, and every expert is chosen about as often as any other.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType

from benchmarks import models
from benchmarks.described import gguf_metadata, tokenizer_json

NAME = "experts"
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 16, 1024, 16, 4, 128
EXPERTS, PER_TOKEN, INNER = 64, 8, 512
CONTEXT = 8192
SEED = 0
_SHARED, _BLOCK = 32, 18
"""Weights of a block of Q4_0, and its bytes."""
_DEVIATION = 4.6
"""The standard deviation of codes that are equally likely, from -8 to 7."""

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]


def path() -> Path:
    """The path of the file."""
    return models.MODELS / f"{NAME}-Q4_0.gguf"


def blocks(random: np.random.Generator, *shape: int) -> Bytes:
    """A random matrix, or several, in Q4_0; outputs are about as large as inputs."""
    made = random.integers(0, 256, (*shape[:-1], shape[-1] // _SHARED, _BLOCK), np.uint8)
    scale = np.array([1 / (_DEVIATION * np.sqrt(shape[-1]))], np.float16)
    made[..., :2] = scale.view(np.uint8)
    return made.reshape(*shape[:-1], -1)


def build() -> Path:
    """Creates the file, and the tokenizer for the load generator, if they are missing."""
    return made_once(path(), NAME, _write)


def made_once(target: Path, name: str, write: Callable[[Path], None]) -> Path:
    """Creates a file with `write` if it is missing, and SmolLM2's tokenizer for the model `name`."""
    tokenizer = models.tokenizer_file(name)
    if not tokenizer.is_file():
        tokenizer.parent.mkdir(parents=True, exist_ok=True)
        models.write_json(tokenizer, tokenizer_json(gguf_metadata(models.default_model())))
    return once(target, write)


def once(target: Path, write: Callable[[Path], None]) -> Path:
    """Creates a file with `write` if it is missing."""
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        # The final name is given to complete files only.
        made = target.with_suffix(".made")
        write(made)
        made.rename(target)
    return target


def _write(target: Path) -> None:
    tokens = gguf_metadata(models.default_model())
    vocabulary = len(tokens["tokenizer.ggml.tokens"])
    writer = GGUFWriter(target, "qwen3moe")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(4 * HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(vocabulary)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(PER_TOKEN)
    writer.add_expert_feed_forward_length(INNER)
    writer.add_file_type(LlamaFileType.MOSTLY_Q4_0)
    models.add_tokenizer(writer, tokens)
    random = np.random.default_rng(SEED)

    def matrix(name: str, *shape: int) -> None:
        writer.add_tensor(f"{name}.weight", blocks(random, *shape), raw_dtype=GGMLQuantizationType.Q4_0)

    def ones(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))

    matrix("token_embd", vocabulary, HIDDEN)
    matrix("output", vocabulary, HIDDEN)
    ones("output_norm", HIDDEN)
    for layer in range(LAYERS):
        at = f"blk.{layer}"
        ones(f"{at}.attn_norm", HIDDEN)
        ones(f"{at}.ffn_norm", HIDDEN)
        ones(f"{at}.attn_q_norm", HEAD_DIM)
        ones(f"{at}.attn_k_norm", HEAD_DIM)
        matrix(f"{at}.attn_q", HEADS * HEAD_DIM, HIDDEN)
        matrix(f"{at}.attn_k", KV_HEADS * HEAD_DIM, HIDDEN)
        matrix(f"{at}.attn_v", KV_HEADS * HEAD_DIM, HIDDEN)
        matrix(f"{at}.attn_output", HIDDEN, HEADS * HEAD_DIM)
        router = random.standard_normal((EXPERTS, HIDDEN)) / np.sqrt(HIDDEN)
        writer.add_tensor(f"{at}.ffn_gate_inp.weight", router.astype(np.float32))
        matrix(f"{at}.ffn_gate_exps", EXPERTS, INNER, HIDDEN)
        matrix(f"{at}.ffn_up_exps", EXPERTS, INNER, HIDDEN)
        matrix(f"{at}.ffn_down_exps", EXPERTS, HIDDEN, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    print(build())
