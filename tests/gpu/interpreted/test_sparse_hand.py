"""A hand with interpreted kernels gives a sparse slot the tokens of the CPU's hand."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from forebay.gpu import kernels
from forebay.gpu.choose import VARIABLE
from forebay.runner.host_tier import HostMemory
from tests.gpu.interpreted.test_hand import one_layer
from tests.hand.sparse_slot import FULL, PROMPT, Slot
from tests.hand.sparse_stories import HANDS, HOST
from tests.hand.support import Sampling, runner_of

GATHER = kernels.gather
LATER = Sampling(temperature=0.8, top_p=0.9, top_k=50, seed=5)


@pytest.fixture(autouse=True)
def _as_on_a_small_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "triton")
    monkeypatch.setattr(sys.modules["forebay.gpu.kernels.host_rows"], "_PROGRAMS", 2)
    monkeypatch.setattr(sys.modules["forebay.gpu.kernels.chosen"], "splits", lambda programs, fill: 2)
    monkeypatch.setattr(sys.modules["forebay.gpu.kernels.parts"], "programs_of", lambda fill, blocks, rows: 2 * rows)


def tokens_of(model: Any, hand: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """A prompt in two chunks with two steps in flight, then four drawn tokens of a sparse slot, with their counts."""
    slot = Slot(runner=runner_of(model, None, HostMemory(os.memfd_create("host"), 0), **{**HOST, **hand}, slots=2))
    first, second = slot.plan(), slot.plan()
    slot.write(first, PROMPT, LATER)
    first.row(1, 0, 12, False)
    second.row(1, 12, len(PROMPT) - 12)
    slot.save(second)
    launched = [slot.runner.launch(builder.build()) for builder in (first, second)]
    results = [step.collect() for step in launched]
    slot.ended += [copied for result in results for copied in result.copied.tolist()]
    slot.until_ended(FULL)
    tokens, found = results[1].tokens.tolist(), np.zeros(4, np.int64)
    for number in range(0, 4, 2):
        plans = []
        for position in (len(PROMPT) + number, len(PROMPT) + number + 1):
            builder = slot.plan()
            if position == len(PROMPT):
                slot.become_sparse(builder)
            builder.row(1, position, 1)
            plans.append(builder.build())
        for step in [slot.runner.launch(plan) for plan in plans]:
            result = step.collect()
            tokens += result.tokens.tolist()
            found += result.sparse_rows
    return tokens, found.tolist()


@pytest.mark.parametrize("copies", [True, False], ids=["as it is", "without its copies"])
def test_a_sparse_slot_with_interpreted_kernels(copies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = one_layer("glm-dsa", monkeypatch)
    expected = tokens_of(model, HANDS["cpu"])
    assert min(expected[1]) > 0
    assert expected[1][0] == 4 * HOST["hot_row_tokens"]
    called = []

    def gather(*arguments: Any) -> None:
        called.append(arguments)
        if copies:
            GATHER(*arguments)

    monkeypatch.setattr(kernels, "gather", gather)
    found = tokens_of(model, HANDS["kernels"])
    assert (found == expected) == copies
    assert len(called) == 4
