"""Sparse slots on each kind of hand: shared pages, restarts, warm-ups, wrong plans, and deliberate mistakes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forebay.gpu import reference
from forebay.gpu.hot import Found
from forebay.protocol.constants import COPY_RESTORE_INDEX, COPY_SAVE, NO_PAGE
from forebay.runner.host_tier import HostMemory
from forebay.runner.runner import ModelRunner
from forebay.state.checks import PlanError
from tests.hand.greedy import model_of
from tests.hand.sparse_slot import FULL, PROMPT, ROWS, Slot
from tests.hand.sparse_stories import EACH_HAND, HANDS, HOST, SIZE, SPARSE, sparse_runner, twins
from tests.hand.support import PlanBuilder, Sampling, greedy_reference, runner_of

__all__ = ["twins"]

KNOWN = FULL * SIZE
"""The number of positions in the prompt's full pages."""


@EACH_HAND
@SPARSE
def test_sparse_slots_share_pages_of_both_tiers(family: str, hand: dict[str, Any]) -> None:
    """One slot becomes sparse, then the other one too. Then the shared pages get other content."""
    runner = sparse_runner(family, **hand)
    prompts = {1: PROMPT, 2: [*PROMPT[:KNOWN], 7, 99, 3]}
    expected = {slot: greedy_reference(model_of(family), prompt, 12)[0] for slot, prompt in prompts.items()}
    found: dict[int, list[int]] = {1: [], 2: []}
    for step in range(12):
        builder = PlanBuilder(step)
        for slot, prompt in prompts.items():
            if step == 0:
                builder.slot(slot, prompt)
                own = [(index, 10 * slot + index) for index in range(FULL, FULL + 5)]
                pages = [*((index, 10 + index) for index in range(FULL)), *own]
                builder.page_writes += [(slot, *page) for page in pages]
                builder.host_writes += [(slot, index, 100 + page) for index, page in pages]
            start = 0 if slot == 1 else KNOWN
            first = step == slot - 1
            if first or found[slot]:
                at = len(prompt) + len(found[slot]) - 1
                builder.row(slot, start if first else at, len(prompt) - start if first else 1)
            if step == 3 * slot:
                builder.page_writes += [(slot, index, NO_PAGE) for index in range(FULL)]
                builder.hot_rows += [(slot, index, page + 10 * slot) for index, page in enumerate(ROWS)]
        if step == 0:
            builder.copies += [(index, COPY_SAVE, 10 + index, 110 + index) for index in range(FULL)]
        result = runner.step(builder.build())
        for (slot, *_), token in zip(builder.rows, result.tokens.tolist(), strict=True):
            found[slot].append(token)
        if step == 0:
            rest(runner, FULL, len(result.copied))
        if step == 6:
            runner.kv.main.pieces()[0][10 : 10 + FULL].fill_(0xFF)
    assert found == {1: expected[1], 2: expected[2][:11]}


def rest(runner: ModelRunner, copies: int, ended: int = 0) -> None:
    """Waits until this many copies have ended. `ended` of them were reported before."""
    while ended < copies:
        builder = PlanBuilder(100)
        builder.wait_us = [1000]
        ended += len(runner.step(builder.build()).copied)


@EACH_HAND
@SPARSE
def test_a_new_hand_goes_on_with_the_memory_of_the_dead_one(family: str, hand: dict[str, Any]) -> None:
    file = os.memfd_create("host")
    dead = Slot(runner=runner_of(model_of(family), None, HostMemory(file, 0), **HOST, **hand))
    tokens = dead.prefill().tokens.tolist()
    dead.until_ended(FULL)
    pages = dead.runner.host_pages
    del dead
    slot = Slot(runner=runner_of(model_of(family), None, HostMemory(file, 0), **{**HOST, **hand, "host_pages": pages}))
    slot.runner.warm_up()
    builder = slot.plan()
    builder.copies = [(index, COPY_RESTORE_INDEX, NO_PAGE, 100 + index) for index in range(FULL)]
    slot.take(builder)
    slot.until_ended(FULL)
    for position in range(KNOWN, len(PROMPT) + 8):
        builder = slot.plan()
        if position == KNOWN:
            builder.slot(1, [*PROMPT, *tokens], prompt_len=len(PROMPT))
            builder.page_writes += [(1, index, 10 + index if index >= FULL else NO_PAGE) for index in range(12)]
            builder.host_writes += [(1, index, 100 + index) for index in range(12)]
            builder.hot_rows += [(1, index, page) for index, page in enumerate(ROWS)]
        builder.row(1, position, 1, position >= len(PROMPT))
        result = slot.take(builder)
        assert result.sparse_rows.size
        tokens += result.tokens.tolist()
    assert tokens == greedy_reference(model_of(family), PROMPT, 9)[0]


