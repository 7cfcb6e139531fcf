"""Recurrent states in the host tier: restored states have the saved content, also after a restart of the hand."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from forebay.protocol.constants import (
    COPY_FAILED,
    COPY_OK,
    COPY_RESTORE,
    COPY_RESTORE_STATE,
    COPY_SAVE,
    COPY_SAVE_STATE,
)
from forebay.protocol.result import StepResult
from forebay.runner.host_tier import HostMemory
from forebay.runner.runner import ModelRunner
from forebay.state.config import ConfigError, RunnerConfig
from forebay.state.slots import PlanError
from tests.hand.recurrent_models import model_of, save
from tests.hand.support import PlanBuilder, greedy_reference
from tests.hand.test_recurrent import prompts
from tests.hand.test_rust_hand import rust, settings

HANDS = pytest.mark.parametrize("hand", ["torch", "deferred", "rust"])
HOST, LENDER = 5, 6
PREFIX = prompts()[3][:32]
TAIL = [9, 100, 3]
TIER: dict[str, Any] = {"host_ratio": 1.0, "kv_checksum": True}
SAVED = [(1, COPY_SAVE, 40, 7), (2, COPY_SAVE, 17, 8), (3, COPY_SAVE_STATE, 2, 5)]
"""The copies that save the prefix and its state.

Pages 40 and 17 hold the prefix of 32 tokens, and state page 2 holds the state after it.
"""


class Hand:
    """Runs plans, and collects the ends of copies."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self._step = 0
        self._ended: list[list[int]] = []

    def plan(self, **columns: Any) -> PlanBuilder:
        self._step += 1
        return PlanBuilder(self._step, **columns)

    def run(self, plan: PlanBuilder) -> StepResult:
        result: StepResult = self.runner.launch(plan.build()).collect()
        self._ended += result.copied.tolist()
        return result

    def until_ended(self, count: int) -> list[list[int]]:
        """Waits until this many more copies have ended. Returns their tickets and status codes."""
        while len(self._ended) < count:
            self.run(self.plan(wait_us=[1000]))
        ended, self._ended = self._ended, []
        return sorted(ended)

    def compute_and_save(self) -> None:
        """Computes the prefix, and saves its pages and its state in the same plan."""
        plan = self.plan(copies=SAVED)
        plan.slot(0, PREFIX)
        plan.page_writes += [(0, 0, 40), (0, 1, 17)]
        plan.row(0, 0, 32, sample=False)
        plan.state_saves.append((0, 2))
        self.run(plan)
        assert self.until_ended(3) == [[1, COPY_OK], [2, COPY_OK], [3, COPY_OK]]

    def bring_back(self, sources: Sequence[int] = ()) -> list[list[int]]:
        """Restores the prefix to pages 60 and 61, and the state to state page 4."""
        copies = [(4, COPY_RESTORE, 60, 7), (5, COPY_RESTORE, 61, 8), (6, COPY_RESTORE_STATE, 4, 5)]
        plan = self.plan(copies=copies)
        plan.copy_sources += sources
        self.run(plan)
        return self.until_ended(3)

    def next_token(self, start: int = 32) -> list[int]:
        """The token after the prefix and the tail, computed from the restored pages and state."""
        plan = self.plan()
        plan.slot(1, PREFIX + TAIL)
        plan.page_writes += [(1, 0, 60), (1, 1, 61), (1, 2, 62)]
        plan.row(1, start, 32 + len(TAIL) - start)
        plan.state_loads.append((1, 4))
        return self.run(plan).tokens.tolist()


@contextmanager
def hand_of(
    folder: Path, name: str, hand: str, memory: int, lenders: Sequence[int | None] = (), **changes: Any
) -> Iterator[Hand]:
    """A hand with this host memory, in which an earlier hand may have saved pages."""
    values = settings(save(folder / "model", name), **{**TIER, **changes})
    if hand == "rust":
        numbers = [None if lender is None else LENDER + at for at, lender in enumerate(lenders)]
        given = {LENDER + at: lender for at, lender in enumerate(lenders) if lender is not None}
        with rust(folder, {**values, "host_lenders": numbers}, {HOST: memory, **given}) as runner:
            yield Hand(runner)
        return
    device = "deferred" if hand == "deferred" else "cpu"
    near, far = socket.socketpair()
    with near, far:
        config = RunnerConfig.from_dict({**values, "device": device, "host_lenders": list(lenders)})
        made = ModelRunner(config, None, HostMemory(memory, far.fileno()))
        made.load(lambda done, total: None)
        made.warm_up()
        yield Hand(made)


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = os.memfd_create("host")
    yield descriptor
    os.close(descriptor)


def expected(name: str) -> list[int]:
    return greedy_reference(model_of(name), PREFIX + TAIL, 1)[0]


def facts(runner: Any) -> dict[str, Any]:
    found: dict[str, Any] = runner.facts() if isinstance(runner, ModelRunner) else runner.facts
    return found


