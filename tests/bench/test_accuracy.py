"""The benchmark of quantised products: what it counts, and the table of its results."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks import accuracy
from benchmarks.records import Results, Run
from forebay.compute.rows import Launch


class Favourite:
    """A model that finds one token more likely than all others by `margin`, whatever came before."""

    def __init__(self, token: int, vocabulary: int, margin: float) -> None:
        self._logits = torch.zeros(vocabulary)
        self._logits[token] = margin
        self.tables = self
        self.compute = self
        self.token_pool = torch.zeros(accuracy.SLOTS, accuracy.PROMPT, dtype=torch.int32)

    def put(self, slot: int, tokens: list[int]) -> None:
        self.token_pool[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)

    def logits(self, launch: Launch) -> torch.Tensor:
        return self._logits.expand(len(launch.rows.slot), -1)

    def greedy(self, launch: Launch) -> tuple[torch.Tensor, torch.Tensor]:
        count = len(launch.rows.slot)
        return self._logits.argmax().expand(count), torch.ones(count, dtype=torch.bool)


def test_losses_are_those_of_the_tokens_that_follow() -> None:
    model = Favourite(3, 8, math.log(7.0))  # as likely as all others together
    found = accuracy.losses(model, [[0] + [3] * (accuracy.WINDOW - 1), [1] * accuracy.WINDOW])  # type: ignore[arg-type]
    assert found.shape == (2, accuracy.WINDOW - 1)
    assert found[0].tolist() == pytest.approx([math.log(2)] * (accuracy.WINDOW - 1), rel=1e-5)
    assert found[1].tolist() == pytest.approx([math.log(14)] * (accuracy.WINDOW - 1), rel=1e-5)


def test_answers_follow_their_prompts() -> None:
    model = Favourite(5, 8, 1.0)
    assert accuracy.answers(model, [[1, 2], [3]]) == [[5] * accuracy.ANSWER] * 2  # type: ignore[arg-type]
    assert model.token_pool[0, :4].tolist() == [1, 2, 5, 5]
    assert model.token_pool[1, :3].tolist() == [3, 5, 5]


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
