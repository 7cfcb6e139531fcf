"""Dequantised tensors, compared with independent arithmetic, and whole models, compared with transformers."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from benchmarks.described import described, refused
from forebay.weights.config import ModelConfig, config_of
from forebay.weights.load import iter_weights, weight_shapes
from forebay.weights.manifest import _AT_ONCE, MatrixPart, Place
from forebay.weights.shards import Cut, Part
from tests.weights.support import smollm2, tiny_gguf, tiny_metadata, tiny_tensors, tiny_tokenizer, write_gguf

Scalar = Callable[[bytes], list[float]]


def half(raw: bytes) -> float:
    return float(np.frombuffer(raw, np.float16)[0])


def nibbles(raw: bytes) -> list[int]:
    return [byte & 15 for byte in raw] + [byte >> 4 for byte in raw]


def bits(raw: bytes) -> list[int]:
    return [raw[i // 8] >> (i % 8) & 1 for i in range(8 * len(raw))]


def q4_0(b: bytes) -> list[float]:
    return [half(b[:2]) * (q - 8) for q in nibbles(b[2:])]


def q4_1(b: bytes) -> list[float]:
    return [half(b[:2]) * q + half(b[2:4]) for q in nibbles(b[4:])]


def q5_0(b: bytes) -> list[float]:
    return [half(b[:2]) * ((q | high << 4) - 16) for q, high in zip(nibbles(b[6:]), bits(b[2:6]), strict=True)]


def q5_1(b: bytes) -> list[float]:
    high_bits = bits(b[4:8])
    return [half(b[:2]) * (q | high << 4) + half(b[2:4]) for q, high in zip(nibbles(b[8:]), high_bits, strict=True)]


def q8_0(b: bytes) -> list[float]:
    return [half(b[:2]) * q for q in np.frombuffer(b[2:], np.int8).tolist()]


def scale_and_minimum(packed: bytes, part: int) -> tuple[int, int]:
    """One of eight pairs of 6-bit values. The first four pairs are whole, the others in nibbles and spare bits."""
    if part < 4:
        return packed[part] & 63, packed[part + 4] & 63
    return (packed[part + 4] & 15) | (packed[part - 4] >> 6) << 4, packed[part + 4] >> 4 | (packed[part] >> 6) << 4


def q4_k(b: bytes) -> list[float]:
    values = []
    for part in range(8):
        scale, minimum = scale_and_minimum(b[4:16], part)
        for i in range(32):
            byte = b[16 + part // 2 * 32 + i]
            q = byte >> 4 if part % 2 else byte & 15
            values.append(half(b[:2]) * scale * q - half(b[2:4]) * minimum)
    return values


def q5_k(b: bytes) -> list[float]:
    values = []
    for part in range(8):
        scale, minimum = scale_and_minimum(b[4:16], part)
        for i in range(32):
            byte = b[48 + part // 2 * 32 + i]
            q = (byte >> 4 if part % 2 else byte & 15) | (b[16 + i] >> part & 1) << 4
            values.append(half(b[:2]) * scale * q - half(b[2:4]) * minimum)
    return values


def q6_k(b: bytes) -> list[float]:
    low, high, scales, d = b[:128], b[128:192], np.frombuffer(b[192:208], np.int8).tolist(), half(b[208:])
    values = []
    for n in range(256):
        group, within = divmod(n, 128)
        quarter, i = divmod(within, 32)
        byte = low[group * 64 + quarter % 2 * 32 + i]
        q = (byte >> 4 if quarter >= 2 else byte & 15) | (high[group * 32 + i] >> 2 * quarter & 3) << 4
        values.append(d * scales[n // 16] * (q - 32))
    return values


# The offsets of the half-precision scales in a block, and the type's definition, one element at a time.
BLOCKS: dict[str, tuple[list[int], Scalar]] = {
    "Q4_0": ([0], q4_0),
    "Q4_1": ([0, 2], q4_1),
    "Q5_0": ([0], q5_0),
    "Q5_1": ([0, 2], q5_1),
    "Q8_0": ([0], q8_0),
    "Q4_K": ([0, 2], q4_k),
    "Q5_K": ([0, 2], q5_k),
    "Q6_K": ([208], q6_k),
}


def placed(path: Path, data: np.ndarray, kind: str, shape: tuple[int, ...], **more: Any) -> Place:
    """A weight in a separate file, after some unrelated bytes."""
    path.write_bytes(bytes(7) + data.tobytes())
    return Place(str(path), 7, data.nbytes, kind, MatrixPart(shape, **more))


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_random_bytes_follow_their_definition(tmp_path: Path, name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    scales, scalar = BLOCKS[name]
    random = np.random.default_rng(7)
    blocks = random.integers(0, 256, (40, size), dtype=np.uint8)
    for offset in scales:
        # Blocks may have any bytes, but no real model has a scale of NaN.
        blocks[:, offset : offset + 2] = random.normal(0, 0.1, (40, 1)).astype(np.float16).view(np.uint8)
    place = placed(tmp_path / "x", blocks, name, (20, 2 * elements))
    expected = np.array([scalar(block.tobytes()) for block in blocks]).reshape(20, 2 * elements)
    np.testing.assert_allclose(place.read().numpy(), expected, rtol=1e-5, atol=1e-6)
    cut = Cut(Part(20, 3, 17), Part(2 * elements, elements - 5, elements + 9))
    np.testing.assert_allclose(place.read(cut).numpy(), expected[cut.places], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "error"), [("F32", 0), ("F16", 1e-3), ("BF16", 1e-2), ("Q8_0", 0.02), ("Q5_1", 0.2)])
def test_what_was_quantised_comes_back(tmp_path: Path, name: str, error: float) -> None:
    values = np.random.default_rng(3).standard_normal((6, 64), dtype=np.float32)
    place = placed(tmp_path / "x", quantize(values, gguf.GGMLQuantizationType[name]), name, (6, 64))
    np.testing.assert_allclose(place.read().float().numpy(), values, rtol=0, atol=4 * error)
    cut = Cut(Part(6, 2, 5), Part(64, 3, 33))
    np.testing.assert_allclose(place.read(cut).float().numpy(), values[2:5, 3:33], rtol=0, atol=4 * error)


def test_a_weight_may_be_a_part_of_a_range_and_its_numbers_changed(tmp_path: Path) -> None:
    values = np.arange(6 * 8, dtype=np.float32).reshape(6, 8)

    def read(shape: tuple[int, ...], cut: Cut | None = None, **more: Any) -> np.ndarray:
        return placed(tmp_path / "x", values, "F32", shape, **more).read(cut).numpy()

    np.testing.assert_array_equal(read((8, 6), matrix=(6, 8), transposed=True, rows=(0, 1)), values.T)
    odd = read((3, 8), matrix=(6, 8), rows=(1, 2))
    np.testing.assert_array_equal(odd, values[1::2])
    rows = Cut(Part(3, 1, 3), Part(8, 2, 5))
    np.testing.assert_array_equal(read((3, 8), rows, matrix=(6, 8), rows=(1, 2)), odd[1:3, 2:5])
    np.testing.assert_array_equal(read((6, 8), times=0.5, plus=1.0), values * 0.5 + 1)
    # The six rows of the head are stored in the order 0, 3, 1, 4, 2, 5.
    np.testing.assert_array_equal(read((6, 8), pairs=1), values[[0, 2, 4, 1, 3, 5]])


def test_a_large_tensor_is_dequantised_in_pieces(tmp_path: Path) -> None:
    """The temporary memory does not grow with the tensor."""
    kind = gguf.GGMLQuantizationType.Q8_0
    stored = quantize(np.random.default_rng(4).standard_normal((2500, 1600), dtype=np.float32), kind)
    place = placed(tmp_path / "x", stored, "Q8_0", (2500, 1600))
    expected = dequantize(stored, kind)
    tracemalloc.start()
    found = place.read()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert np.array_equal(found.numpy(), expected)
    # PyTorch allocates the result, so tracemalloc does not count it.
    assert most < 3 * 4 * _AT_ONCE < found.nbytes


def test_other_types_are_refused(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_1
    blocks = np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
    tensors = tiny_tensors("llama", tied=True) | {"blk.0.attn_q.weight": (blocks, kind)}
    path = write_gguf(tmp_path / "x.gguf", "llama", tiny_metadata(), tensors)
    assert "the type 9 of tensor" in refused(path, tmp_path)


def test_a_tensor_without_a_place_is_an_error(tmp_path: Path) -> None:
    tensors = tiny_tensors("llama", tied=True)
    tensors["blk.0.attn_sinks.weight"] = tensors["output_norm.weight"]
    path = write_gguf(tmp_path / "x.gguf", "llama", tiny_metadata() | tiny_tokenizer(), tensors)
    assert "'blk.0.attn_sinks.weight' that the model has no place for" in refused(path, tmp_path)


def same_weights_as_transformers(path: Path, cache: Path) -> None:
    # As `from_pretrained(gguf_file=...)` does, which would need one more package.
    with torch.device("meta"):
        shape = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        empty = AutoModelForCausalLM.from_config(shape)  # type: ignore[no-untyped-call]
    read = load_gguf_checkpoint(path, return_tensors=True, model_to_load=empty)  # type: ignore[no-untyped-call]
    expected = read["tensors"]
    model = described(path, cache)
    config = config_of(model["shape"])
    assert isinstance(config, ModelConfig)
    found = dict(iter_weights(model, config))
    assert found.keys() == expected.keys()
    assert len(weight_shapes(model)) == len(found)
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
    wanted = {name for name in empty.state_dict() if name != "lm_head.weight" or not config.tie_word_embeddings}
    assert found.keys() == wanted


def test_the_default_model_has_the_weights_that_transformers_reads(tmp_path: Path) -> None:
    same_weights_as_transformers(smollm2(), tmp_path)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_every_family_has_the_weights_that_transformers_reads(tmp_path: Path, architecture: str, tied: bool) -> None:
    same_weights_as_transformers(tiny_gguf(tmp_path / "x.gguf", architecture, tied=tied), tmp_path)
