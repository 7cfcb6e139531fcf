"""Plans applied and prepared on the device, compared with the hand's own tables and a loop over positions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.gpu.interface import Kernels
from forebay.gpu.tables import ERROR_RANGE, ERROR_READ, ERROR_TOKEN, ERROR_WRITE, describe
from forebay.protocol.constants import FLAG_SAMPLE, SLOT_WORDS, SlotRecord
from forebay.protocol.plan import Plan
from tests.gpu.checks.tables import (
    SMALL,
    apply,
    check_applied,
    check_move_words,
    check_prepared,
    errors_of,
    prepare,
    received,
)
from tests.gpu.support import BOTH
from tests.hand.support import Sampling

SLOTS, CONTEXT, PAGES, STRIDE, VOCABULARY = SMALL.slots, SMALL.context, SMALL.pages, SMALL.stride, SMALL.vocabulary


@pytest.fixture(autouse=True)
def _few_programs_a_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer programs than records, so that each program handles several."""
    monkeypatch.setattr(sys.modules["forebay.gpu.kernels.apply"], "_PROGRAMS", 2)


NEW_SLOT = st.tuples(
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=CONTEXT),
    st.booleans(),
    st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.5]),
        top_p=st.sampled_from([1.0, 0.9]),
        top_k=st.integers(0, 9),
        seed=st.integers(0, (1 << 64) - 1),
        stop_ids=st.lists(st.integers(0, 9), max_size=2).map(tuple),
        bias=st.lists(st.tuples(st.integers(0, 9), st.just(0.5)), max_size=2, unique_by=lambda b: b[0]).map(tuple),
    ),
)
PLAN = st.fixed_dictionaries(
    {
        "slots": st.dictionaries(st.integers(0, SLOTS - 1), NEW_SLOT, max_size=3),
        "pages": st.dictionaries(
            st.tuples(st.integers(0, SLOTS - 1), st.integers(0, 9)), st.integers(-1, PAGES - 1), max_size=9
        ),
    }
)


@BOTH
@settings(max_examples=12, deadline=None)
@given(plans=st.lists(PLAN, min_size=1, max_size=3))
def test_plans_are_applied_as_the_hand_does(operators: Kernels, plans: list[dict[str, dict]]) -> None:
    check_applied(operators, plans)


@st.composite
def planned(draw: st.DrawFn) -> list[tuple[int, int, int, int]]:
    rows = []
    for slot in draw(st.lists(st.integers(0, SLOTS - 1), unique=True, min_size=1)):
        start = draw(st.integers(0, CONTEXT - 1))
        length = draw(st.one_of(st.just(1), st.integers(1, CONTEXT - start)))
        rows.append((slot, start, length, draw(st.sampled_from([0, FLAG_SAMPLE]))))
    return rows


@BOTH
@settings(max_examples=15, deadline=None)
@given(rows=planned(), more=st.tuples(st.integers(0, 3), st.integers(0, 140)), seed=st.integers(0, 99))
def test_rows_are_prepared(
    operators: Kernels, rows: list[tuple[int, int, int, int]], more: tuple[int, int], seed: int
) -> None:
    check_prepared(operators, rows, more, seed)


@BOTH
def test_a_step_without_rows_is_padding(operators: Kernels) -> None:
    check_prepared(operators, [], (3, 5))


@BOTH
@pytest.mark.parametrize(
    ("row", "error"),
    [
        ((SLOTS, 0, 1, 1), ERROR_RANGE),
        ((-1, 0, 1, 1), ERROR_RANGE),
        ((1 << 30, 0, 1, 1), ERROR_RANGE),
        ((1, -1, 2, 1), ERROR_RANGE),
        ((1, CONTEXT, 1, 1), ERROR_RANGE),
        ((1, 3, (1 << 31) - 2, 1), ERROR_RANGE),
        ((1, 0, 0, 1), ERROR_RANGE),
        ((3, 9, 1, 1), ERROR_WRITE | ERROR_READ),
        ((3, 13, 1, 1), ERROR_READ),
        ((4, 2, 1, 1), ERROR_TOKEN),
        ((4, 3, 1, 1), ERROR_TOKEN),
    ],
)
def test_a_wrong_row_is_told_and_touches_nobody(operators: Kernels, row: tuple[int, int, int, int], error: int) -> None:
    tables = SMALL.filled(np.random.default_rng(0))
    tables.page_table[3, 2] = -1
    tables.token_pool[4, 2], tables.token_pool[4, 3] = -1, VOCABULARY
    good = (0, 5, 2, 1)
    alone, none = prepare(operators, [good], tables, (2, 4))
    buffers, errors = prepare(operators, [good, row], tables, (2, 4))
    assert (none, errors) == (0, error)
    assert describe(errors)
    assert buffers.tokens[:2].equal(alone.tokens[:2])
    assert buffers.writes[:2].equal(alone.writes[:2])
    if error != ERROR_READ:
        # Any row reads an existing token, and writes to its own page or to the null page.
        assert 0 <= int(buffers.tokens[2]) < VOCABULARY
        own = tables.page_table[4, 0] if error == ERROR_TOKEN else PAGES
        assert int(buffers.writes[2]) // STRIDE == own
    if error == ERROR_RANGE:
        assert buffers.slots.tolist() == [0, SLOTS]
        assert buffers.sampling.tolist() == [0, SLOTS]


