"""Which positions are kept: the formula, the rule for ties, and the memory that this takes."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from forebay.attention import selection, sparse
from forebay.attention.backend import NO_ROW, IndexBatch, LatentHeads
from forebay.device.watch import NoWaits

Best = Callable[[torch.Tensor, int, int], torch.Tensor]
HEADS, DIM = 4, 16


class Alive(TorchDispatchMode):
    """Counts the bytes of live tensors that operators allocated, now and at the peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = self.now = 0
        self._owners: Counter[int] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            storage = tensor.untyped_storage()
            at, size = storage.data_ptr(), storage.nbytes()
            is_new = not self._owners[at]
            # Skips views of earlier tensors, and outputs of in-place operators, which are already counted.
            if any(arg is tensor for arg in args) or (is_new and at in given):
                continue
            self.now += size * is_new
            self._owners[at] += 1
            weakref.finalize(tensor, self._gone, at, size)
        self.most = max(self.most, self.now)
        return made

    def _gone(self, at: int, size: int) -> None:
        self._owners[at] -= 1
        if not self._owners[at]:
            self.now -= size


def first_of_best(scores: torch.Tensor, start: int, top_k: int) -> list[list[int]]:
    """The rule in Python: the largest scores win, and of equal scores those at lower positions."""
    found = []
    for query, row in enumerate(scores.tolist()):
        seen = row[: start + query + 1]
        kept = sorted(sorted(range(len(seen)), key=lambda position: (-seen[position], position))[:top_k])
        found.append(kept + [NO_ROW] * (top_k - len(kept)))
    return found


def any_of_best(scores: torch.Tensor, start: int, top_k: int) -> torch.Tensor:
    """The choice without the rule: `topk` chooses arbitrarily among equal scores."""
    at = torch.arange(start, start + len(scores))[:, None]
    seen = scores.masked_fill(torch.arange(scores.shape[1]) > at, -torch.inf)
    return seen.topk(top_k, dim=-1).indices.sort(dim=-1).values


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5), st.integers(0, 40), st.integers(1, 20), st.integers(1, 6), st.integers(0, 1000))
def test_the_largest_are_kept_and_of_equal_ones_the_lower_positions(
    queries: int, start: int, top_k: int, values: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-1, values, (queries, start + queries), generator=generator).float()
    # Zeros of both signs are equal.
    scores = torch.where(torch.rand(scores.shape, generator=generator) < 0.3, -scores, scores)
    expected = first_of_best(scores, start, top_k)
    assert selection.best(scores, start, top_k).tolist() == expected


@pytest.mark.parametrize(("rule", "holds"), [(selection.best, True), (any_of_best, False)])
def test_without_the_rule_ties_go_anywhere(rule: Best, holds: bool) -> None:
    """The test has many positions, because libraries happen to keep the order of equal scores if there are few."""
    scores = torch.randint(0, 4, (30, 3000), generator=torch.Generator().manual_seed(1)).float()
    expected = first_of_best(scores, 2970, 600)
    assert (rule(scores, 2970, 600).tolist() == expected) is holds


def test_what_is_no_number_is_kept_first() -> None:
    """If NaN were not kept, it would not reach the result, and no error would be reported."""
    scores = torch.randn(4, 12).abs()
    scores[1] = torch.nan
    scores[2, 4] = scores[2, 10] = torch.nan
    scores[3, 3:] = -torch.inf
    found = selection.best(scores, 8, 5)
    assert found[1].tolist() == [0, 1, 2, 3, 4]
    assert {4, 10} < set(found[2].tolist())
    assert found[3].tolist() == [0, 1, 2, 3, 4]
    assert (found >= 0).all()


