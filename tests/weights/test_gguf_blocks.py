"""Blocks of one type made of another's: which numbers stay, and how far the others may move."""

from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from forebay.weights.gguf_blocks import Bytes, as_blocks
from forebay.weights.quantization import COMPUTED_AS
from tests.weights.test_gguf_tensors import BLOCKS

Floats = np.ndarray[Any, np.dtype[np.float32]]
EXACT = {("Q8_0", "Q8_0"), ("Q4_0", "Q4_0"), ("Q4_1", "Q4_1"), ("Q4_0", "Q8_0"), ("Q5_0", "Q8_0")}
# What a matrix of one type is computed as, and what it is where it is fused with one of another.
PAIRS = sorted({*COMPUTED_AS.items(), *((stored, "Q8_0") for stored in COMPUTED_AS)})


def data_of(name: str, rows: int = 20) -> Bytes:
    """Rows of two blocks of random bytes, some of them with a scale of zero."""
    kind = gguf.GGMLQuantizationType[name]
    _, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(11)
    blocks = random.integers(0, 256, (2 * rows, size), dtype=np.uint8)
    for offset in BLOCKS[name][0]:
        scales = random.normal(0, 0.1, (2 * rows, 1)) * (random.random((2 * rows, 1)) > 0.1)
        blocks[:, offset : offset + 2] = scales.astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def by_32(values: Floats) -> Floats:
    return values.reshape(-1, 32)


@pytest.mark.parametrize(("stored", "kind"), PAIRS)
def test_numbers_stay_where_they_were(stored: str, kind: str) -> None:
    given = data_of(stored)
    before = by_32(dequantize(given, gguf.GGMLQuantizationType[stored]))
    made = as_blocks(given, stored, kind)
    assert made.shape[0] == given.shape[0]
    after = by_32(dequantize(made, gguf.GGMLQuantizationType[kind]))
    if (stored, kind) in EXACT:
        np.testing.assert_array_equal(after, before)
        return
    largest = np.abs(before).max(axis=1, keepdims=True)
    # Of Q4_K two factors of half precision, the larger of 15 steps; else half a step, and a scale of half precision.
    bound = largest * 2**-9 if stored == "Q4_K" and kind == "Q4_1" else largest * (0.501 / 127 + 2**-11)
    assert (np.abs(after - before) <= bound + 1e-6).all()
    assert np.abs(after - before).max() > 0


def test_what_can_not_be_made_is_refused() -> None:
    with pytest.raises(ValueError, match="Q8_0 as Q4_1"):
        as_blocks(data_of("Q8_0"), "Q8_0", "Q4_1")
