"""Latent attention: its two ways are one, and its pages are pieces."""

from __future__ import annotations

import pytest
import torch

from forebay.attention.backend import LatentHeads
from forebay.attention.latent import absorbed, naive
from forebay.device import open_device
from forebay.state.pages import KvPool, page_bytes
from forebay.weights.config import ModelConfig
from forebay.weights.parts import Latent
from tests.hand.support import FAMILIES, hf_config

HEADS, NOPE, ROTARY, VALUE, RANK = 4, 16, 8, 12, 32


@pytest.mark.parametrize("value", [VALUE, NOPE + ROTARY, 40])
@pytest.mark.parametrize("positions", [1, 7, 64])
def test_naive_and_absorbed_are_equal(positions: int, value: int) -> None:
    generator = torch.Generator().manual_seed(positions)
    heads = LatentHeads(NOPE, value, RANK, 0.3)
    q = torch.randn(positions, HEADS, NOPE + ROTARY, generator=generator)
    rows = torch.randn(positions, RANK + ROTARY, generator=generator)
    up = torch.randn(HEADS, NOPE + value, RANK, generator=generator) * 0.2
    whole = naive(q, rows, [], up, heads)
    for last in range(positions):
        one = absorbed(q[last : last + 1], rows[None, : last + 1], None, up, heads)
        torch.testing.assert_close(one[0], whole[last], atol=1e-5, rtol=0)


def test_padding_of_a_group_changes_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    heads = LatentHeads(NOPE, VALUE, RANK, 0.3)
    q = torch.randn(2, HEADS, NOPE + ROTARY, generator=generator)
    rows = torch.randn(2, 9, RANK + ROTARY, generator=generator)
    up = torch.randn(HEADS, NOPE + VALUE, RANK, generator=generator) * 0.2
    mask = torch.zeros(2, 1, 1, 9)
    mask[1, ..., 5:] = -torch.inf
    both = absorbed(q, rows, mask, up, heads)
    alone = absorbed(q[1:], rows[1:, :5], None, up, heads)
    torch.testing.assert_close(both[1:], alone, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_page_of_all_layers_is_one_piece(dtype: torch.dtype) -> None:
    model = ModelConfig.from_dict(hf_config(FAMILIES["deepseek-v3"][1], "DeepseekV3ForCausalLM"))
    assert isinstance(model.attention, Latent)
    pages, size, layers = 5, 4, model.num_hidden_layers
    pool = KvPool(model, pages, size, dtype, open_device("cpu", 1))
    assert pool.page_bytes == page_bytes(model, size, dtype) == layers * size * (RANK + ROTARY) * dtype.itemsize
    [piece] = pool.pieces()
    assert piece.shape == (pages, pool.page_bytes)
    for number, layer in enumerate(pool.layers):
        for page in range(pages):
            entry = page * pool.main.page_stride + 2
            layer.keys[entry] = 1 + number
            assert layer.values[entry].eq(1 + number).all()
            row = torch.from_numpy(piece[page].copy()).view(dtype).view(layers, size, -1)
            assert row[number, 2].eq(1 + number).all()
            assert int(row.ne(0).sum()) == (number + 1) * (RANK + ROTARY), "no other layer's rows"
