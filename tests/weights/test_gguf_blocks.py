"""Blocks of one type made of another's: which numbers stay, and how far the others may move."""

from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from forebay.weights.gguf_blocks import Bytes, as_blocks
from forebay.weights.quantization import COMPUTED_AS
from tests.weights.support import SCALES, random_blocks

Floats = np.ndarray[Any, np.dtype[np.float32]]
EXACT = {("Q4_0", "Q8_0"), ("Q5_0", "Q8_0"), ("IQ4_NL", "Q8_0")}
"""Types whose numbers another type has too."""
# What a matrix of one type is computed as, and what it is where it is fused with one of another.
PAIRS = sorted({*COMPUTED_AS.items(), *((stored, "Q8_0") for stored in COMPUTED_AS)})


def data_of(name: str, rows: int = 20) -> Bytes:
    """Rows of two blocks of random bytes, some of them with a scale of zero."""
    random = np.random.default_rng(11)
    blocks = random_blocks(name, 2 * rows, random)
    nothing = random.random(2 * rows) < 0.1
    for offset in SCALES.get(name, ()):
        blocks[nothing, offset : offset + 2] = 0
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
    if stored == kind or (stored, kind) in EXACT:
        np.testing.assert_array_equal(after, before)
        return
    largest = np.abs(before).max(axis=1, keepdims=True)
    # Of the same codes factors of half precision, the larger of Q4_K's of 15 steps; else half a step, and such a scale.
    bound = largest * (2**-9 if kind in ("Q4_1", "IQ4_NL") else 0.501 / 127 + 2**-11)
    assert (np.abs(after - before) <= bound + 1e-6).all()
    assert np.abs(after - before).max() > 0


def test_what_can_not_be_made_is_refused() -> None:
    with pytest.raises(ValueError, match="Q8_0 as Q4_1"):
        as_blocks(data_of("Q8_0"), "Q8_0", "Q4_1")