@EACH_HAND
def test_a_warm_up_leaves_no_slot_sparse(hand: dict[str, Any]) -> None:
    slot = Slot(**hand)
    slot.runner.warm_up()
    slot.runner.device.event().wait()
    tables = slot.runner.tables
    assert tables.hot is not None
    assert not tables.hot.sparse.any()
    for table in (tables.page_table, tables.hot.host_table, tables.hot.table):
        assert table.eq(NO_PAGE).all()
    result = slot.prefill()
    assert not result.sparse_rows.size
    assert result.tokens.tolist() == greedy_reference(model_of("deepseek-v32"), PROMPT, 1)[0]


def test_memory_that_can_not_be_read_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = []

    def refuse(found: Any, *_: object) -> None:
        gathered.append(found)
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(reference, "gather", refuse)
    runner = sparse_runner("deepseek-v32", **HANDS["kernels"])
    with pytest.raises(RuntimeError, match="illegal memory access"):
        runner.warm_up()
    assert gathered[0].missing.tolist() == [SIZE], "the warm-up reads all of host page 0"


@pytest.mark.parametrize("page_size", [SIZE, 96])
def test_a_context_of_one_page_has_nothing_to_read(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(reference, "gather", lambda *arguments: called.append(arguments))
    runner = sparse_runner("deepseek-v32", **{**HANDS["kernels"], "page_size": page_size})
    runner.warm_up()
    assert bool(called) == (page_size < 96)


# Wrong plans.


def test_a_position_that_is_nowhere_is_told_and_touches_nobody() -> None:
    slot = Slot(**HANDS["kernels"])
    slot.prefill()
    slot.until_ended(FULL)
    before = slot.runner.kv.main.pieces()[0].clone()
    builder = slot.plan()
    builder.slot(2, PROMPT[:KNOWN])
    builder.page_writes += [(2, FULL - 1, 40)]
    builder.host_writes += [(2, FULL - 1, 140)]
    builder.hot_rows += [(2, index, page) for index, page in enumerate(ROWS)]
    builder.row(2, KNOWN - 1, 1)
    with pytest.raises(PlanError, match="a row that reads a page that it does not have"):
        slot.take(builder)
    others = [page for page in range(slot.runner.kv.page_count) if page not in (40, *ROWS)]
    assert slot.runner.kv.main.pieces()[0][others].equal(before[others])
    builder = slot.plan()
    builder.row(1, len(PROMPT), 1)
    assert slot.take(builder).tokens.tolist() == greedy_reference(model_of("deepseek-v32"), PROMPT, 2)[0][1:]


# Deliberate mistakes, which must change results.


def of_another_layer(found: Any, host: torch.Tensor, stride: int, size: int, pool: torch.Tensor) -> None:
    GATHER(found, host[size * pool.shape[1] :], stride, size, pool)


GATHER = reference.gather
MISTAKES: dict[str, Callable[..., None]] = {
    "rows that nobody copies": lambda *_: None,
    "rows of another layer": of_another_layer,
}


@pytest.mark.parametrize("mistake", [None, *MISTAKES])
def test_wrong_rows_show(mistake: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def distance() -> float:
        slot = Slot(**HANDS["kernels"])
        slot.prefill(Sampling(logprobs=130))
        slot.until_ended(FULL)
        builder = slot.plan()
        slot.become_sparse(builder)
        builder.row(1, len(PROMPT), 1)
        result = slot.take(builder)
        expected = greedy_reference(model_of("deepseek-v32"), PROMPT, 2)[1][1]
        return float(
            np.abs(result.logprob_values - expected[torch.from_numpy(result.logprob_ids).long()].numpy()).max()
        )

    if mistake is not None:
        monkeypatch.setattr(reference, "gather", MISTAKES[mistake])
    assert (distance() < 1e-4) == (mistake is None)


class Restoring(TorchDispatchMode):
    """Writes another number to a row of a pool before each operator, as a copy beside the steps may."""

    def __init__(self, row: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._row = row
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        self._row.fill_(self.count)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("missing", [0, 2])
def test_copies_beside_a_step_are_not_undone(missing: int) -> None:
    """A step must not write to rows that it does not need, because a copy may be writing there."""
    host, pool = torch.randn(40), torch.zeros(9, 2)
    pool[6] = 7.0
    source, target = torch.tensor([[3, 1, 0]]), torch.tensor([[4, 2, 0]])
    rows = torch.tensor([[4, 2, 6]], dtype=torch.int32)
    found = Found(rows, source, target, torch.tensor([missing]).int(), torch.zeros(1, 3).int())
    row = pool[0]
    with torch.inference_mode(), Restoring(row) as restoring:
        GATHER(found, host, 8, 4, pool)
    assert row.tolist() == [restoring.count] * 2
    expected = torch.zeros(8, 2)
    expected[5] = 7.0
    if missing:
        expected[3], expected[1] = host[6:8], host[2:4]
    assert pool[1:].equal(expected)
