"""Sparse attention: which positions queries choose, where they are found, and the attention to them."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.attention.hot_rows import GroupRows, Places, find
from forebay.gpu import kernels, reference
from forebay.gpu.interface import Kernels
from forebay.gpu.tables import ERROR_READ
from tests.gpu.checks.attention import check_attend_chosen
from tests.gpu.checks.sparse import SMALL, Rig, check_choose, check_found, check_opened
from tests.gpu.support import BOTH


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
    check_choose(operators, rows, top_k, page_size=page_size, padding=padding)


@BOTH
def test_of_equal_keys_lower_positions_win(operators: Kernels) -> None:
    check_choose(operators, [(70, 1), (30, 12)], 9, distinct=4)


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
    """Python's sort is stable, and takes zeros of both signs as equal."""
    expected = []
    for given_line in scores:
        # NaN is kept first, so that it shows in the result.
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
    monkeypatch.setattr(sys.modules["forebay.gpu.kernels.chosen"], "splits", lambda programs, fill: parts)
    check_attend_chosen(operators, dtype=dtype)


SLOTS, CONTEXT, PAGE, STRIDE = SMALL.slots, SMALL.context, SMALL.page, SMALL.stride


@pytest.fixture(autouse=True)
def _few_programs_a_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer programs than missing rows, so that each program copies several."""
    host_rows = sys.modules["forebay.gpu.kernels.host_rows"]
    monkeypatch.setattr(host_rows, "_PROGRAMS", 2)
    monkeypatch.setattr(host_rows, "_ROWS", 2)
    monkeypatch.setattr(sys.modules["forebay.gpu.kernels.hot_rows"], "_BLOCK", 8)


@BOTH
@pytest.mark.parametrize("hot", [8, 12, 32])
def test_chosen_positions_are_found(operators: Kernels, hot: int) -> None:
    """With 8 hot rows there are as many rows as chosen positions."""
    check_found(operators, Rig(hot, 1), 40 if hot == 12 else 12, 8, 14)


@BOTH
def test_a_long_life(operators: Kernels) -> None:
    """Ages are bounded: rows used 31 or more steps ago are evicted in the order of their indices."""
    rig = Rig(8, 2)
    rig.step(operators, {0: [0, 1, 2, 3, 4, 5, 6, 7]}, 8)
    rig.pages.clock[0] += 100
    rig.step(operators, {0: [0, 20]}, 8)
    assert sorted(set(rig.group.owner[0, :8].tolist()) - {0, 20}) == [2, 3, 4, 5, 6, 7]


@BOTH
def test_both_do_the_same(operators: Kernels) -> None:
    """Each position gets the same row, and the state is equal too, so a hand may switch from one to the other."""
    first, second = Rig(12, 3), Rig(12, 3)
    for step in range(6):
        wanted = {slot: sorted(random.Random(step * 9 + slot).sample(range(CONTEXT), 7)) for slot in (2, 0)}
        first.step(reference, wanted, 8)
        second.step(operators, wanted, 8)
    assert state(first) == state(second)


def state(rig: Rig) -> list[list[list[int]]]:
    """The whole state of the hot rows."""
    count = rig.group.count
    tables = rig.group.row_of[:SLOTS, :CONTEXT], rig.group.owner[:SLOTS, :count], rig.group.stamp[:SLOTS, :count]
    return [table.tolist() for table in tables]


@BOTH
def test_what_is_found_is_what_the_hand_finds(operators: Kernels) -> None:
    """The rows found, and the tables afterwards, equal those of the hand's own operators."""
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
    check_opened(operators)


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
