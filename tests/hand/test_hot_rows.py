"""Hot rows: which positions are found or missed, and which rows are evicted, compared with a model in Python."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.attention.backend import NO_ROW
from forebay.attention.hot_rows import OLDEST, Found, GroupRows, Places, find, missing
from forebay.attention.sparse import NO_PAGE
from forebay.device.watch import NoWaits

SIZE = 4
STRIDE = 12
CONTEXT = 96
PAGES = 40
NOWHERE = PAGES * STRIDE
SLOTS = 5


class Slots:
    """Sparse slots.

    Each row of their hot rows, device pages and host pages is a number that identifies slot and position.
    """

    def __init__(self, rows: int, top_k: int, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.top_k = top_k
        pages = self.random.permutation(PAGES)
        self.page_table = torch.full((SLOTS, CONTEXT // SIZE), -1, dtype=torch.int32)
        self.row_table = torch.from_numpy(pages[: SLOTS * rows // SIZE].reshape(SLOTS, -1).astype(np.int32))
        self.spare = pages[SLOTS * rows // SIZE :].tolist()
        self.host_table = torch.arange(self.page_table.numel(), dtype=torch.int32).view(self.page_table.shape)
        # Entries of row_of that were never written may hold any value.
        garbage = torch.from_numpy(self.random.integers(-(2**15), 2**15, (SLOTS, CONTEXT + 1)).astype(np.int16))
        owner = torch.full((SLOTS, rows + 1), -1, dtype=torch.int32)
        self.group = GroupRows(garbage, owner, torch.zeros_like(owner))
        self.now = torch.zeros(SLOTS, dtype=torch.int32)
        self.pool = torch.full((NOWHERE + STRIDE, 1), torch.nan)
        numbers = torch.arange(SLOTS)[:, None] * 1000 + torch.arange(CONTEXT)
        self.host = [numbers.float().view(-1, SIZE, 1)]
        self.held: list[dict[int, int]] = [{} for _ in range(SLOTS)]
        """For each slot, its cached positions, each with the step that last chose it."""
        self.rows = rows

    def set_page(self, slot: int, index: int, page: int) -> None:
        """Puts a page of a slot on the device, or with -1 removes it."""
        self.page_table[slot, index] = page
        if page >= 0:
            self.pool[page * STRIDE : page * STRIDE + SIZE, 0] = self.host[0][int(self.host_table[slot, index])][:, 0]

    def step(self, chosen: dict[int, list[int]]) -> Found:
        """Runs a step in which slots choose these positions, and checks its results."""
        slots = torch.tensor(list(chosen))
        positions = torch.full((len(chosen), self.top_k), NO_ROW)
        for query, some in enumerate(chosen.values()):
            positions[query, : len(some)] = torch.tensor(some)
        with NoWaits():
            self.now.index_add_(0, slots, torch.ones(len(slots), dtype=torch.int32))
            now = self.now.index_select(0, slots)
            places = Places(slots, now, self.page_table, self.row_table, SIZE, STRIDE)
            found = find(positions, places, self.group)
            missing(positions, found, slots, self.host_table, SIZE, NOWHERE, self.host).copy(0, self.pool)
        expected = [0, 0, 0, 0]
        for query, (slot, some) in enumerate(chosen.items()):
            rows = found.rows[query, : len(some)]
            assert (rows >= 0).all()
            assert (rows < NOWHERE).all()
            assert self.pool[rows, 0].tolist() == [slot * 1000 + position for position in some]
            assert len(set(rows.tolist())) == len(some), "each position has its own row"
            assert (found.rows[query, len(some) :] == NO_ROW).all()
            counts = self.check(slot, some, found.missed[query, : len(some)].tolist())
            expected = [total + count for total, count in zip(expected, counts, strict=True)]
        assert found.counts.tolist() == expected
        return found

    def check(self, slot: int, some: list[int], missed: list[bool]) -> list[int]:
        """Compares a step of a slot with the model, and returns the expected counts."""
        held, now = self.held[slot], int(self.now[slot])
        on_pages = [p for p in some if self.page_table[slot, p // SIZE] >= 0]
        away = [p for p in some if p not in on_pages]
        hits = [p for p in away if p in held]
        assert [p for p, lost in zip(some, missed, strict=True) if lost] == [p for p in away if p not in held]
        after = set(self.group.owner[slot, :-1].tolist()) - {-1}
        gone = held.keys() - after
        assert not gone & set(away)
        assert after == (held.keys() - gone) | set(away), "the slot now caches all chosen positions"
        assert len(gone) == max(0, len(held) + len(away) - len(hits) - self.rows), "no row is evicted needlessly"
        stayed = [last for p, last in held.items() if p not in gone and p not in away]
        for p in gone:
            assert all(min(now - held[p], OLDEST) >= min(now - last, OLDEST) for last in stayed)
        self.held[slot] = {p: now if p in away else held[p] for p in after}
        return [len(some), len(on_pages), len(hits), len(away) - len(hits)]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([8, 16]), st.sampled_from([3, 8]))
def test_what_is_chosen_is_found_and_the_least_recently_chosen_goes(seed: int, rows: int, top_k: int) -> None:
    slots = Slots(rows, top_k, seed)
    random = slots.random
    for _ in range(30):
        for slot in range(SLOTS):
            index = int(random.integers(CONTEXT // SIZE))
            page = int(slots.page_table[slot, index])
            if page >= 0:
                slots.set_page(slot, index, -1)
                slots.spare.append(page)
            elif slots.spare and random.random() < 0.5:
                slots.set_page(slot, index, slots.spare.pop())
        # The chosen positions are near those of the last step, as in real models, so that some are in hot rows.
        around = random.integers(CONTEXT - 24, size=SLOTS)
        chosen = {}
        for slot in random.permutation(SLOTS)[: random.integers(1, SLOTS + 1)].tolist():
            some = around[slot] + random.permutation(24)[: random.integers(1, top_k + 1)]
            chosen[slot] = sorted(some.tolist())
        slots.step(chosen)


@pytest.mark.parametrize("rows", [8, 16])
def test_first_step_all_missed_all_there(rows: int) -> None:
    slots = Slots(rows, 8)
    first, second = list(range(8)), list(range(50, 58))
    assert slots.step({2: first}).counts.tolist() == [8, 0, 0, 8]
    assert slots.step({2: first}).counts.tolist() == [8, 0, 8, 0]
    assert slots.step({2: second}).counts.tolist() == [8, 0, 0, 8]
    assert slots.step({2: first}).counts.tolist() == ([8, 0, 0, 8] if rows == 8 else [8, 0, 8, 0])


def test_rows_go_in_the_order_in_which_they_were_chosen() -> None:
    slots = Slots(8, 3)
    for some in ([0, 1, 2], [3, 4, 5], [6, 7], [0]):
        slots.step({0: some})
    slots.step({0: [20]})
    assert 1 not in slots.held[0], "0 was chosen later, and of the equally old 1 and 2 the first row is evicted"
    slots.step({0: [30, 31]})
    assert sorted(slots.held[0]) == [0, 4, 5, 6, 7, 20, 30, 31]


def test_what_was_chosen_long_ago_is_equally_old() -> None:
    slots = Slots(8, 4)
    for some in ([0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2]):
        slots.step({0: some})
    for _ in range(OLDEST + 2):
        slots.step({0: [7]})
    # Position 3 is the oldest. But ages are bounded and equal here, so the first of the equally old rows is evicted.
    slots.step({0: [60]})
    assert sorted(slots.held[0]) == [1, 2, 3, 4, 5, 6, 7, 60]


def test_other_slots_change_nothing() -> None:
    alone, beside = Slots(8, 4), Slots(8, 4)
    random = np.random.default_rng(3)
    for _ in range(20):
        some, other = (sorted(random.permutation(20)[:4].tolist()) for _ in range(2))
        first, second = alone.step({1: some}), beside.step({4: other, 1: some})
        assert torch.equal(first.rows[0], second.rows[1])


def test_a_page_that_is_nowhere_is_an_error() -> None:
    slots = Slots(8, 4)
    slots.host_table[1, 3] = -1
    slots.step({1: [4, 5]})
    with pytest.raises(IndexError):
        slots.step({1: [12]})
    slots = Slots(8, 4)
    slots.row_table.fill_(-1)
    positions = torch.tensor([[1, 2, 3, NO_ROW]])
    places = Places(torch.tensor([1]), torch.ones(1).int(), slots.page_table, slots.row_table, SIZE, STRIDE)
    assert find(positions, places, slots.group).rows.tolist() == [[NO_PAGE, NO_PAGE, NO_PAGE, NO_ROW]]
