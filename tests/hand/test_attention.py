"""Paged attention of random mixed batches, compared with dense attention of one query at a time."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.attention import cpu
from forebay.attention.backend import AttentionBackend, Batch, LayerKV
from forebay.attention.cpu import CpuAttention
from forebay.attention.triton import TritonAttention
from forebay.gpu import reference

KV_HEADS, DIM, PAGE = 2, 8, 4
ROW = st.one_of(
    st.tuples(st.integers(0, 150), st.just(1)),
    st.tuples(st.just(0), st.integers(2, 40)),
    st.tuples(st.integers(1, 60), st.integers(2, 40)),
)


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of one query [heads, dim] to all of k and v [positions, kv_heads, dim], in float64."""
    group = q.shape[0] // k.shape[1]
    out = []
    for head in range(q.shape[0]):
        scores = k[:, head // group].double() @ q[head].double() / DIM**0.5
        out.append(scores.softmax(0) @ v[:, head // group].double())
    return torch.cat(out)


def check(
    rows: list[tuple[int, int]],
    heads: int,
    dtype: torch.dtype,
    tolerance: float,
    seed: int = 0,
    backend: AttentionBackend | None = None,
    spans: Mapping[int, list[tuple[int, int]]] | None = None,
) -> None:
    """`spans`: by row, the ranges of positions with bidirectional attention."""
    backend, spans = backend or CpuAttention(), spans or {}
    random = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    pages_a_slot = -(-max(start + length for start, length in rows) // PAGE)
    page_count = pages_a_slot * len(rows) + 3
    # Positions that must not be read are NaN.
    kv = LayerKV(*(torch.full((page_count * PAGE, KV_HEADS, DIM), torch.nan, dtype=dtype) for _ in range(2)))
    page_table = random.permutation(page_count)[: pages_a_slot * len(rows)].reshape(len(rows), pages_a_slot)

    starts, lengths = np.array(rows).T
    order = backend.order(lengths, starts + lengths)
    dense, queries = {}, {}
    for slot, (start, length) in enumerate(rows):
        history = torch.randn(2, start + length, KV_HEADS, DIM, generator=generator).to(dtype)
        positions = np.arange(start)
        entries = torch.from_numpy(page_table[slot][positions // PAGE] * PAGE + positions % PAGE)
        kv.keys[entries], kv.values[entries] = history[0, :start], history[1, :start]
        dense[slot] = history
        queries[slot] = torch.randn(length, heads, DIM, generator=generator).to(dtype)

    writes = []
    for slot in order:
        positions = np.arange(starts[slot], starts[slot] + lengths[slot])
        writes.append(page_table[slot][positions // PAGE] * PAGE + positions % PAGE)
    ordered = lengths[order]
    batch = Batch(
        start=starts[order],
        length=ordered,
        offset=np.cumsum(ordered) - ordered,
        host_slots=order,
        slots=torch.from_numpy(order),
        lengths=torch.from_numpy(ordered),
        ends=torch.from_numpy(starts[order] + ordered),
        page_table=torch.from_numpy(page_table.astype(np.int32)),
        page_size=PAGE,
        page_stride=PAGE,
        spans=[spans.get(slot, []) for slot in order.tolist()] if spans else (),
    )
    q = torch.cat([queries[slot] for slot in order])
    k, v = (torch.cat([dense[slot][which, starts[slot] :] for slot in order]) for which in (0, 1))
    entries = torch.from_numpy(np.concatenate(writes))
    kv.keys[entries], kv.values[entries] = k, v
    out = backend.attend(q, k, v, kv, backend.prepare(batch, dtype))

    at = 0
    for slot in order.tolist():
        start, length = rows[slot]
        for i in range(length):
            behind = [end for first, end in spans.get(slot, []) if first <= start + i < end]
            seen = dense[slot][:, : max([start + i + 1, *behind])]
            expected = naive(queries[slot][i], seen[0], seen[1])
            torch.testing.assert_close(out[at].double(), expected, atol=tolerance, rtol=0)
            at += 1


@settings(max_examples=60, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=6), st.sampled_from([2, 4, 6]), st.integers(0, 1000))
def test_mixed_batches_in_float32(rows: list[tuple[int, int]], heads: int, seed: int) -> None:
    check(rows, heads, torch.float32, 1e-5, seed)


def test_mixed_batches_in_bfloat16() -> None:
    check([(0, 30), (70, 1), (3, 1), (20, 33), (149, 1), (64, 1)], 4, torch.bfloat16, 0.03)


def test_chunks_longer_than_a_block_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "QUERY_BLOCK", 16)
    check([(37, 50), (5, 16), (100, 17), (0, 33)], 4, torch.float32, 1e-5)


def test_groups_are_cut_to_bound_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "DECODE_POSITIONS", 100)
    check([(start, 1) for start in (33, 40, 55, 60, 120, 130, 8)], 4, torch.float32, 1e-5)


SPANNED: list[tuple[int, int]] = [(0, 20), (9, 1), (7, 30), (0, 12), (5, 6)]
SPANS = {0: [(2, 9), (9, 20)], 2: [(3, 10), (20, 33)], 4: [(0, 11)]}
"""Images at the beginning of a row, side by side, at the end, and across the beginning of a row."""


@pytest.mark.parametrize("backend", [CpuAttention(), TritonAttention(reference, null_page=0)])
def test_positions_of_a_range_see_each_other(backend: AttentionBackend) -> None:
    check(SPANNED, 4, torch.float32, 1e-5, backend=backend, spans=SPANS)


def test_ranges_longer_than_a_block_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "QUERY_BLOCK", 3)
    check(SPANNED, 4, torch.float32, 1e-5, spans=SPANS)
