"""A hand with one sparse request, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from forebay.protocol.constants import COPY_SAVE, NO_PAGE
from forebay.protocol.result import StepResult
from forebay.runner.runner import ModelRunner
from tests.hand.greedy import model_of
from tests.hand.sparse_stories import SIZE, TOP_K, sparse_runner
from tests.hand.support import PlanBuilder, Sampling, greedy_reference

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 84, 19, 71, 69, 39, 93, 75, 10]
FULL = len(PROMPT) // SIZE
GREEDY = Sampling()
ROWS = [60, 61]
"""Pages of the hot rows of slot 1. Its other pages are 10, 11, ..., and its host pages are 100, 101, ..."""


class Slot:
    """A hand with one request, step by step."""

    def __init__(self, family: str = "deepseek-v32", runner: ModelRunner | None = None, **changes: Any) -> None:
        self.runner = sparse_runner(family, **changes) if runner is None else runner
        self._step = 0
        self.ended: list[list[int]] = []

    def plan(self) -> PlanBuilder:
        self._step += 1
        return PlanBuilder(self._step)

    def take(self, builder: PlanBuilder) -> StepResult:
        result = self.runner.step(builder.build())
        self.ended += result.copied.tolist()
        return result

    def until_ended(self, count: int) -> list[list[int]]:
        while len(self.ended) < count:
            builder = self.plan()
            builder.wait_us = [1000]
            self.take(builder)
        ended, self.ended = self.ended, []
        return sorted(ended)

    @staticmethod
    def write(builder: PlanBuilder, tokens: list[int], sampling: Sampling = GREEDY, count: int = 12) -> None:
        builder.slot(1, tokens, sampling, prompt_len=len(PROMPT))
        builder.page_writes += [(1, index, 10 + index) for index in range(count)]
        builder.host_writes += [(1, index, 100 + index) for index in range(count)]

    def prefill(self, sampling: Sampling = GREEDY) -> StepResult:
        """Computes the prompt, and starts to save its pages."""
        builder = self.plan()
        self.write(builder, PROMPT, sampling)
        builder.row(1, 0, len(PROMPT))
        self.save(builder)
        return self.take(builder)

    @staticmethod
    def save(builder: PlanBuilder) -> None:
        """Starts to save the prompt's full pages."""
        builder.copies += [(index, COPY_SAVE, 10 + index, 100 + index) for index in range(FULL)]

    def become_sparse(self, builder: PlanBuilder, dropped: int = FULL - 1) -> None:
        builder.page_writes += [(1, index, NO_PAGE) for index in range(dropped)]
        builder.hot_rows += [(1, index, page) for index, page in enumerate(ROWS)]


def compare(results: list[StepResult], family: str) -> None:
    """Compares tokens and log-probabilities with those of transformers."""
    tokens, logprobs = greedy_reference(model_of(family), PROMPT, len(results))
    assert [int(result.tokens[0]) for result in results] == tokens
    for result, distribution in zip(results, logprobs, strict=True):
        expected = distribution[torch.from_numpy(result.logprob_ids).long()]
        np.testing.assert_allclose(result.logprob_values, expected, atol=1e-4)


def says_what_transformers_says(family: str, hand: Mapping[str, Any]) -> None:
    """Computes a prompt, saves its pages, and generates 15 tokens in a sparse slot."""
    slot = Slot(family, **hand)
    results = [slot.prefill(Sampling(logprobs=5))]
    slot.until_ended(FULL)
    found = np.zeros(4, np.int64)
    for number in range(16):
        builder = slot.plan()
        if number == 1:
            slot.become_sparse(builder)
        builder.row(1, len(PROMPT) + number, 1)
        results.append(slot.take(builder))
        assert (results[-1].sparse_rows.size == 4) == (number >= 1)
        found += results[-1].sparse_rows if number else 0
    compare(results, family)
    layers = slot.runner.decoder.config.num_hidden_layers
    assert found[0] == 15 * TOP_K * layers == found[1:].sum()
    assert found.min() > 0
