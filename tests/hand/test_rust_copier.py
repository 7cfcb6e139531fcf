"""The host tier of the hand in Rust: restored pages have the saved content, also after a restart of the hand."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from forebay.protocol.constants import COPY_FAILED, COPY_OK, COPY_RESTORE, COPY_RESTORE_INDEX, COPY_SAVE
from forebay.protocol.result import StepResult
from tests.hand.support import PlanBuilder, greedy_reference, reference_model
from tests.hand.test_rust_hand import RustRunner, in_safetensors, rust, settings

PAGE = 16
PROMPT = [(37 * at + 11) % 131 for at in range(2 * PAGE + 5)]
HOST, LENDERS = 5, 6
"""File descriptors in the hand: of its host memory, and of the first lender's memory."""


class Tier:
    """A hand with a host tier, which computes the prompt on pages 1, 2 and 3."""

    def __init__(self, runner: RustRunner, memory: int) -> None:
        self.runner = runner
        self.memory = memory
        self.page_bytes: int = runner.facts["page_bytes"]
        self._step = 0
        self._ended: list[list[int]] = []

    def step(
        self,
        *copies: tuple[int, int, int, int],
        wait_us: int | None = None,
        rows: bool = False,
        sources: Sequence[int] = (),
        spans: Sequence[tuple[int, int]] = (),
    ) -> StepResult:
        """Runs one plan. With `rows` it computes the prompt."""
        builder = self._plan(copies=list(copies), wait_us=[] if wait_us is None else [wait_us])
        builder.copy_sources += sources
        builder.copy_spans += spans
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
        return sorted(ended)

    def second_token(self, first: int, *pages: int) -> int:
        """The token after the prompt and `first`. `pages` hold the prompt's first pages, and the rest is computed."""
        builder = self._plan()
        builder.slot(3, [*PROMPT, first], prompt_len=len(PROMPT))
        builder.page_writes += [(3, index, page) for index, page in enumerate([*pages, 30, 31, 32][:3])]
        start = PAGE * len(pages)
        builder.row(3, start, len(PROMPT) + 1 - start)
        (token,) = self.runner.step(builder.build()).tokens.tolist()
        return int(token)

    def host_page(self, number: int) -> bytes:
        return os.pread(self.memory, self.page_bytes, number * self.page_bytes)

    def _plan(self, **columns: Any) -> PlanBuilder:
        self._step += 1
        return PlanBuilder(self._step, **columns)


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = os.memfd_create("host")
    yield descriptor
    os.close(descriptor)


@contextmanager
def tier(folder: Path, memory: int, family: str = "qwen3", lenders: Sequence[int | None] = (), **changes: Any) -> Any:
    """A hand that uses this host memory, in which an earlier hand may have saved pages. It is killed in the end."""
    numbers = [None if fd is None else LENDERS + at for at, fd in enumerate(lenders)]
    given = {LENDERS + at: fd for at, fd in enumerate(lenders) if fd is not None}
    size = {"host_bytes": 1 << 20, "kv_checksum": True, "host_lenders": numbers, **changes}
    values = settings(in_safetensors(folder, family), **size)
    with rust(folder, values, {HOST: memory, **given}) as runner:
        yield Tier(runner, memory)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3", {}),
        ("qwen3", {"kv_cache_dtype": "int8", "dtype": "bfloat16"}),
        ("llama", {"dtype": "bfloat16"}),
        ("gemma3", {}),
        ("deepseek-v3-wide", {}),
        ("deepseek-v3-wide", {"kv_cache_dtype": "int8"}),
    ],
    ids=["plain", "codes", "pairs", "windows", "latent", "latent-codes"],
)
def test_what_is_restored_is_what_was_saved_behind_the_rows(
    tmp_path: Path, memory: int, family: str, changes: dict[str, Any]
) -> None:
    with tier(tmp_path, memory, family, **changes) as hand:
        # The same plan computes the pages and saves them.
        result = hand.step((7, COPY_SAVE, 1, 5), (8, COPY_SAVE, 2, 4), rows=True)
        assert hand.until_ended(2) == [[7, COPY_OK], [8, COPY_OK]]
        (first,) = result.tokens.tolist()
        saved = [hand.host_page(5), hand.host_page(4)]
        assert all(any(page) for page in saved)
        assert saved[0] != saved[1]
        hand.step((9, COPY_RESTORE, 11, 5), (10, COPY_RESTORE, 12, 4))
        hand.until_ended(2)
        hand.step((11, COPY_SAVE, 11, 0), (12, COPY_SAVE, 12, 1))
        hand.until_ended(2)
        assert [hand.host_page(0), hand.host_page(1)] == saved
        # A request then computes with the restored pages.
        second = hand.second_token(first, 11, 12)
        assert second == hand.second_token(first)
        if family == "qwen3" and not changes:
            assert [first, second] == greedy_reference(reference_model(family), PROMPT, 2)[0]
        facts = hand.runner.facts
        assert os.fstat(memory).st_size == facts["host_page_count"] * (facts["page_bytes"] + 4)


