"""Requests whose steps have drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from forebay.protocol.result import StepResult
from forebay.runner.runner import ModelRunner
from tests.hand.support import PlanBuilder, Sampling

VOCABULARY = 131
COUNT = 12
TOKENS = 3
"""The largest number of drafts that the hand makes itself."""
PROMPTS = [[3, 14, 15, 92, 65], list(range(1, 24))]
WAYS = {
    "greedy": Sampling(),
    "drawn": Sampling(temperature=0.9, top_p=0.9, top_k=40, seed=7),
    "told": Sampling(temperature=0.6, seed=8, logprobs=2),
    "stopped": Sampling(temperature=0.6, seed=8, min_total=40, stop_ids=(5, 6), bias=((9, 2.0),)),
    "penalised": Sampling(temperature=0.7, seed=9, repetition_penalty=1.3, frequency_penalty=0.2),
}


class Streams:
    """Requests in slots 0, 1, ..., each on its own pages."""

    def __init__(self, runner: ModelRunner, *samplings: Sampling) -> None:
        self.runner = runner
        self.tokens = [list(PROMPTS[number % 2]) for number in range(len(samplings))]
        self.logprobs: list[list[Any]] = [[] for _ in samplings]
        self._samplings, self._pages, self._step = samplings, 80 // runner.config.page_size, 0

    def prompts(self) -> StepResult:
        """Runs a step with all prompts."""
        builder = self._builder()
        for slot, (tokens, sampling) in enumerate(zip(self.tokens, self._samplings, strict=True)):
            builder.slot(slot, tokens, sampling)
            builder.page_writes += [(slot, index, slot * self._pages + index) for index in range(self._pages)]
            builder.row(slot, 0, len(tokens))
        return self._run(builder)

    def go_on(self, *drafts: list[int]) -> StepResult:
        """Runs a step with one row for each slot, with these drafts."""
        builder = self._builder()
        for slot, tokens in enumerate(self.tokens):
            builder.row(slot, len(tokens) - 1, 1)
        if any(drafts):
            builder.row_tokens = [1 + len(some) for some in drafts]
            builder.draft_tokens = [token for some in drafts for token in some]
        return self._run(builder)

    def _builder(self) -> PlanBuilder:
        self._step += 1
        return PlanBuilder(self._step)

    def _run(self, builder: PlanBuilder) -> StepResult:
        result = self.runner.step(builder.build())
        counts = result.token_counts.tolist() or [1] * len(self.tokens)
        given = iter(result.tokens.tolist())
        entries = iter(result.logprob_counts.tolist())
        values = iter(zip(result.logprob_ids.tolist(), result.logprob_values.tolist(), strict=True))
        for slot, count in enumerate(counts):
            for _ in range(count):
                self.tokens[slot].append(next(given))
                self.logprobs[slot].append([next(values) for _ in range(next(entries, 0))])
        assert next(given, None) is None
        return result


class Drafted(Streams):
    """Requests whose rows may give several tokens."""

    def proposed(self) -> StepResult:
        """Runs a step with one row for each slot, for which the hand itself makes drafts."""
        builder = self._builder()
        for slot, tokens in enumerate(self.tokens):
            builder.row(slot, len(tokens) - 1, 1)
        builder.row_tokens = [1 + TOKENS] * len(self.tokens)
        return self._run(builder)

    def proposed_for(self, slot: int) -> list[int]:
        """Runs a step with one row, of this slot, and returns its tokens. The hand itself makes drafts."""
        builder = self._builder()
        builder.row(slot, len(self.tokens[slot]) - 1, 1)
        builder.row_tokens = [1 + TOKENS]
        given: list[int] = self.runner.step(builder.build()).tokens.tolist()
        self.tokens[slot] += given
        return given

    def over(self) -> bool:
        """True if each request has at least as many tokens as without drafts."""
        return min(map(len, self.tokens)) >= 5 + COUNT


def same(streams: Streams, expected: Streams) -> None:
    """Compares tokens and log-probabilities."""
    for ours, theirs in zip(streams.tokens, expected.tokens, strict=True):
        least = min(len(ours), len(theirs))
        assert ours[:least] == theirs[:least]
    for mine, others in zip(streams.logprobs, expected.logprobs, strict=True):
        for some, other in zip(mine, others, strict=False):
            assert [token for token, _ in some] == [token for token, _ in other]
            np.testing.assert_allclose([value for _, value in some], [value for _, value in other], atol=1e-4)


def alone(runner: ModelRunner, *samplings: Sampling) -> Streams:
    """Streams of COUNT tokens without drafts."""
    streams = Streams(runner, *samplings)
    streams.prompts()
    for _ in range(COUNT):
        streams.go_on()
    return streams


def check_drafts(make: Callable[[], ModelRunner]) -> None:
    """Compares the tokens with drafts and without. `make` creates a runner with at least 40 rows.

    Some steps have right drafts, some wrong ones, some both, and some none, with log-probabilities and penalties.
    """
    samplings = list(WAYS.values())
    expected = alone(make(), *samplings)
    random = np.random.default_rng(4)
    streams = Streams(make(), *samplings)
    streams.prompts()
    accepted = 0
    while min(map(len, streams.tokens)) < 5 + COUNT:
        drafts = []
        for tokens, all_ in zip(streams.tokens, expected.tokens, strict=True):
            some = all_[len(tokens) : len(tokens) + int(random.integers(0, 5))]
            if some and random.random() < 0.5:
                at = int(random.integers(len(some)))
                some[at] = (some[at] + 1) % VOCABULARY
            drafts.append(some)
        before = [len(tokens) for tokens in streams.tokens]
        result = streams.go_on(*drafts)
        assert not result.row_errors.any()
        assert len(result.row_errors) == len(samplings)
        for number, (tokens, all_) in enumerate(zip(streams.tokens, expected.tokens, strict=True)):
            right = 0
            for draft, token in zip(drafts[number], all_[before[number] :], strict=False):
                if draft != token:
                    break
                right += 1
            given = len(tokens) - before[number]
            assert given == 1 + right
            accepted += given - 1
    assert accepted > COUNT
    for ours, theirs in zip(streams.tokens, expected.tokens, strict=True):
        least = min(len(ours), len(theirs))
        assert ours[:least] == theirs[:least]
    for mine, others in zip(streams.logprobs, expected.logprobs, strict=True):
        for some, same in zip(mine, others, strict=False):
            assert [token for token, _ in some] == [token for token, _ in same]
            np.testing.assert_allclose([value for _, value in some], [value for _, value in same], atol=1e-4)
