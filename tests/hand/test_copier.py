"""Copies between the device's pages and the host's: a restored page has the saved content."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence

import numpy as np
import pytest

from forebay.protocol.constants import COPY_FAILED, COPY_OK, COPY_RESTORE, COPY_SAVE
from forebay.protocol.result import StepResult
from forebay.runner.host_tier import HostMemory
from forebay.runner.runner import ModelRunner
from forebay.state.config import ConfigError
from forebay.state.slots import PlanError
from tests.hand.support import PlanBuilder, greedy_reference, reference_model, runner_of

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32]
DEVICES = pytest.mark.parametrize("device", ["cpu", "deferred"])


class Hand:
    """A runner with a host tier, and both ends of the socket that brings plans."""

    def __init__(self, family: str = "llama", **changes: object) -> None:
        self.family = family
        self.memory = os.memfd_create("host")
        self.near, self.far = socket.socketpair()
        self.changes = changes
        self.runner = self.another()
        self._step = 0
        self._ended: list[list[int]] = []

    def another(self) -> ModelRunner:
        """A runner with the same host memory as the last one."""
        host = HostMemory(self.memory, self.far.fileno())
        return runner_of(reference_model(self.family), None, host, **{"host_bytes": 1 << 20, **self.changes})

    def step(
        self,
        *copies: tuple[int, int, int, int],
        wait_us: int | None = None,
        rows: bool = False,
        sources: Sequence[int] = (),
    ) -> StepResult:
        """Runs one plan. With `rows` it computes the prompt on pages 1, 2 and 3."""
        self._step += 1
        builder = PlanBuilder(self._step, copies=list(copies), wait_us=[] if wait_us is None else [wait_us])
        builder.copy_sources += sources
        if rows:
            builder.slot(0, PROMPT)
            builder.page_writes += [(0, index, 1 + index) for index in range(3)]
            builder.row(0, 0, len(PROMPT))
        result = self.runner.step(builder.build())
        self._ended += result.copied.tolist()
        return result

    def until_ended(self, count: int) -> list[list[int]]:
        """Waits until this many more copies have ended. Returns their tickets and status codes."""
        while len(self._ended) < count:
            self.step(wait_us=1000)
        ended, self._ended = self._ended, []
        return ended


@pytest.fixture
def hand() -> Hand:
    return Hand(kv_checksum=True)


def page(runner: ModelRunner, number: int) -> list[bytes]:
    return [piece[number].numpy().tobytes() for part in runner.kv.parts for piece in part.pieces()]


@DEVICES
@pytest.mark.parametrize("family", ["llama", "deepseek-v3", "glm-dsa-shared"])
def test_what_is_restored_is_what_was_saved_behind_the_rows(device: str, family: str) -> None:
    hand = Hand(family, device=device, kv_checksum=True)
    # The same plan computes the page and saves it.
    result = hand.step((7, COPY_SAVE, 1, 5), (8, COPY_SAVE, 2, 4), rows=True)
    expected = greedy_reference(reference_model(family), PROMPT, 2)[0]
    assert hand.until_ended(2) == [[7, COPY_OK], [8, COPY_OK]]
    assert result.tokens.tolist() == expected[:1]
    saved = [page(hand.runner, 1), page(hand.runner, 2)]
    assert any(any(piece) for piece in saved[0]), "the plan has computed the page"
    hand.step((9, COPY_RESTORE, 11, 5), (10, COPY_RESTORE, 12, 4))
    hand.until_ended(2)
    assert [page(hand.runner, 11), page(hand.runner, 12)] == saved
    # A request then computes with the restored pages.
    builder = PlanBuilder(99)
    builder.slot(3, [*PROMPT, *expected[:1]], prompt_len=len(PROMPT))
    builder.page_writes += [(3, 0, 11), (3, 1, 12), (3, 2, 13)]
    builder.row(3, 8, len(PROMPT) + 1 - 8)
    assert hand.runner.step(builder.build()).tokens.tolist() == expected[1:]


def test_a_host_page_is_the_main_part_and_then_the_index_part() -> None:
    hand = Hand("glm-dsa-shared", kv_checksum=True)
    hand.step((1, COPY_SAVE, 1, 5), rows=True)
    hand.until_ended(1)
    size = hand.runner.kv.page_bytes
    main, index = page(hand.runner, 1)
    assert (len(main), len(index)) == (4 * 4 * 40 * 4, 2 * 4 * 16 * 4)
    assert any(main)
    assert any(index)
    assert os.pread(hand.memory, size, 5 * size) == main + index
    # The checksum covers both parts.
    os.pwrite(hand.memory, b"\x5c", 6 * size - 1)
    hand.step((2, COPY_RESTORE, 20, 5))
    assert hand.until_ended(1) == [[2, COPY_FAILED]]


def test_the_memory_outlives_the_hand(hand: Hand) -> None:
    hand.step((1, COPY_SAVE, 1, 5), rows=True)
    hand.until_ended(1)
    saved = page(hand.runner, 1)
    pages = hand.runner.host_pages
    hand.changes = {**hand.changes, "host_pages": pages, "host_bytes": None}
    hand.runner = hand.another()
    assert hand.runner.host_pages == pages
    hand.step((2, COPY_RESTORE, 20, 5))
    assert hand.until_ended(1) == [[2, COPY_OK]]
    assert page(hand.runner, 20) == saved


def test_a_page_that_was_changed_is_not_restored(hand: Hand) -> None:
    hand.step((1, COPY_SAVE, 1, 5), rows=True)
    hand.until_ended(1)
    os.pwrite(hand.memory, b"\x5c", 5 * hand.runner.kv.page_bytes + 3)
    before = page(hand.runner, 20)
    hand.step((2, COPY_RESTORE, 20, 5))
    assert hand.until_ended(1) == [[2, COPY_FAILED]]
    assert page(hand.runner, 20) == before


def test_a_throttle_makes_copies_as_slow_as_it_says() -> None:
    hand = Hand(copy_gbps=1e-4)
    begun = time.perf_counter()
    hand.step(*[(ticket, COPY_SAVE, 1, ticket) for ticket in range(4)], rows=True)
    hand.until_ended(4)
    least = 4 * hand.runner.kv.page_bytes / 1e5
    assert time.perf_counter() - begun >= least
    result = hand.step(wait_us=0)
    assert result.copied.size == 0, "each end is reported once"


def test_who_waits_for_copies_goes_on_when_a_plan_comes() -> None:
    # Copying a page takes more than ten seconds.
    hand = Hand(copy_gbps=1e-7)
    hand.step((1, COPY_SAVE, 1, 5), rows=True)
    hand.near.send(b"a plan")
    begun = time.perf_counter()
    for _ in range(50):
        hand.step(wait_us=1000)
    assert time.perf_counter() - begun < 0.05 * 50, "no step waits while a plan is there"


def test_copies_outside_of_the_pools_are_refused(hand: Hand) -> None:
    for copy in [(1, COPY_SAVE, hand.runner.kv.page_count, 0), (1, COPY_SAVE, 0, hand.runner.host_pages)]:
        with pytest.raises(PlanError, match="outside"):
            hand.step(copy)


def test_sizes_that_make_no_sense_are_one_clear_line() -> None:
    with pytest.raises(ConfigError, match=r"a host tier of 1000000\.0 GB does not fit: .*--hicache-size"):
        Hand(host_bytes=10**15)
    with pytest.raises(ConfigError, match="holds no page"):
        Hand(host_bytes=10)
    hand = Hand(host_bytes=None, host_ratio=0.5)
    assert hand.runner.host_pages == hand.runner.kv.page_count // 2
    facts = hand.runner.facts()
    assert facts["host_page_count"] == hand.runner.host_pages
    assert facts["page_bytes"] == hand.runner.kv.page_bytes


def test_without_a_host_tier_results_say_nothing_of_copies() -> None:
    runner = runner_of(reference_model("llama"))
    builder = PlanBuilder(1)
    builder.slot(0, PROMPT)
    builder.page_writes += [(0, index, 1 + index) for index in range(3)]
    builder.row(0, 0, len(PROMPT))
    result = runner.step(builder.build())
    assert runner.host_pages == 0
    assert result.copied.shape == (0, 2)
    assert np.array_equal(result.copy_timing, np.zeros(0))


@DEVICES
def test_who_does_not_write_saves_nothing_and_waits_for_its_rows(device: str) -> None:
    hand = Hand(device=device, kv_checksum=True)
    tier = hand.runner._tier
    assert tier is not None
    tier._copier._writes = False
    hand.step((1, COPY_SAVE, 1, 5), rows=True)
    assert hand.until_ended(1) == [[1, COPY_OK]]
    assert any(any(piece) for piece in page(hand.runner, 1)), "the plan has computed the page"
    assert not any(os.pread(hand.memory, os.fstat(hand.memory).st_size, 0))


@DEVICES
def test_a_page_is_borrowed_from_the_memory_of_another_hand(hand: Hand, device: str) -> None:
    hand.step((1, COPY_SAVE, 1, 5), (2, COPY_SAVE, 2, 0), rows=True)
    hand.until_ended(2)
    saved, before = page(hand.runner, 1), hand.memory
    content = os.pread(before, os.fstat(before).st_size, 0)
    # Replica 1 lends its memory, and replicas 0 and 2 do not.
    borrower = Hand(device=device, kv_checksum=True, host_lenders=[None, before, None])
    borrower.step((4, COPY_RESTORE, 20, 5), (5, COPY_RESTORE, 21, 5), sources=[0, 2])
    assert borrower.until_ended(2) == [[4, COPY_FAILED], [5, COPY_OK]], "its own page 5 is not page 5 of replica 1"
    assert page(borrower.runner, 21) == saved
    assert os.pread(before, os.fstat(before).st_size, 0) == content, "a lender's memory is only read"
    # A damaged page, a page outside of the memory, and a replica that does not lend.
    os.pwrite(before, b"\x5c", 3)
    borrower.step(
        *[(6, COPY_RESTORE, 22, 0), (7, COPY_RESTORE, 23, 1 << 20), (8, COPY_RESTORE, 24, 5)], sources=[2, 2, 1]
    )
    assert borrower.until_ended(3) == [[6, COPY_FAILED], [7, COPY_FAILED], [8, COPY_FAILED]]
    with pytest.raises(PlanError, match="a copy from lender 4 of 3"):
        borrower.step((9, COPY_RESTORE, 22, 0), sources=[4])
