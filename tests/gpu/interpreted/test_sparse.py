"""Sparse attention: what queries choose, where it is found, and what they make of it."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.attention.hot_rows import GroupRows, Places, find
from forebay.gpu import kernels, reference
from forebay.gpu.hot import HotRows, SparsePages
from forebay.gpu.interface import Kernels
from forebay.gpu.tables import ERROR_READ, Received, places
from forebay.protocol.plan import Plan
from tests.gpu.support import BOTH, Paged, dense, nan
from tests.hand.support import PlanBuilder

SCALE = 0.3


def check_choose(
    operators: Kernels, rows: list[tuple[int, int]], top_k: int, heads: int = 3, page_size: int = 4, padding: int = 0
) -> None:
    """Rows are (start, length); scores of random numbers have no ties."""
    ends, lengths = [start + length for start, length in rows], [length for _, length in rows]
    paged = Paged.make(ends, 1, 20, page_size, 0, torch.float32)
    generator = torch.Generator().manual_seed(1)
    count = sum(lengths)
    q = torch.randn(count + padding, heads, 20, generator=generator)
    weights = torch.randn(count + padding, heads, generator=generator)
    step = paged.rows(lengths)
    if all(length == 1 for length in lengths) and not padding:
        step = replace(step, chunks=False)
    chosen = operators.choose(q, weights, paged.pool[:, 0], step, top_k)
    assert chosen.shape == (len(q), top_k)
    at = 0
    for history, length in zip(paged.histories, lengths, strict=True):
        for i in range(length):
            keys = history[: len(history) - length + i + 1, 0]
            scores = (q[at] @ keys.T).relu().T @ weights[at]
            best = scores.argsort(descending=True, stable=True)[:top_k].sort().values.tolist()
            assert chosen[at].tolist() == [*best, *[-1] * (top_k - len(best))]
            at += 1
    assert chosen[at:].eq(-1).all()


@BOTH
@settings(max_examples=5, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 20)), min_size=1, max_size=3),
    top_k=st.sampled_from([1, 5, 16]),
    page_size=st.sampled_from([3, 16]),
    padding=st.integers(0, 3),
)
def test_what_is_chosen(
    operators: Kernels, rows: list[tuple[int, int]], top_k: int, page_size: int, padding: int
) -> None:
    check_choose(operators, rows, top_k, 3, page_size, padding)


def test_scores_are_made_in_blocks_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["forebay.gpu.kernels.index"], "SCORE_BYTES", 1)
    check_choose(kernels, [(30, 1), (20, 11), (3, 1)], 7)
    check_choose(kernels, [(30, 1), (90, 1)], 7, heads=20)


def best_of(operators: Kernels, scores: list[list[float]], top_k: int) -> list[list[int]]:
    best = (sys.modules["forebay.gpu.kernels.index"] if operators is kernels else reference.sparse).best
    width = max(map(len, scores))
    padded = torch.tensor([line + [torch.nan] * (width - len(line)) for line in scores])
    chosen = torch.full((len(scores), top_k), -5, dtype=torch.int32)
    order = torch.arange(len(scores)).flip(0).int()
    best(padded, torch.tensor([len(line) for line in scores]).int(), order, chosen)
    found: list[list[int]] = chosen.flip(0).tolist()
    return found


SCORE = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, torch.nan, -1.0, torch.inf, -torch.inf, 1e-45, -1e-45, 3e38]),
    st.floats(width=32, allow_nan=False),
)


@BOTH
@settings(max_examples=25, deadline=None)
@given(scores=st.lists(st.lists(SCORE, min_size=1, max_size=40), min_size=1, max_size=3), top_k=st.sampled_from([1, 6]))
def test_of_equal_scores_lower_positions_win(operators: Kernels, scores: list[list[float]], top_k: int) -> None:
    """Python sorts stably, and takes both zeros for equal."""
    expected = []
    for given_line in scores:
        # What is no number shows: it is kept first.
        line = [math.inf if math.isnan(score) else score for score in given_line]
        best = sorted(sorted(range(len(line)), key=lambda position: -line[position])[:top_k])
        expected.append(best + [-1] * (top_k - len(best)))
    assert best_of(operators, scores, top_k) == expected


@BOTH
def test_scores_of_several_blocks(operators: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["forebay.gpu.kernels.index"], "_BLOCK", 16)
    generator = np.random.default_rng(0)
    scores = [generator.integers(0, 9, 100).astype(float).tolist(), generator.standard_normal(97).tolist()]
    expected = [sorted(sorted(range(len(line)), key=lambda at: -line[at])[:12]) for line in scores]
    assert best_of(operators, scores, 12) == expected


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", [1, 4])
def test_attention_to_chosen_rows(
    operators: Kernels, dtype: torch.dtype, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["forebay.gpu.kernels.chosen"], "splits", lambda programs: parts)
    generator = torch.Generator().manual_seed(0)
    pool = nan(300, 3, 40, dtype=dtype)[:, 1:2]
    entries = torch.randperm(300, generator=generator)[:200].view(4, 50)
    pool[entries] = torch.randn(4, 50, 1, 40, generator=generator).to(dtype)
    rows = entries.int()
    # Fewer than there is room for, in the middle too; one; none at all.
    rows[1, 20:] = -1
    rows[1, 3] = -1
    rows[2, 1:] = -1
    rows[3] = -1
    q = torch.randn(4, 18, 40, generator=generator).to(dtype)
    out = operators.attend_chosen(q, pool, pool[..., :32], rows, SCALE)
    assert out.shape == (4, 18, 32)
    for query in range(3):
        seen = pool[rows[query][rows[query] >= 0].long()]
        expected = dense(q[query], seen, seen[..., :32], SCALE)
        torch.testing.assert_close(out[query].double(), expected, atol=1e-5 if dtype == torch.float32 else 0.03, rtol=0)
    assert out[3].eq(0).all()


PAGE, PAGES, STRIDE, HOST_STRIDE, WIDTH = 4, 12, 8, 100, 6
SLOTS, CONTEXT = 4, 48


@pytest.fixture(autouse=True)
def _few_programs_a_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer programs than rows that are missing, so that they walk."""
    host_rows = sys.modules["forebay.gpu.kernels.host_rows"]
    monkeypatch.setattr(host_rows, "_PROGRAMS", 2)
    monkeypatch.setattr(host_rows, "_ROWS", 2)
    monkeypatch.setattr(sys.modules["forebay.gpu.kernels.hot_rows"], "_BLOCK", 8)


