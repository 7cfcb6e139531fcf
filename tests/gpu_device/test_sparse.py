"""Sparse decoding on a GPU gives a CPU's tokens, reads rows in the host's memory, and never makes the host wait."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu_device.test_steps import no_waits
from tests.hand.sparse_slot import FULL, PROMPT, Slot, says_what_transformers_says
from tests.hand.sparse_stories import SPARSE, TOP_K, Logits, logits, run_beside_cpu

__all__ = ["logits"]

HAND: dict[str, Any] = {"device": "cuda"}


@SPARSE
def test_a_sparse_slot_says_what_transformers_says(family: str) -> None:
    says_what_transformers_says(family, HAND)


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("factor", [1, 2])
@SPARSE
def test_tokens_are_those_of_a_cpu_with_all_pages(logits: Logits, family: str, factor: int, lookahead: int) -> None:
    """Covers chunks, drawn tokens, preemption and resumption, and pages saved during steps."""
    run_beside_cpu(logits, family, HAND, lookahead, 1e-3, hot_row_tokens=factor * TOP_K)


def test_a_sparse_launch_waits_for_nothing() -> None:
    # With float32 the grouped product of experts makes the host wait.
    slot = Slot("glm-dsa-shared", **HAND, dtype="bfloat16")
    slot.runner.warm_up()
    slot.prefill()
    slot.until_ended(FULL)
    for number in range(4):
        builder = slot.plan()
        if number == 1:
            slot.become_sparse(builder)
        builder.row(1, len(PROMPT) + number, 1)
        plan = builder.build()
        with no_waits():
            launched = slot.runner.launch(plan)
        result = launched.collect()
        assert not result.row_errors.any()
        assert bool(result.sparse_rows.size) == (number > 0)