@HANDS
@pytest.mark.parametrize("name", ["qwen3.5-text", "lfm2", "granite4-h", "nemotron-h", "falcon-h1"])
def test_a_prefix_comes_back_with_its_state_also_to_the_next_hand(
    tmp_path: Path, memory: int, name: str, hand: str
) -> None:
    with hand_of(tmp_path, name, hand, memory) as first:
        first.compute_and_save()
        assert first.bring_back() == [[4, COPY_OK], [5, COPY_OK], [6, COPY_OK]]
        assert first.next_token() == expected(name)
        told = facts(first.runner)
        assert told["host_state_page_count"] == told["state_page_count"]
    counts = {"host_pages": told["host_page_count"], "host_state_pages": told["host_state_page_count"]}
    with hand_of(tmp_path, name, hand, memory, host_ratio=None, **counts) as second:
        assert second.bring_back() == [[4, COPY_OK], [5, COPY_OK], [6, COPY_OK]]
        assert second.next_token() == expected(name)


@HANDS
def test_a_state_is_borrowed_from_the_memory_of_another_hand(tmp_path: Path, memory: int, hand: str) -> None:
    with hand_of(tmp_path, "qwen3.5-text", hand, memory) as lender:
        lender.compute_and_save()
    own = os.memfd_create("own")
    try:
        # The borrower has a different number of pages.
        with hand_of(tmp_path, "qwen3.5-text", hand, own, [None, memory], host_ratio=0.5) as borrower:
            assert borrower.bring_back(sources=[2, 2, 2]) == [[4, COPY_OK], [5, COPY_OK], [6, COPY_OK]]
            assert borrower.next_token() == expected("qwen3.5-text")
    finally:
        os.close(own)


@HANDS
def test_a_state_that_is_not_as_it_was_saved_is_not_loaded(tmp_path: Path, memory: int, hand: str) -> None:
    with hand_of(tmp_path, "qwen3.5-text", hand, memory) as first:
        first.compute_and_save()
        told = facts(first.runner)
        states = told["host_page_count"] * (told["page_bytes"] + 4)
        os.pwrite(memory, b"\x5c", states + 6 * told["state_bytes"] - 2)
        assert first.bring_back() == [[4, COPY_OK], [5, COPY_OK], [6, COPY_FAILED]]
        with pytest.raises((PlanError, AssertionError), match="state page 4 has no state for slot 1"):
            first.next_token()


@HANDS
def test_a_restored_state_knows_its_position(tmp_path: Path, memory: int, hand: str) -> None:
    with hand_of(tmp_path, "qwen3.5-text", hand, memory) as first:
        first.compute_and_save()
        first.bring_back()
        with pytest.raises((PlanError, AssertionError), match="slot 1 begins at position 16"):
            first.next_token(start=16)


@HANDS
@pytest.mark.parametrize(
    ("copy", "error"),
    [
        ((1, COPY_SAVE_STATE, 3, 0), "state page 3 has no state for the host"),
        ((1, COPY_RESTORE_STATE, 1 << 20, 0), "copy of a? ?state"),
        ((1, COPY_RESTORE_STATE, 0, 1 << 20), "outside of"),
    ],
)
def test_copies_of_states_that_are_not_there_are_errors_of_the_plan(
    tmp_path: Path, memory: int, copy: tuple[int, int, int, int], error: str, hand: str
) -> None:
    with (
        hand_of(tmp_path, "qwen3.5-text", hand, memory) as first,
        pytest.raises((PlanError, AssertionError), match=error),
    ):
        first.run(first.plan(copies=[copy]))


@pytest.mark.parametrize("hand", ["torch", "rust"])
def test_a_size_is_divided_as_the_device_is(tmp_path: Path, memory: int, hand: str) -> None:
    with hand_of(tmp_path, "qwen3.5-text", hand, memory, state_pages=6) as first:
        told = facts(first.runner)
        pages, states = told["page_count"], told["state_page_count"]
        of_device = pages * told["page_bytes"] + states * told["state_bytes"]
    changes: dict[str, Any] = {"host_ratio": None, "host_bytes": of_device // 2, "state_pages": 6}
    with hand_of(tmp_path, "qwen3.5-text", hand, memory, **changes) as second:
        told = facts(second.runner)
        assert (told["host_page_count"], told["host_state_page_count"]) == (pages // 2, states // 2)
    if hand == "torch":
        changes["host_bytes"] = of_device // 8
        with (
            pytest.raises(ConfigError, match="holds no state of"),
            hand_of(tmp_path, "qwen3.5-text", hand, memory, **changes),
        ):
            pass


@pytest.mark.parametrize("hand", ["torch", "rust"])
def test_the_largest_ratio_that_fits_is_taken_where_nobody_named_one(
    tmp_path: Path, memory: int, hand: str, capfd: pytest.CaptureFixture[str]
) -> None:
    # This share leaves little memory beside weights and pages, so the configured ratio does not fit.
    changes: dict[str, Any] = {"host_ratio": 2.0, "host_fits": True, "host_share": 5e-5}
    with hand_of(tmp_path, "qwen3.5-text", hand, memory, **changes) as first:
        told = facts(first.runner)
    assert 0 < told["host_page_count"] < 2 * told["page_count"]
    assert 0 < told["host_state_page_count"] < 2 * told["state_page_count"]
    log = (tmp_path / "stderr").read_text() if hand == "rust" else capfd.readouterr().err
    assert "pages for each page of the device: more do not fit" in log