def test_the_memory_outlives_a_hand_that_is_killed(tmp_path: Path, memory: int) -> None:
    with tier(tmp_path, memory) as hand:
        (first,) = hand.step((1, COPY_SAVE, 1, 5), (2, COPY_SAVE, 2, 4), rows=True).tokens.tolist()
        hand.until_ended(2)
        pages = hand.runner.facts["host_page_count"]
    expected = greedy_reference(reference_model("qwen3"), PROMPT, 2)[0]
    with tier(tmp_path, memory, host_bytes=None, host_pages=pages) as hand:
        assert hand.runner.facts["host_page_count"] == pages
        hand.step((2, COPY_RESTORE, 20, 5), (3, COPY_RESTORE, 21, 4))
        assert hand.until_ended(2) == [[2, COPY_OK], [3, COPY_OK]]
        assert [first, hand.second_token(first, 20, 21)] == expected


def test_copies_that_fail_are_reported_and_the_hand_goes_on(tmp_path: Path, memory: int) -> None:
    with tier(tmp_path, memory) as hand:
        hand.step((1, COPY_SAVE, 1, 5), (2, COPY_SAVE, 2, 4), rows=True)
        hand.until_ended(2)
        os.pwrite(memory, b"\x5c", 5 * hand.page_bytes + 3)
        hand.step((3, COPY_RESTORE, 20, 5), (4, COPY_RESTORE, 21, 4))
        assert hand.until_ended(2) == [[3, COPY_FAILED], [4, COPY_OK]]
        os.ftruncate(memory, 4 * hand.page_bytes)
        hand.step((5, COPY_RESTORE, 22, 4))
        assert hand.until_ended(1) == [[5, COPY_FAILED]]
    told = (tmp_path / "stderr").read_text()
    assert "a page was not copied: host page 5 is not as it was saved" in told


def test_a_page_is_borrowed_from_the_memory_of_another_hand(tmp_path: Path, memory: int) -> None:
    with tier(tmp_path, memory) as lender:
        lender.step((1, COPY_SAVE, 1, 5), rows=True)
        lender.until_ended(1)
        saved = lender.host_page(5)
        content = os.pread(memory, os.fstat(memory).st_size, 0)
        other = os.memfd_create("host")
        # Replica 1 lends its memory, and replicas 0 and 2 do not.
        (tmp_path / "other").mkdir()
        with tier(tmp_path / "other", other, lenders=[None, memory, None]) as borrower:
            borrower.step((4, COPY_RESTORE, 20, 5), (5, COPY_RESTORE, 21, 5), sources=[0, 2])
            assert borrower.until_ended(2) == [[4, COPY_FAILED], [5, COPY_OK]], "its own page 5 was never saved"
            borrower.step((6, COPY_SAVE, 21, 0))
            borrower.until_ended(1)
            assert borrower.host_page(0) == saved
            # A replica that does not lend, and a page outside of the memory.
            borrower.step((7, COPY_RESTORE, 22, 5), (8, COPY_RESTORE, 23, 1 << 20), sources=[1, 2])
            assert borrower.until_ended(2) == [[7, COPY_FAILED], [8, COPY_FAILED]]
        os.close(other)
        assert os.pread(memory, os.fstat(memory).st_size, 0) == content, "a lender's memory is only read"


@pytest.mark.parametrize(
    ("copy", "more", "why"),
    [
        ((1, COPY_SAVE, 256, 0), {}, "a copy outside of 256 pages and"),
        ((1, COPY_SAVE, 0, 1 << 20), {}, "a copy outside of 256 pages and"),
        ((1, COPY_RESTORE, 0, 0), {"sources": [3]}, "a copy from lender 3 of 0"),
        ((1, COPY_SAVE, 0, 0), {"spans": [(0, 1)]}, "a copy of a part of a page"),
        ((1, COPY_RESTORE_INDEX, -1, 0), {}, "a copy of a part of a page"),
    ],
)
def test_copies_of_what_is_not_there_end_the_hand(
    tmp_path: Path, memory: int, copy: tuple[int, int, int, int], more: dict[str, Any], why: str
) -> None:
    with tier(tmp_path, memory) as hand, pytest.raises(AssertionError, match=f"PlanError: {why}"):
        hand.step(copy, **more)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"host_bytes": 10**15}, r"a host tier of 1000000\.0 GB does not fit: .* take 80%; choose --hicache-size"),
        ({"host_bytes": 10}, "a host tier of 10 bytes holds no page of"),
        ({"hot_row_tokens": 0}, "the Rust hand does not have sparse decoding"),
        ({"kv_save_order": "fence"}, "for sparse decoding"),
    ],
)
def test_sizes_that_make_no_sense_are_one_clear_line(
    tmp_path: Path, memory: int, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(AssertionError, match=why), tier(tmp_path, memory, **changes):
        pass


def test_a_tier_needs_memory_of_the_brain(tmp_path: Path) -> None:
    values = settings(in_safetensors(tmp_path, "qwen3"), host_ratio=0.5)
    with pytest.raises(AssertionError, match="a host tier without memory for it"), rust(tmp_path, values):
        pass


def test_a_ratio_is_of_the_pages_of_the_device(tmp_path: Path, memory: int) -> None:
    with tier(tmp_path, memory, host_bytes=None, host_ratio=0.5) as hand:
        assert hand.runner.facts["host_page_count"] == hand.runner.facts["page_count"] // 2


def test_each_end_is_told_once_however_slow_copies_are(tmp_path: Path, memory: int) -> None:
    with tier(tmp_path, memory, copy_gbps=1e-3) as hand:
        hand.step(*[(ticket, COPY_SAVE, 1, ticket) for ticket in range(4)], rows=True)
        assert hand.until_ended(4) == [[ticket, COPY_OK] for ticket in range(4)]
        assert hand.step(wait_us=0).copied.size == 0
