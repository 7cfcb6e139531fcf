"""Drafts change no token: rows that verify drafts give the same tokens as rows of one token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forebay.gpu.choose import VARIABLE
from forebay.protocol.constants import ROW_NOT_FINITE
from forebay.protocol.result import StepResult
from forebay.runner.drafts import Drafts, VerifiedColumns
from forebay.runner.launched import TokenColumns
from forebay.runner.runner import ModelRunner
from forebay.state.checks import PlanError
from tests.hand.drafted import VOCABULARY, Streams, alone, check_drafts
from tests.hand.greedy import model_of
from tests.hand.late_masks import PATTERNS, Late, Step, check_drafted
from tests.hand.support import PlanBuilder, Sampling, runner_of


@pytest.mark.parametrize("device", ["cpu", "deferred"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3-moe", "deepseek-v3"])
def test_tokens_are_those_without_drafts(family: str, device: str) -> None:
    check_drafts(lambda: runner_of(model_of(family), device=device, max_running_requests=40))


@pytest.mark.parametrize("graph_rows", [0, 40], ids=["eager", "graphs"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek-v3"])
def test_drafts_in_steps_of_a_gpu(family: str, graph_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device reads the plan, and the PyTorch reference operators compute it."""
    monkeypatch.setenv(VARIABLE, "reference")
    paged: dict[str, Any] = {"device": "deferred", "attention_backend": "triton", "graph_rows": graph_rows}

    def make() -> ModelRunner:
        runner = runner_of(model_of(family), max_running_requests=40, **paged)
        runner.warm_up()
        return runner

    check_drafts(make)


def test_rows_without_room_give_one_token() -> None:
    samplings = [Sampling(), Sampling(seed=1, temperature=0.5)]
    expected = alone(runner_of(model_of("llama"), device="deferred"), *samplings)
    streams = Streams(runner_of(model_of("llama"), device="deferred", max_running_requests=4), *samplings)
    streams.prompts()
    drafts = [all_[len(tokens) : len(tokens) + 2] for tokens, all_ in zip(streams.tokens, expected.tokens, strict=True)]
    assert streams.go_on(*drafts).token_counts.tolist() == [3, 1]
    assert [tokens == all_[: len(tokens)] for tokens, all_ in zip(streams.tokens, expected.tokens, strict=True)]


@pytest.mark.parametrize(
    ("finite", "counts", "errors"),
    [
        ([1, 1, 1, 1, 1], [3, 1], [0, 0]),
        ([1, 1, 0, 1, 1], [2, 1], [0, 0]),
        ([1, 0, 1, 1, 1], [1, 1], [0, 0]),
        ([0, 1, 1, 1, 1], [1, 1], [ROW_NOT_FINITE, 0]),
        ([1, 1, 1, 0, 0], [3, 1], [0, ROW_NOT_FINITE]),
    ],
)
def test_a_draft_without_numbers_ends_the_row_before_it(
    finite: list[int], counts: list[int], errors: list[int]
) -> None:
    """One row has two right drafts, the other has one.

    If the logits after a right draft are not finite, the row ends before them without an error. The slot's next row
    reports the error.
    """
    builder = PlanBuilder()
    builder.row(0, 4, 1)
    builder.row(1, 4, 1)
    builder.row_tokens, builder.draft_tokens = [3, 2], [7, 8, 9]
    tables: Any = SimpleNamespace(
        vocabulary=10,
        slots=2,
        stride=97,
        context_length=96,
    )
    drafts = Drafts.of(builder.build(), tables, 8)
    assert drafts.plan.rows[:, :3].tolist() == [[0, 4, 1], [0, 5, 1], [0, 6, 1], [1, 4, 1], [1, 5, 1]]
    assert drafts.entries.tolist() == [5, 6, 97 + 5]
    answers: Any = SimpleNamespace(
        tokens=np.array([7, 8, 3, 1, 2], np.int32),
        finite=np.array(finite, np.bool_),
        check=lambda: None,
        logprobs=lambda: (np.array([1, 0, 2, 1, 0]), np.array([11, 13, 14, 15]), np.array([0.1, 0.3, 0.4, 0.5])),
    )
    launch: Any = SimpleNamespace(found=None, prompts=None)
    result = StepResult(1)
    VerifiedColumns(TokenColumns(answers, launch, np.arange(5)), drafts).report(result)
    assert result.token_counts.tolist() == counts
    assert result.tokens.tolist() == [*[7, 8, 3][: counts[0]], 1]
    assert result.logprob_ids.tolist() == [*{1: [11], 2: [11], 3: [11, 13, 14]}[counts[0]], 15]
    assert result.row_errors.tolist() == errors


def test_a_draft_outside_of_the_vocabulary_is_a_wrong_plan() -> None:
    streams = Streams(runner_of(model_of("llama"), device="deferred"), Sampling())
    streams.prompts()
    builder = PlanBuilder(9)
    builder.row(0, len(streams.tokens[0]) - 1, 1)
    builder.row_tokens, builder.draft_tokens = [2], [VOCABULARY]
    with pytest.raises(PlanError, match="of a vocabulary of"):
        streams.runner.step(builder.build())


def test_a_draft_behind_the_context_is_a_wrong_plan() -> None:
    streams = Streams(runner_of(model_of("llama"), device="deferred"), Sampling())
    streams.prompts()
    length = streams.runner.config.context_length
    builder = PlanBuilder(9)
    builder.row(0, length - 2, 1)
    builder.row_tokens, builder.draft_tokens = [3], [1, 2]
    with pytest.raises(PlanError, match="a draft at position"):
        streams.runner.step(builder.build())


def never(step: int, slot: int) -> bool:
    """All masks are ready."""
    return False


@pytest.mark.parametrize("graph_rows", [0, 40], ids=["eager", "graphs"])
@pytest.mark.parametrize("late", [never, *PATTERNS.values()], ids=["never", *PATTERNS])
def test_masked_rows_give_the_tokens_without_drafts(
    late: Late, graph_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests have penalties and log-probabilities, and masks of drafts are late too."""
    monkeypatch.setenv(VARIABLE, "reference")
    paged: dict[str, Any] = {"attention_backend": "triton", "graph_rows": graph_rows} if graph_rows else {}

    def step_of() -> Step:
        runner = runner_of(model_of("llama"), device="deferred", max_running_requests=40, **paged)
        return lambda plan, masks: runner.step(plan, lambda: masks)

    saved = check_drafted(step_of, late)
    assert saved > 0 or late is not never
