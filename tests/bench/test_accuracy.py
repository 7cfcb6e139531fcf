"""The benchmark of quantised products: its counts, and the table of its results."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks import accuracy
from benchmarks.records import Results, Run
from benchmarks.rust_hand import ROW


class Favourite:
    """A model for which one token is always more likely than all others by `margin`."""

    def __init__(self, token: int, vocabulary: int, margin: float) -> None:
        logits = np.zeros(vocabulary)
        logits[token] = margin
        self._losses = np.log(np.exp(logits).sum()) - logits
        self.token = token
        self.known: dict[int, list[int]] = {}

    def put(self, slot: int, tokens: Sequence[int]) -> None:
        self.known[slot] = list(tokens)

    def greedy(self, rows: Sequence[ROW]) -> list[int]:
        for slot, start, length in rows:
            assert len(self.known[slot]) == start + length, "each token is computed once"
            self.known[slot].append(self.token)
        return [self.token] * len(rows)

    def step_ms(self, rows: Sequence[ROW]) -> float:
        return 1.0

    def losses(self, slot: int, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        return self._losses[list(tokens[1:])].astype(np.float32)


def test_losses_are_those_of_the_tokens_that_follow() -> None:
    model = Favourite(3, 8, math.log(7.0))  # as likely as all others together
    found = accuracy.losses(model, [[0] + [3] * (accuracy.WINDOW - 1), [1] * accuracy.WINDOW])
    assert found.shape == (2, accuracy.WINDOW - 1)
    assert found[0].tolist() == pytest.approx([math.log(2)] * (accuracy.WINDOW - 1), rel=1e-5)
    assert found[1].tolist() == pytest.approx([math.log(14)] * (accuracy.WINDOW - 1), rel=1e-5)


def test_answers_follow_their_prompts() -> None:
    model = Favourite(5, 8, 1.0)
    assert accuracy.answers(model, [[1, 2], [3]]) == [[5] * accuracy.ANSWER] * 2
    assert model.known[0][:4] == [1, 2, 5, 5]
    assert model.known[1][:3] == [3, 5, 5]


@pytest.mark.parametrize(("ours", "count"), [([1, 2, 3], 3), ([1, 2, 4], 2), ([0, 2, 3], 0)])
def test_tokens_agree_until_the_first_that_differs(ours: list[int], count: int) -> None:
    assert accuracy.agreed(ours, [1, 2, 3]) == count


def test_the_table_shows_accuracy_and_then_steps() -> None:
    values = {"perplexity": 6.0, "loss_over_base": 0.01, "loss_error": 0.002, "answers": 4, "answers_equal": 3}
    runs = [Run("accuracy", "gguf", 1, {**values, "median_agreed": 9})]
    for number, (base, ours) in enumerate([(10.0, 5.0), (12.0, 4.0)], start=1):
        runs += [Run("decode, 1 rows", "bfloat16", number, {"step_ms": base})]
        runs += [Run("decode, 1 rows", "gguf", number, {"step_ms": ours})]
    table = accuracy.table(Results("accuracy", runs=runs))
    assert "| gguf | 6.000 | +0.0100 ± 0.0020 | 3 of 4 | 9.00 |" in table
    assert "| decode, 1 rows | gguf | 4.50 | 2.50 (2.00-3.00) |" in table
