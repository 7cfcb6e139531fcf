"""Sparse slots give the same logits as slots with all pages on the device, after any drop, restore or preemption."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hand.sparse_stories import EACH_HAND, HANDS, SPARSE, TOP_K, Both, Logits, logits, run, run_beside_cpu, twins

__all__ = ["logits", "twins"]


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["deepseek-v32", "glm-dsa-shared"]), st.sampled_from([1, 2]))
def test_logits_are_those_of_pages_that_all_are_there(logits: Logits, seed: int, family: str, factor: int) -> None:
    run(Both(family, seed, hot_row_tokens=factor * TOP_K), 60, logits)


@pytest.mark.parametrize("lookahead", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize("factor", [pytest.param(1, marks=pytest.mark.slow), 2])
@SPARSE
@EACH_HAND
def test_every_kind_of_event_happens(
    logits: Logits, hand: dict[str, Any], family: str, factor: int, lookahead: int
) -> None:
    # Copies end at random times, which affect later events. So a single sequence may lack one kind of event.
    events, found = Counter[str](), np.zeros(4, np.int64)
    for seed in range(5, 15):
        both = Both(family, seed, lookahead, hand, hot_row_tokens=factor * TOP_K)
        run(both, 100, logits)
        events += Counter(both.events)
        found = found + both.found
        if len(+events) == len(both.events) and found.min() > 0:
            return
    pytest.fail(f"after ten stories: {events}, {found}")


@SPARSE
def test_tokens_of_the_kernels_are_those_of_a_cpu_with_all_pages(logits: Logits, family: str) -> None:
    run_beside_cpu(logits, family, HANDS["kernels"])
