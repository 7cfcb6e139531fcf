"""Sparse attention: which positions queries choose, and where chosen positions are found."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import torch

from forebay.gpu.hot import HotRows, SparsePages
from forebay.gpu.interface import Kernels
from forebay.gpu.tables import Received, places
from forebay.protocol.plan import Plan
from tests.gpu.checks.memory import CPU, SINGLE, Numbers, Paged, nan, poisoned
from tests.hand.support import PlanBuilder


def check_choose(
    operators: Kernels,
    rows: list[tuple[int, int]],
    top_k: int,
    *,
    heads: int = 3,
    dim: int = 20,
    page_size: int = 4,
    padding: int = 0,
    distinct: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    seed: int = 0,
) -> None:
    """Rows are (start, length). With `distinct` keys many scores are equal, and the lower positions must win.

    A position may be chosen or not if float32 cannot distinguish its score from the lowest of the best scores.
    """
    ends, lengths = [start + length for start, length in rows], [length for _, length in rows]
    paged = Paged.make(ends, 1, dim, page_size, seed, dtype, device, distinct)
    numbers = Numbers(device, seed + 1)
    count = sum(lengths)
    q = numbers.normal(count + padding, heads, dim, dtype=dtype)
    weights = numbers.normal(count + padding, heads)
    step = paged.rows(lengths)
    if all(length == 1 for length in lengths) and not padding:
        step = replace(step, chunks=False)
    with poisoned():
        chosen = operators.choose(q, weights, paged.pool[:, 0], step, top_k)
    assert chosen.shape == (len(q), top_k)
    at = 0
    for history, length in zip(paged.histories, lengths, strict=True):
        # Equal keys have one score, so it is computed once.
        keys, which = history[:, 0].double().unique(dim=0, return_inverse=True)
        products = torch.einsum("nhd,sd->nhs", q[at : at + length].double(), keys).relu()
        scores = torch.einsum("nhs,nh->ns", products, weights[at : at + length].double())[:, which]
        sizes = torch.einsum("nhs,nh->ns", products, weights[at : at + length].double().abs())[:, which]
        for i in range(length):
            seen = len(history) - length + i + 1
            _check_best(chosen[at + i], scores[i, :seen], sizes[i, :seen] * SINGLE, which[:seen], top_k)
        at += length
    assert chosen[at:].eq(-1).all()


def _check_best(
    chosen: torch.Tensor, scores: torch.Tensor, error: torch.Tensor, which: torch.Tensor, top_k: int
) -> None:
    """`which`: the index of each position's key. `error`: the error bounds of the scores."""
    kept = min(top_k, len(scores))
    assert chosen[kept:].eq(-1).all()
    best = chosen[:kept].long()
    assert bool((best[1:] > best[:-1]).all()), "positions ascend, and none occurs twice"
    assert bool((best >= 0).all())
    assert bool((best < len(scores)).all())
    among = torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
    among[best] = True
    least = scores.topk(kept).values[-1]
    assert not (among & (scores < least - 2 * error)).any()
    assert not (~among & (scores > least + 2 * error)).any()
    # For each key, the first position that was not kept. No later position of this key may be kept.
    position = torch.arange(len(scores), device=scores.device)
    left_out = torch.full((int(which.max()) + 1,), len(scores), device=scores.device)
    left_out.scatter_reduce_(0, which[~among], position[~among], "amin")
    assert not (among & (position > left_out[which])).any()


@dataclass(frozen=True)
class RigSizes:
    """Slots, their positions, and the pages that hold them."""

    page: int = 4
    pages: int = 12
    stride: int = 8
    host_stride: int = 100
    width: int = 6
    slots: int = 4
    context: int = 48


SMALL = RigSizes()