@BOTH
def test_more_than_the_buffers_hold_is_told(operators: Kernels) -> None:
    tables = SMALL.filled(np.random.default_rng(0))
    _, errors = prepare(operators, [(0, 0, 3, 1), (1, 0, 3, 1)], tables, (2, 5))
    assert errors == ERROR_RANGE
    buffers, errors = prepare(operators, [(0, 0, 3, 1), (1, 0, 3, 1)], tables, (1, 8))
    assert errors == ERROR_RANGE
    assert buffers.slots.tolist() == [0]


@BOTH
@pytest.mark.parametrize(
    "write", [(SLOTS, 0, 1), (-1, 0, 1), (0, 10, 1), (0, -1, 1), (0, 0, PAGES), (0, 0, -2), (1 << 30, 1 << 30, 1)]
)
def test_a_wrong_page_write_is_told_and_touches_nobody(operators: Kernels, write: tuple[int, int, int]) -> None:
    tables, errors = SMALL.tables(), errors_of()
    tables.page_table[0, 0] = 9
    plan = Plan(page_writes=np.array([(2, 3, 5), write, (1, 1, 7)], np.int32)).staged()
    apply(operators, received(plan), tables, errors)
    expected = SMALL.tables()
    expected.page_table[2, 3], expected.page_table[1, 1] = 5, 7
    # The slot has no page here, because the old one may belong to another request now.
    expected.page_table[0, 0] = -1 if write[:2] == (0, 0) else 9
    assert int(errors) == ERROR_RANGE
    assert tables.page_table.equal(expected.page_table)


@BOTH
@pytest.mark.parametrize(("slot", "count"), [(SLOTS, 2), (-1, 2), (0, CONTEXT + 2)])
def test_a_wrong_new_slot_is_told_and_touches_nobody(operators: Kernels, slot: int, count: int) -> None:
    tables, errors = SMALL.tables(), errors_of()
    slots = np.zeros((3, SLOT_WORDS), np.int32)
    slots[:, SlotRecord.SLOT] = 2, slot, 4
    slots[:, SlotRecord.TOKEN_COUNT] = 1, count, 2
    slots[:, SlotRecord.ARENA_OFFSET] = -1
    plan = Plan(slots=slots, slot_floats=np.ones((3, 6), np.float32), tokens=np.arange(3 + count, dtype=np.int32))
    apply(operators, received(plan.staged()), tables, errors)
    expected = SMALL.tables()
    expected.token_pool[2, 0] = 0
    expected.token_pool[4, :2] = torch.tensor([count + 1, count + 2])
    assert int(errors) == ERROR_RANGE
    assert tables.token_pool.equal(expected.token_pool)
    assert tables.words[:, SlotRecord.TOKEN_COUNT].tolist() == [0, 0, 1, 0, 2, 0, 0]
    assert tables.floats.sum(1).tolist() == [0, 0, 6, 0, 6, 0, 0]


MUTANTS = {
    "padding writes to a real page": ("page_table + slot * pages + position // PAGE", "page_table + position // PAGE"),
    "padding in a real slot": ("slot = tl.where(fine, slot, null_slot)", "slot = tl.where(fine, slot, 0)"),
    "a row that does not sample": ("tl.where(samples, slot, null_slot)", "slot"),
    "nobody's tokens": ("somebody = t < behind", "somebody = t < behind + 1"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_padding_is_seen(name: str, mutate: Callable[..., ModuleType]) -> None:
    mutated = mutate("inputs", *MUTANTS[name])
    with pytest.raises(AssertionError):
        check_prepared(mutated, [(3, 5, 2, 1), (2, 30, 4, 0)], (1, 4))


@BOTH
@pytest.mark.parametrize("count", [0, 1, 511, 512, 1300])
def test_words_are_moved_and_no_others(operators: Kernels, count: int) -> None:
    check_move_words(operators, count)


def test_words_behind_the_last_are_seen(mutate: Callable[..., ModuleType]) -> None:
    mutated = mutate("words", "tl.store(target + i, tl.load(source + i, mask=i < count), mask=i < count)", MOVES_MORE)
    with pytest.raises(AssertionError):
        check_move_words(mutated, 3)


MOVES_MORE = "tl.store(target + i, tl.load(source + i, mask=i < count, other=0), mask=i < count + 1)"