class Pages:
    """Index keys of slots on random pages."""

    def __init__(self, lengths: list[int], size: int = 4, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(3)
        self.keys = [torch.randn(length, DIM, generator=generator) for length in lengths]
        pages = np.random.default_rng(seed).permutation(sum(-(-length // size) for length in lengths) + 5)
        most = max(-(-length // size) for length in lengths)
        table = np.full((len(lengths), most), -1, np.int32)
        # Half of each page belongs to another layer.
        self.size, self.stride = size, 2 * size
        self.pool = torch.full((len(pages) * self.stride, DIM), torch.nan)
        at = 0
        for slot, keys in enumerate(self.keys):
            for index in range(-(-len(keys) // size)):
                table[slot, index] = pages[at]
                at += 1
                part = keys[index * size : (index + 1) * size]
                begin = int(table[slot, index]) * self.stride
                self.pool[begin : begin + len(part)] = part
        self.table = torch.from_numpy(table)

    def choose(self, rows: list[tuple[int, int]], q: torch.Tensor, weights: torch.Tensor, top_k: int) -> torch.Tensor:
        """Chooses for rows (slot, number of queries at the end of its context)."""
        slots = [slot for slot, _ in rows]
        length = np.array([count for _, count in rows])
        start = np.array([len(self.keys[slot]) for slot in slots]) - length
        lengths = torch.from_numpy(length)
        ends = torch.from_numpy(start) + lengths
        batch = IndexBatch(start, length, torch.tensor(slots), lengths, ends, self.table, self.size, self.stride, top_k)
        with NoWaits():
            return selection.choose(q, weights, self.pool, selection.prepare(batch))


def queries(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, HEADS, DIM, generator=generator), torch.randn(count, HEADS, generator=generator)


ROWS = [(0, 1), (2, 9), (1, 3), (3, 1)]


@pytest.mark.parametrize(("block", "key_block"), [(64 << 20, 4096), (4000, 16), (1, 1)])
def test_choices_are_those_of_the_formula_however_they_are_cut(
    monkeypatch: pytest.MonkeyPatch, block: int, key_block: int
) -> None:
    monkeypatch.setattr(selection, "BLOCK_BYTES", block)
    monkeypatch.setattr(selection, "KEY_BLOCK", key_block)
    pages, (q, weights) = Pages([30, 50, 44, 12]), queries(14)
    found = pages.choose(ROWS, q, weights, 10).tolist()
    at = 0
    for slot, count in ROWS:
        keys = pages.keys[slot].double()
        for query in range(count):
            products = (keys @ q[at].double().T).relu()
            scores = products @ weights[at].double()
            [expected] = first_of_best(scores[None], len(keys) - count + query, 10)
            assert found[at] == expected
            at += 1


def test_choices_depend_on_neither_pages_nor_neighbours() -> None:
    q, weights = queries(14)
    expected = Pages([30, 50, 44, 12]).choose(ROWS, q, weights, 10)
    for seed in range(3):
        pages = Pages([30, 50, 44, 12], seed=seed)
        assert torch.equal(pages.choose(ROWS, q, weights, 10), expected)
        at = 0
        for slot, count in ROWS:
            part = slice(at, at + count)
            assert torch.equal(pages.choose([(slot, count)], q[part], weights[part], 10), expected[part])
            at += count


def test_scoring_a_chunk_takes_no_more_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "KEY_BLOCK", 512)
    count, context = 400, 3000
    pages, (q, weights) = Pages([context], size=64), queries(count)
    keys = 2 * selection.KEY_BLOCK * DIM * 4
    # The choice itself, and the lookups that are made once for the whole context.
    own = keys + 2 * count * 20 * 8 + 4 * context * 8
    most = []
    for bound in (1 << 20, 1 << 30):
        monkeypatch.setattr(selection, "BLOCK_BYTES", bound)
        with Alive() as alive:
            pages.choose([(0, count)], q, weights, 20)
        most.append(alive.most)
    assert most[0] <= (1 << 20) + own
    assert most[1] > 4 * most[0], "without the bound it takes more"


def test_gathering_rows_takes_no_more_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    count, top_k, heads, rank, rotary = 300, 100, 4, 32, 8
    heads_ = LatentHeads(16, 12, rank, 0.3)
    q = torch.randn(count, heads, 16 + rotary)
    pool, up = torch.randn(1000, rank + rotary), torch.randn(heads, 16 + 12, rank)
    chosen = torch.randint(0, 1000, (count, top_k))
    most = []
    for bound in (1 << 20, 1 << 30):
        monkeypatch.setattr(sparse, "BLOCK_BYTES", bound)
        with Alive() as alive:
            whole = sparse.attend(q, pool, chosen, up, heads_)
        most.append(alive.most)
    assert most[0] <= (1 << 20) + 2 * whole.nbytes
    assert most[1] > 4 * most[0], "without the bound it takes more"