class Rig:
    """Slots whose positions are all in the host's memory, some on pages of the device too, the rest in hot rows."""

    def __init__(self, hot: int, seed: int) -> None:
        self.random = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.host_pages = SLOTS * CONTEXT // PAGE
        self.host = torch.randn(self.host_pages * HOST_STRIDE, generator=generator)
        own = hot // PAGE
        total = PAGES + SLOTS * own + 1
        self.pool = nan(total * STRIDE, WIDTH)
        none = torch.full((SLOTS + 1, CONTEXT // PAGE), -1, dtype=torch.int32)
        given = torch.randperm(self.host_pages, generator=generator).view(SLOTS, -1).int()
        hot_rows = torch.full((SLOTS + 1, own), -1, dtype=torch.int32)
        hot_rows[:SLOTS] = PAGES + torch.randperm(SLOTS * own, generator=generator).view(SLOTS, own)
        host_table = none.clone()
        host_table[:SLOTS] = given
        clock = torch.zeros(SLOTS + 1, dtype=torch.int32)
        self.pages = SparsePages(none, host_table, hot_rows, clock, PAGE, STRIDE, total - 1)
        self.pages.page_table[SLOTS] = total - 1
        # Lines with one element more than anybody reads.
        line = torch.full((SLOTS + 1, hot + 1), -1, dtype=torch.int32)
        row_of = torch.zeros(SLOTS + 1, CONTEXT + 1, dtype=torch.int16)
        self.group = HotRows(row_of, line, torch.zeros_like(line), hot)
        # What no owner confirms may be anything.
        self.group.row_of.random_(-5, 40, generator=generator)
        self.last: list[dict[int, int]] = [{} for _ in range(SLOTS)]
        """When each position that has a hot row was used."""

    def row(self, slot: int, position: int) -> torch.Tensor:
        """What a position's row holds."""
        host = int(self.pages.host_table[slot, position // PAGE])
        at = host * HOST_STRIDE + position % PAGE * WIDTH
        return self.host[at : at + WIDTH]

    def move_pages(self) -> None:
        """Other pages are on the device."""
        self.pages.page_table[:SLOTS] = -1
        for page in range(PAGES):
            slot, index = self.random.randrange(SLOTS), self.random.randrange(CONTEXT // PAGE)
            if self.pages.page_table[slot, index] < 0:
                self.pages.page_table[slot, index] = page
                for place in range(PAGE):
                    self.pool[page * STRIDE + place] = self.row(slot, index * PAGE + place)

    def step(self, operators: Kernels, wanted: dict[int, list[int]], top_k: int, padding: int = 0) -> None:
        """Finds the positions that slots want, and checks them and what is remembered of them."""
        self.pages.clock[list(wanted)] += 1
        chosen = torch.full((len(wanted) + padding, top_k), -1, dtype=torch.int32)
        for query, positions in enumerate(wanted.values()):
            chosen[query, : len(positions)] = torch.tensor(positions)
        slots = torch.tensor([*wanted, *[SLOTS] * padding], dtype=torch.int32)
        errors = torch.zeros(1, dtype=torch.int32)
        found = operators.resolve(chosen, slots, self.pages, self.group, errors)
        operators.gather(found, self.host, HOST_STRIDE, PAGE, self.pool)
        assert not errors
        for query, (slot, positions) in enumerate(wanted.items()):
            entries = found.rows[query].tolist()
            assert entries[len(positions) :] == [-1] * (top_k - len(positions))
            assert len(set(entries[: len(positions)])) == len(positions)
            for position, entry in zip(positions, entries, strict=False):
                assert self.pool[entry].equal(self.row(slot, position))
            self._check_use(slot, positions, found.counts[query].tolist())
        assert found.counts[len(wanted) :].eq(0).all()
        assert found.rows[len(wanted) :].eq(-1).all()

    def _check_use(self, slot: int, positions: list[int], counts: list[int]) -> None:
        now = int(self.pages.clock[slot])
        on_pages = [p for p in positions if self.pages.page_table[slot, p // PAGE] >= 0]
        rest = [p for p in positions if p not in on_pages]
        hits = [p for p in rest if p in self.last[slot]]
        assert counts == [len(on_pages), len(hits), len(rest) - len(hits)]
        owner = self.group.owner[slot, : self.group.count].tolist()
        assert set(rest) <= set(owner)
        used = self.last[slot] | dict.fromkeys(hits, now)
        gone = [used[position] for position in used if position not in owner]
        kept = {position: step for position, step in used.items() if position in owner}
        # Nobody goes who is in use, or was used later than somebody who stays.
        if gone:
            assert max(gone) < now
            assert max(gone) <= min(kept.values(), default=now) or now - max(gone) >= 31
        self.last[slot] = kept | dict.fromkeys(rest, now)


@BOTH
@pytest.mark.parametrize("hot", [8, 12, 32])
def test_chosen_positions_are_found(operators: Kernels, hot: int) -> None:
    """`hot` 8: as many rows as positions are chosen."""
    rig = Rig(hot, 1)
    working = {slot: rig.random.sample(range(CONTEXT), 14) for slot in range(SLOTS)}
    for step in range(40 if hot == 12 else 12):
        if step % 8 == 7:
            rig.move_pages()
        wanted = {}
        for slot in rig.random.sample(range(SLOTS), 3):
            working[slot][rig.random.randrange(14)] = rig.random.randrange(CONTEXT)
            some = sorted(set(working[slot]))
            wanted[slot] = sorted(rig.random.sample(some, min(len(some), rig.random.choice([1, 8]))))
        rig.step(operators, wanted, 8, padding=step % 2)


@BOTH
def test_a_long_life(operators: Kernels) -> None:
    """Ages have an end: rows that were used 31 steps ago and longer go in the order of their numbers."""
    rig = Rig(8, 2)
    rig.step(operators, {0: [0, 1, 2, 3, 4, 5, 6, 7]}, 8)
    rig.pages.clock[0] += 100
    rig.step(operators, {0: [0, 20]}, 8)
    assert sorted(set(rig.group.owner[0, :8].tolist()) - {0, 20}) == [2, 3, 4, 5, 6, 7]


@BOTH
def test_both_do_the_same(operators: Kernels) -> None:
    """Which row a position gets too, and what is left of the state: a hand may change from one to the other."""
    first, second = Rig(12, 3), Rig(12, 3)
    for step in range(6):
        wanted = {slot: sorted(random.Random(step * 9 + slot).sample(range(CONTEXT), 7)) for slot in (2, 0)}
        first.step(reference, wanted, 8)
        second.step(operators, wanted, 8)
    assert state(first) == state(second)


def state(rig: Rig) -> list[list[list[int]]]:
    """All that is remembered."""
    count = rig.group.count
    tables = rig.group.row_of[:SLOTS, :CONTEXT], rig.group.owner[:SLOTS, :count], rig.group.stamp[:SLOTS, :count]
    return [table.tolist() for table in tables]


@BOTH
def test_what_is_found_is_what_the_hand_finds(operators: Kernels) -> None:
    """The tables are those of the hand's own operators, and what they become too."""
    rig, other = Rig(12, 6), Rig(12, 6)
    group = GroupRows(other.group.row_of, other.group.owner, other.group.stamp)
    for step in range(8):
        for moved in (rig, other):
            moved.move_pages()
            moved.pages.clock[[3, 1]] += 1
        generator = random.Random(step)
        lines = [[*sorted(generator.sample(range(CONTEXT), 6)), -1, -1] for _ in range(2)]
        chosen, slots = torch.tensor(lines), torch.tensor([3, 1])
        pages = other.pages
        now = pages.clock.index_select(0, slots)
        places = Places(slots, now, pages.page_table, pages.hot_rows, PAGE, STRIDE)
        expected = find(chosen, places, group)
        errors = torch.zeros(1, dtype=torch.int32)
        found = operators.resolve(chosen.int(), slots.int(), rig.pages, rig.group, errors)
        assert not errors
        assert found.rows.tolist() == expected.rows.tolist()
        assert found.missing.tolist() == expected.missed.sum(1).tolist()
        assert [12, *found.counts.sum(0).tolist()] == expected.counts.tolist()
        assert state(rig) == state(other)


@BOTH
def test_a_page_that_is_nowhere_is_told(operators: Kernels) -> None:
    rig = Rig(8, 4)
    rig.pages.hot_rows[1] = -1
    chosen, slots = torch.tensor([[3, -1], [9, 40]], dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32)
    errors = torch.zeros(1, dtype=torch.int32)
    found = operators.resolve(chosen[:1], slots[:1], rig.pages, rig.group, errors)
    assert int(errors) == ERROR_READ
    assert found.rows.tolist() == [[rig.pages.null_page * STRIDE, -1]]
    errors.zero_()
    rig.pages.host_table[2, 10] = -1
    operators.resolve(chosen[1:], slots[1:], rig.pages, rig.group, errors)
    assert int(errors) == ERROR_READ


@BOTH
def test_plans_open_and_close_hot_rows(operators: Kernels) -> None:
    rig = Rig(8, 5)
    rig.group.owner.fill_(3)
    rig.group.stamp.fill_(9)
    builder = PlanBuilder()
    builder.slot(2, [1, 2])
    plan = builder.build()
    hot = np.array([(0, 0, 5), (0, 1, 7)], np.int32)
    host = np.array([(3, 2, 1), (3, 0, 0)], np.int32)
    plan = Plan(slots=plan.slots, slot_floats=plan.slot_floats, tokens=plan.tokens, hot_rows=hot, host_writes=host)
    plan = plan.staged()
    given = Received(
        torch.from_numpy(plan.body.copy()), torch.from_numpy(places(plan)), torch.zeros(1, dtype=torch.int32)
    )
    errors = torch.zeros(1, dtype=torch.int32)
    other = rig.pages.hot_rows[[1, 3]].clone()
    rig.pages.clock.fill_(4)
    operators.clear_slots(given, rig.pages.hot_rows, SLOTS)
    operators.write_table(given, "host_writes", rig.pages.host_table, 0, rig.host_pages, errors)
    operators.write_table(given, "hot_rows", rig.pages.hot_rows, 0, PAGES, errors)
    operators.open_hot_rows(given, rig.pages, rig.group, SLOTS)
    assert not errors
    assert rig.pages.clock.tolist() == [0, 4, 4, 4, 4]
    assert rig.pages.hot_rows[0].tolist() == [5, 7]
    assert rig.pages.hot_rows[2].tolist() == [-1, -1]
    assert rig.pages.hot_rows[[1, 3]].equal(other)
    assert rig.pages.host_table[3, [2, 0]].tolist() == [1, 0]
    assert rig.group.owner.tolist() == [[-1] * 8 + [3]] + [[3] * 9] * SLOTS
    assert rig.group.stamp.tolist() == [[0] * 8 + [9]] + [[9] * 9] * SLOTS


MUTANTS = {
    "owners that are not asked": ("hot_rows", "mask=known, other=-1) == position)", "mask=known, other=-1) >= -1)"),
    "rows in use that go": (
        "hot_rows",
        "tl.zeros([TOP_K_BLOCK], tl.int32) + step",
        "tl.zeros([TOP_K_BLOCK], tl.int32)",
    ),
    "youngest first": (
        "hot_rows",
        "(age > youngest), there & (age == youngest)",
        "(age < youngest), there & (age == youngest)",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_hot_rows_are_seen(name: str, mutate: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    mutated = mutate(*MUTANTS[name])
    monkeypatch.setattr(kernels, "resolve", mutated.resolve)
    with pytest.raises((AssertionError, IndexError)):
        test_chosen_positions_are_found(kernels, 12)


INDEX_MUTANTS = {
    "ties": ("equal & (rank <= left)", "equal"),
    "zeros": ("tl.where(score == 0.0, 0.0, tl", "tl.where(score != score, 0.0, tl"),
    "signs": ("^ ((bits >> 31) & 0x7FFFFFFF)", "^ (bits >> 31)"),
}


@pytest.mark.parametrize("name", INDEX_MUTANTS)
def test_a_wrong_choice_is_seen(name: str, mutate: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    mutated = mutate("index", *INDEX_MUTANTS[name])
    monkeypatch.setattr(sys.modules["forebay.gpu.kernels.index"], "best", mutated.best)
    line = [-0.0, 1.0, 0.0, -2.0, 0.0, -1.0, 1.0, -3.0]
    expected = [[0, 1, 2, 6], [1, 3, 5, 6]]
    found = best_of(kernels, [[*line, *[-9.0] * 9], [-4.0, -1.0, -3.0, -1.0, -2.5, -0.5, -2.0]], 4)
    assert found != expected


def test_the_right_choice_is_not_seen_as_wrong() -> None:
    line = [-0.0, 1.0, 0.0, -2.0, 0.0, -1.0, 1.0, -3.0]
    found = best_of(kernels, [[*line, *[-9.0] * 9], [-4.0, -1.0, -3.0, -1.0, -2.5, -0.5, -2.0]], 4)
    assert found == [[0, 1, 2, 6], [1, 3, 5, 6]]
