"""Latent attention: both ways to compute it agree, and its pages can be copied as one piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.described import model_config
from forebay.attention import latent
from forebay.attention.backend import LatentHeads
from forebay.attention.cpu import QUERY_BLOCK
from forebay.attention.latent import absorbed, absorbed_chunk, naive, of_chunk
from forebay.device import open_device
from forebay.state.pages import KvPool, page_bytes
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


def chunk(queries: int, positions: int, heads: LatentHeads, dtype: torch.dtype = torch.float32) -> Any:
    """The arguments of the last queries of a context, in blocks as the backend makes them."""
    generator = torch.Generator().manual_seed(positions)
    q = torch.randn(queries, HEADS, NOPE + ROTARY, generator=generator).to(dtype)
    rows = torch.randn(positions, RANK + ROTARY, generator=generator).to(dtype)
    up = (torch.randn(HEADS, NOPE + VALUE, RANK, generator=generator) * 0.2).to(dtype)
    return q, rows, cut(queries, positions, dtype), up, heads


def cut(queries: int, positions: int, dtype: torch.dtype) -> list[latent.Block]:
    before = positions - queries
    blocks = []
    for begin in range(0, queries if before else 0, QUERY_BLOCK):
        end = min(begin + QUERY_BLOCK, queries)
        future = torch.full((end - begin, before + end), -torch.inf).triu_(before + begin + 1)
        blocks.append((begin, end, future.to(dtype)))
    return blocks


SHAPE = LatentHeads(NOPE, VALUE, RANK, 0.3)


@pytest.mark.parametrize(("queries", "positions"), [(1, 9), (5, 64), (300, 700), (64, 64)])
@pytest.mark.parametrize("at_once", [1, 3, HEADS])
def test_heads_are_computed_alike_however_many_at_once(
    monkeypatch: pytest.MonkeyPatch, at_once: int, queries: int, positions: int
) -> None:
    arguments = chunk(queries, positions, SHAPE)
    whole = naive(*arguments)
    monkeypatch.setattr(latent, "MADE", at_once * positions * (NOPE + VALUE))
    torch.testing.assert_close(naive(*arguments), whole, atol=1e-6, rtol=0)
    if queries < positions:
        torch.testing.assert_close(absorbed_chunk(*arguments), whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("queries", "positions"), [(2, 512), (10, 512), (40, 512), (200, 512), (3, 20), (64, 64)])
def test_a_chunk_is_computed_in_the_way_that_is_less_work(queries: int, positions: int) -> None:
    arguments = chunk(queries, positions, SHAPE)
    ways = [naive, absorbed_chunk] if queries < positions else [naive]
    flops = [work(way, arguments) for way in ways]
    assert work(of_chunk, arguments) == min(flops)
    assert queries == positions or len(set(flops)) == 2


def work(way: Callable[..., torch.Tensor], arguments: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        way(*arguments)
    return counter.get_total_flops()


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest new tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        # A view allocates no memory.
        new = () if func.is_view else found if isinstance(found, tuple) else (found,)
        self.elements = max([self.elements, *(tensor.numel() for tensor in new)])
        return found


@pytest.mark.parametrize(("queries", "way"), [(1024, "naive"), (100, "absorbed_chunk")])
def test_a_long_context_makes_no_keys_of_all_heads_at_once(
    monkeypatch: pytest.MonkeyPatch, queries: int, way: str
) -> None:
    """Uses the sizes of DeepSeek V3, and tensors that have only a shape."""
    positions, count, shape = 32768, 128, LatentHeads(128, 128, 512, 0.1)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.empty_like(q)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    with torch.device("meta"):
        q, rows, up = torch.empty(queries, count, 192), torch.empty(positions, 576), torch.empty(count, 256, 512)
        blocks = cut(queries, positions, torch.float32)
        with Largest() as largest:
            out = of_chunk(q, rows, blocks, up, shape)
        with Largest() as of_way:
            getattr(latent, way)(q, rows, blocks, up, shape)
    assert out.shape == (queries, count * 128)
    assert largest.elements == of_way.elements
    # Padding to the width that the attention kernel needs enlarges keys by half.
    assert largest.elements <= 1.5 * latent.MADE
    assert largest.elements < positions * count * 256 / 20


@pytest.mark.parametrize("queries", [8, 600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_matrix_of_scores_is_made(queries: int, dtype: torch.dtype) -> None:
    arguments = chunk(queries, 4096, SHAPE, dtype)
    with Largest() as largest:
        of_chunk(*arguments)
    assert largest.elements <= 4096 * max(RANK + ROTARY, HEADS * (NOPE + VALUE))
    assert largest.elements < HEADS * queries * 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_page_of_all_layers_is_one_piece(dtype: torch.dtype) -> None:
    model = model_config(hf_config(FAMILIES["deepseek-v3"][1], "DeepseekV3ForCausalLM"))
    assert isinstance(model.attention, Latent)
    pages, size, layers = 5, 4, model.num_hidden_layers
    pool = KvPool(model, pages, size, dtype, open_device("cpu", 1))
    assert pool.page_bytes == page_bytes(model, size, dtype) == layers * size * (RANK + ROTARY) * dtype.itemsize
    [piece] = pool.main.pieces()
    assert piece.shape == (pages, pool.page_bytes)
    for number, layer in enumerate(pool.layers):
        for page in range(pages):
            entry = page * pool.main.page_stride + 2
            layer.keys[entry] = 1 + number
            assert layer.values[entry].eq(1 + number).all()
            row = piece[page].clone().view(dtype).view(layers, size, -1)
            assert row[number, 2].eq(1 + number).all()
            assert int(row.ne(0).sum()) == (number + 1) * (RANK + ROTARY), "other layers' rows are elsewhere"