class Rig:
    """Slots whose positions are all in the host's memory. Some are also on device pages, and others in hot rows."""

    def __init__(
        self,
        hot: int,
        seed: int,
        sizes: RigSizes = SMALL,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
        reads_host: bool = True,
    ) -> None:
        """`reads_host`: whether the device reads the host's pinned memory itself, instead of a copy."""
        self.sizes, self.device, self.random = sizes, device, random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        slots, page = sizes.slots, sizes.page
        per_slot = sizes.context // page
        self.host_pages = slots * per_slot
        memory = torch.randn(self.host_pages * sizes.host_stride, generator=generator).to(dtype)
        self._known = memory.to(device)
        self.host = memory.pin_memory() if reads_host and device.type == "cuda" else self._known
        own = hot // page
        total = sizes.pages + slots * own + 1
        self.pool = nan(total * sizes.stride, sizes.width, dtype=dtype, device=device)
        none = torch.full((slots + 1, per_slot), -1, dtype=torch.int32)
        hot_rows = torch.full((slots + 1, own), -1, dtype=torch.int32)
        hot_rows[:slots] = sizes.pages + torch.randperm(slots * own, generator=generator).view(slots, own)
        host_table, page_table = none.clone(), none.clone()
        host_table[:slots] = torch.randperm(self.host_pages, generator=generator).view(slots, -1)
        page_table[slots] = total - 1
        clock = torch.zeros(slots + 1, dtype=torch.int32)
        page_table, host_table, hot_rows = (table.to(device) for table in (page_table, host_table, hot_rows))
        self.pages = SparsePages(
            page_table, host_table, hot_rows, clock.to(device), page, sizes.stride, null_page=total - 1
        )
        # Lines have one element more than is ever read.
        line = torch.full((slots + 1, hot + 1), -1, dtype=torch.int32, device=device)
        # Entries without a matching owner may have any value.
        row_of = torch.zeros(slots + 1, sizes.context + 1, dtype=torch.int16).random_(-5, 40, generator=generator)
        self.group = HotRows(row_of.to(device), line, torch.zeros_like(line), hot)
        self.last: list[dict[int, int]] = [{} for _ in range(slots)]
        """For each slot, the positions in hot rows, each with the step of its last use."""

    def rows(self, slot: int, positions: list[int]) -> torch.Tensor:
        """The content of the positions' rows, [positions, width]."""
        sizes, position = self.sizes, torch.tensor(positions, dtype=torch.int64, device=self.device)
        host = self.pages.host_table[slot].long()[position // sizes.page]
        at = host * sizes.host_stride + position % sizes.page * sizes.width
        return self._known[at[:, None] + torch.arange(sizes.width, device=self.device)]

    def move_pages(self) -> None:
        """Replaces the pages that are on the device."""
        sizes = self.sizes
        self.pages.page_table[: sizes.slots] = -1
        taken = set()
        for page in range(sizes.pages):
            slot, index = self.random.randrange(sizes.slots), self.random.randrange(sizes.context // sizes.page)
            if (slot, index) not in taken:
                taken.add((slot, index))
                self.pages.page_table[slot, index] = page
                begin = page * sizes.stride
                positions = list(range(index * sizes.page, (index + 1) * sizes.page))
                self.pool[begin : begin + sizes.page] = self.rows(slot, positions)

    def step(self, operators: Kernels, wanted: dict[int, list[int]], top_k: int, padding: int = 0) -> None:
        """Looks up the chosen positions of slots, and checks the results and the state."""
        sizes = self.sizes
        self.pages.clock[list(wanted)] += 1
        chosen = torch.full((len(wanted) + padding, top_k), -1, dtype=torch.int32)
        for query, positions in enumerate(wanted.values()):
            chosen[query, : len(positions)] = torch.tensor(positions)
        slots = torch.tensor([*wanted, *[sizes.slots] * padding], dtype=torch.int32)
        errors = torch.zeros(1, dtype=torch.int32, device=self.device)
        with poisoned():
            found = operators.resolve(chosen.to(self.device), slots.to(self.device), self.pages, self.group, errors)
            operators.gather(found, self.host, sizes.host_stride, sizes.page, self.pool)
        assert not errors
        entries, counts = found.rows.cpu(), found.counts.tolist()
        for query, (slot, positions) in enumerate(wanted.items()):
            own = entries[query, : len(positions)]
            assert entries[query, len(positions) :].eq(-1).all()
            assert len(own.unique()) == len(positions)
            assert self.pool[own.long().to(self.device)].equal(self.rows(slot, positions))
            self._check_use(slot, positions, counts[query])
        assert found.counts[len(wanted) :].eq(0).all()
        assert found.rows[len(wanted) :].eq(-1).all()

    def _check_use(self, slot: int, positions: list[int], counts: list[int]) -> None:
        now, table = int(self.pages.clock[slot]), self.pages.page_table[slot].tolist()
        on_pages = {p for p in positions if table[p // self.sizes.page] >= 0}
        rest = [p for p in positions if p not in on_pages]
        hits = [p for p in rest if p in self.last[slot]]
        assert counts == [len(on_pages), len(hits), len(rest) - len(hits)]
        owner = set(self.group.owner[slot, : self.group.count].tolist())
        assert set(rest) <= owner
        used = self.last[slot] | dict.fromkeys(hits, now)
        gone = [step for position, step in used.items() if position not in owner]
        kept = {position: step for position, step in used.items() if position in owner}
        # An evicted row is not in use, and was not used later than a row that stays.
        if gone:
            assert max(gone) < now
            assert max(gone) <= min(kept.values(), default=now) or now - max(gone) >= 31
        self.last[slot] = kept | dict.fromkeys(rest, now)


def check_found(operators: Kernels, rig: Rig, steps: int, top_k: int, working: int) -> None:
    """In each step three slots choose `top_k` of their `working` positions, or one.

    These positions and the pages change slowly.
    """
    sizes = rig.sizes
    sets = {slot: rig.random.sample(range(sizes.context), working) for slot in range(sizes.slots)}
    for step in range(steps):
        if step % 8 == 7:
            rig.move_pages()
        wanted = {}
        for slot in rig.random.sample(range(sizes.slots), 3):
            sets[slot][rig.random.randrange(working)] = rig.random.randrange(sizes.context)
            some = sorted(set(sets[slot]))
            wanted[slot] = sorted(rig.random.sample(some, min(len(some), rig.random.choice([1, top_k]))))
        rig.step(operators, wanted, top_k, padding=step % 2)


def check_opened(operators: Kernels, device: torch.device = CPU) -> None:
    """Plans open and close hot rows only of the slots that they name."""
    slots, pages = SMALL.slots, SMALL.pages
    rig = Rig(8, 5, device=device)
    rig.group.owner.fill_(3)
    rig.group.stamp.fill_(9)
    builder = PlanBuilder()
    builder.slot(2, [1, 2])
    plan = builder.build()
    hot = np.array([(0, 0, 5), (0, 1, 7)], np.int32)
    host = np.array([(3, 2, 1), (3, 0, 0)], np.int32)
    plan = Plan(slots=plan.slots, slot_floats=plan.slot_floats, tokens=plan.tokens, hot_rows=hot, host_writes=host)
    plan = plan.staged()
    words, columns = (torch.from_numpy(part).to(device) for part in (plan.body.copy(), places(plan)))
    given = Received(words, columns, torch.zeros(1, dtype=torch.int32, device=device))
    errors = torch.zeros(1, dtype=torch.int32, device=device)
    other = rig.pages.hot_rows[[1, 3]].clone()
    rig.pages.clock.fill_(4)
    operators.clear_slots(given, rig.pages.hot_rows, slots)
    operators.write_table(given, "host_writes", rig.pages.host_table, 0, rig.host_pages, errors)
    operators.write_table(given, "hot_rows", rig.pages.hot_rows, 0, pages, errors)
    operators.open_hot_rows(given, rig.pages, rig.group, slots)
    assert not errors
    assert rig.pages.clock.tolist() == [0, 4, 4, 4, 4]
    assert rig.pages.hot_rows[0].tolist() == [5, 7]
    assert rig.pages.hot_rows[2].tolist() == [-1, -1]
    assert rig.pages.hot_rows[[1, 3]].equal(other)
    assert rig.pages.host_table[3, [2, 0]].tolist() == [1, 0]
    assert rig.group.owner.tolist() == [[-1] * 8 + [3]] + [[3] * 9] * slots
    assert rig.group.stamp.tolist() == [[0] * 8 + [9]] + [[9] * 9] * slots
