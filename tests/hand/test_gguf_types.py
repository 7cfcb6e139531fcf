"""Matrices of every block type of GGUF: the hand in Rust against PyTorch's, which uses the package `gguf`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from benchmarks.described import described
from tests.hand.support import MiniBrain, Request, Sampling
from tests.hand.test_rust_hand import brain_of, rust, settings, torch_runner
from tests.weights.support import COMPUTED_AS, random_blocks, tiny_metadata, tiny_tokenizer, write_gguf

Q = gguf.GGMLQuantizationType
HIDDEN, INNER, VOCABULARY, COUNT = 256, 512, 258, 4
TYPES = [*COMPUTED_AS, "NVFP4"]
PROMPTS = [np.random.default_rng(number).integers(0, VOCABULARY, 5 + 9 * number).tolist() for number in range(3)]


def written(path: Path, stored: str) -> Path:
    """A layer of Llama whose matrices have blocks of one type."""
    random = np.random.default_rng(3)
    kind = gguf.GGMLQuantizationType[stored]
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    # The mean absolute weight of this type for a spread of 1. Spreads are chosen so that weights are small.
    usual = np.abs(dequantize(random_blocks(stored, 64, random, 0.125), kind)).mean() / 0.125

    def matrix(rows: int, columns: int) -> tuple[np.ndarray, Any]:
        spread = 0.06 / usual if stored not in ("MXFP4", "NVFP4") else 0.06
        blocks = random_blocks(stored, rows * columns // elements, random, spread)
        return blocks.reshape(rows, columns // elements * size), kind

    ones = np.ones(HIDDEN, np.float32), Q.F32
    tensors = {
        "token_embd.weight": (random.standard_normal((VOCABULARY, HIDDEN), dtype=np.float32), Q.F32),
        "output_norm.weight": ones,
        "output.weight": matrix(VOCABULARY, HIDDEN),
        "blk.0.attn_norm.weight": ones,
        "blk.0.attn_q.weight": matrix(HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": matrix(HIDDEN // 2, HIDDEN),
        "blk.0.attn_v.weight": matrix(HIDDEN // 2, HIDDEN),
        "blk.0.attn_output.weight": matrix(HIDDEN, HIDDEN),
        "blk.0.ffn_norm.weight": ones,
        "blk.0.ffn_gate.weight": matrix(INNER, HIDDEN),
        "blk.0.ffn_up.weight": matrix(INNER, HIDDEN),
        "blk.0.ffn_down.weight": matrix(HIDDEN, INNER),
    }
    sizes = {"block_count": 1, "embedding_length": HIDDEN, "feed_forward_length": INNER}
    heads = {"attention.key_length": 64, "attention.value_length": 64, "rope.dimension_count": 64}
    return write_gguf(path, "llama", tiny_metadata() | sizes | heads | tiny_tokenizer(), tensors)


def requests() -> list[Request]:
    return [Request(prompt, COUNT, Sampling(logprobs=5)) for prompt in PROMPTS]


@pytest.mark.parametrize("quantization", ["none", "auto"])
@pytest.mark.parametrize("name", TYPES)
def test_no_type_is_refused_and_both_hands_have_the_same_numbers(tmp_path: Path, name: str, quantization: str) -> None:
    """Computes with dequantised weights, and with blocks of a type that the compiled kernels support."""
    path = written(tmp_path / "m.gguf", name)
    wanted = None if quantization == "none" else quantization
    values = settings(described(path, tmp_path), quantization=wanted)
    found, expected = requests(), requests()
    with rust(tmp_path, values) as runner:
        brain_of(runner).serve(found, 7)
    told = (tmp_path / "stderr").read_text()
    in_blocks = wanted is not None and name in COMPUTED_AS
    assert ("computing with blocks of the file" in told) == in_blocks
    if in_blocks and COMPUTED_AS[name] != name:
        assert f"{name} as {COMPUTED_AS[name]}" in told
    MiniBrain(torch_runner({**values, "quantization": None}), 7).serve(expected, 7)
    for one, other in zip(found, expected, strict=True):
        if in_blocks:
            # Activations are rounded to 8 bits, and blocks of types without kernels to 4 or 8 bits. So the most likely
            # token may differ.
            np.testing.assert_allclose(np.sort(one.logprobs[0][1]), np.sort(other.logprobs[0][1]), atol=0.4)
            continue
        assert one.tokens == other.tokens
        for (ids, logprobs), (wanted_ids, wanted_logprobs) in zip(one.logprobs, other.logprobs, strict=True):
            assert list(ids) == list(wanted_ids)
            np.testing.assert_allclose(logprobs, wanted_logprobs, rtol=1e-4, atol=1e-4)
