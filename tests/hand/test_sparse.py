"""Sparse attention: chosen rows at any position of a pool, pages of two parts, and rows of a step that are divided."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.described import model_config
from forebay.attention import latent, sparse
from forebay.attention.backend import NO_ROW, LatentHeads
from forebay.attention.cpu import CpuAttention
from forebay.compute.pieces import pieces
from forebay.compute.rows import Rows
from forebay.device import open_device
from forebay.device.watch import NoWaits
from forebay.state.pages import KvPool, page_bytes
from tests.hand.support import FAMILIES, hf_config

HEADS = LatentHeads(16, 12, 32, 0.3)
WIDTH = 40
"""The width of a row."""


# Rows.


def test_positions_are_found_by_the_page_table() -> None:
    size, stride = 4, 12
    table = torch.tensor([[9, 9, 9, 9], [3, 0, 7, -1]], dtype=torch.int32)
    positions = torch.tensor([[0, 3, 5, 11], [4, 10, NO_ROW, NO_ROW], [2, 12, 15, NO_ROW]])
    slots = torch.tensor([1, 1, 1])
    with NoWaits():
        found = sparse.resolve(positions, slots, table, size, stride)
    rows = [[3 * stride, 3 * stride + 3, 1, 7 * stride + 3], [0, 7 * stride + 2, NO_ROW, NO_ROW]]
    assert found[:2].tolist() == rows
    # A page that was never written to the table raises an error instead of losing a row, even if a page is one row.
    assert NO_ROW not in found[2, :3].tolist()
    with pytest.raises(IndexError):
        sparse.gathered(torch.zeros(200, WIDTH), found)
    single = sparse.resolve(torch.tensor([[1]]), torch.tensor([0]), torch.tensor([[0, -1]], dtype=torch.int32), 1, 1)
    with pytest.raises(IndexError):
        sparse.gathered(torch.zeros(200, WIDTH), single)


class Case:
    """Queries, and the rows that each of them attends to."""

    def __init__(self, count: int, top_k: int, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(5)
        self.q = torch.randn(count, 4, 24, generator=generator).to(dtype)
        self.up = (torch.randn(4, 28, 32, generator=generator) * 0.2).to(dtype)
        self.rows = torch.randn(count, top_k, WIDTH, generator=generator).to(dtype)
        self.kept = torch.rand(count, top_k, generator=generator) < 0.7
        self.kept[:, 0] = True

    def attend(self, seed: int, some: slice = slice(None)) -> torch.Tensor:
        """Attends to rows at random positions of a pool in which all other rows are NaN."""
        kept, rows = self.kept[some], self.rows[some]
        pool = torch.full((kept.numel() * 2, WIDTH), torch.nan, dtype=rows.dtype)
        place = torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed))[: kept.numel()]
        chosen = torch.where(kept, place.view(kept.shape), NO_ROW)
        pool[place] = torch.where(kept[..., None], rows, torch.nan).view(-1, WIDTH)
        with NoWaits():
            return sparse.attend(self.q[some], pool, chosen, self.up, HEADS)


@pytest.mark.parametrize("block", [64 << 20, 20_000, 1])
def test_only_chosen_rows_are_seen(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(sparse, "BLOCK_BYTES", block)
    case = Case(9, 7)
    found = case.attend(0)
    for query in range(9):
        rows = case.rows[query][case.kept[query]]
        alone = latent.absorbed(case.q[query : query + 1], rows[None], None, case.up, HEADS)
        torch.testing.assert_close(found[query], alone[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [7, 64, 300])
def test_where_rows_lie_changes_not_a_bit(dtype: torch.dtype, top_k: int) -> None:
    case = Case(9, top_k, dtype)
    expected = case.attend(0)
    for seed in range(1, 4):
        assert torch.equal(case.attend(seed), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_who_is_beside_a_query_changes_not_a_bit_of_what_it_sees(dtype: torch.dtype) -> None:
    """The test leaves out the projections. They are products of all tokens, so their last bits may differ."""
    case = Case(9, 100, dtype)
    q = torch.randn(9, 1, 4, WIDTH).to(dtype)

    def seen(some: slice) -> torch.Tensor:
        keys = case.rows[some][:, None]
        return torch.nn.functional.scaled_dot_product_attention(q[some], keys, keys, scale=0.3)

    whole = seen(slice(None))
    for query in range(9):
        assert torch.equal(seen(slice(query, query + 1)), whole[query : query + 1])
    neighbours = Case(9, 100, dtype)
    neighbours.q[1:], neighbours.rows[1:] = neighbours.q[1:].flip(0), neighbours.rows[1:].flip(0)
    neighbours.kept[1:] = neighbours.kept[1:].flip(0)
    assert torch.equal(neighbours.attend(1)[0], case.attend(0)[0])


# Pages.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_page_has_two_parts_and_shared_layers_have_no_index(dtype: torch.dtype) -> None:
    kind, config = FAMILIES["glm-dsa-shared"]
    model = model_config(hf_config(config, kind.__name__))
    pages, size, layers, indexed, width = 5, 4, 4, 2, 16
    pool = KvPool(model, pages, size, dtype, open_device("cpu", 1))
    main, index = pool.parts
    assert main.page_bytes == layers * size * WIDTH * dtype.itemsize
    assert index.page_bytes == indexed * size * width * dtype.itemsize
    assert pool.page_bytes == page_bytes(model, size, dtype) == main.page_bytes + index.page_bytes
    assert pool.nbytes == pages * pool.page_bytes
    assert [piece.shape for part in pool.parts for piece in part.pieces()] == [
        (pages, main.page_bytes),
        (pages, index.page_bytes),
    ]
    [piece] = index.pieces()
    assert len(pool.index_keys) == indexed
    for number, keys in enumerate(pool.index_keys):
        for page in range(pages):
            keys[page * index.page_stride + 2] = 1 + number
            found = piece[page].clone().view(dtype).view(indexed, size, width)
            assert found[number, 2].eq(1 + number).all()
            assert int(found.ne(0).sum()) == (number + 1) * width, "other layers' keys are elsewhere"
    assert not any(piece.any() for piece in main.pieces())


# The division of a step's rows.


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=8),
    st.sampled_from([None, 0, 1, 8, 100]),
)
def test_every_token_is_in_one_piece(rows: list[tuple[int, int]], choose_from: int | None) -> None:
    start, length = np.array(rows).T
    slots = np.arange(len(rows))
    found = pieces(Rows(slots, start, length, slots), CpuAttention(), choose_from)
    tokens = [
        (row, position)
        for row, begin, count in zip(found.row.tolist(), found.start.tolist(), found.length.tolist(), strict=True)
        for position in range(begin, begin + count)
    ]
    assert sorted(tokens) == [
        (row, at) for row, (begin, count) in enumerate(rows) for at in range(begin, begin + count)
    ]
    assert (found.length > 0).all()
    # The last token of each row is the sampled one.
    assert [tokens[at] for at in found.last] == [(row, sum(of)) for row, of in enumerate((b, n - 1) for b, n in rows)]
    whole = int(found.length[: found.whole].sum())
    limit = 1 << 30 if choose_from is None else choose_from
    assert all(position < limit for _, position in tokens[:whole])
    assert all(position >= limit for _, position in tokens[whole:])
