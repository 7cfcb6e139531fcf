"""A draft model changes no token. A draft model that equals the target model is always right."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.layers.decoder import Decoder
from forebay.runner import draft_model
from forebay.runner.runner import ModelRunner
from forebay.state.config import ConfigError
from tests.hand.drafted import COUNT, TOKENS, WAYS, Drafted, alone, same
from tests.hand.greedy import model_of
from tests.hand.support import PlanBuilder, Sampling, hf_config, runner_of, whole_weights, wire_config


def drafted(target: Any, draft: Any, **changes: Any) -> ModelRunner:
    """A runner of a model with a draft model."""
    described = wire_config(hf_config(draft.config, type(draft).__name__))["model"]
    config: dict[str, Any] = {"device": "deferred", "max_running_requests": 40}
    runner = runner_of(target, draft={"model": described, "tokens": TOKENS}, **config | changes)
    assert isinstance(runner.draft_model, draft_model.DraftModel)
    assert isinstance(runner.draft_model.runner.model, Decoder)
    runner.draft_model.runner.model.load_weights(whole_weights(draft).items())
    return runner


def test_the_model_itself_is_always_right() -> None:
    model = model_of("llama")
    expected = alone(runner_of(model, device="deferred", max_running_requests=40), Sampling(), Sampling())
    runner = drafted(model, model)
    assert (runner.facts()["tokens_a_row"], runner.facts()["verifies_drafts"]) == (1 + TOKENS, False)
    streams = Drafted(runner, Sampling(), Sampling())
    streams.prompts()
    steps = 0
    while not streams.over():
        assert streams.proposed().token_counts.tolist() == [1 + TOKENS] * 2
        steps += 1
    assert steps == -(-COUNT // (1 + TOKENS))
    same(streams, expected)


@pytest.mark.parametrize("pool", [1 << 16, 96], ids=["all fit", "some fit"])
@pytest.mark.parametrize("draft", ["itself", "qwen2", "gemma2"])
def test_tokens_are_those_without_a_draft_model(draft: str, pool: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn tokens differ from the draft's tokens even if both models are equal. Another draft model is never right."""
    monkeypatch.setattr(draft_model, "MOST_TOKENS", pool)
    model = model_of("llama")
    expected = alone(runner_of(model, device="deferred", max_running_requests=40), *WAYS.values())
    streams = Drafted(drafted(model, model if draft == "itself" else model_of(draft)), *WAYS.values())
    streams.prompts()
    counts: list[int] = []
    while not streams.over():
        result = streams.proposed()
        assert not result.row_errors.any()
        counts += result.token_counts.tolist() or [1] * len(WAYS)
    assert (max(counts) == 1 + TOKENS) == (draft == "itself")
    assert min(counts) == 1
    same(streams, expected)


def test_a_slot_that_was_written_anew_begins_from_its_own_tokens() -> None:
    model = model_of("llama")
    runner = drafted(model, model)
    for prompt in ([3, 14, 15, 92, 65], [3, 14, 15, 9, 2, 6, 5, 3], [7]):
        streams = Drafted(runner, Sampling())
        streams.tokens = [list(prompt)]
        streams.prompts()
        for _ in range(3):
            assert streams.proposed().token_counts.tolist() == [1 + TOKENS]


def test_slots_take_turns_with_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "MOST_TOKENS", 96)
    model = model_of("llama")
    streams = Drafted(drafted(model, model), Sampling(), Sampling())
    streams.tokens = [list(range(1, 60)), list(range(9, 68))]
    streams.prompts()
    for slot in (0, 1, 0, 0, 1):
        assert len(streams.proposed_for(slot)) == 1 + TOKENS, "a slot whose pages were taken must compute them again"


def test_a_prompt_is_computed_in_chunks() -> None:
    model = model_of("llama")
    streams = Drafted(drafted(model, model, chunked_prefill_size=7), Sampling(), Sampling())
    streams.tokens = [list(range(1, 40)), list(range(9, 30))]
    streams.prompts()
    assert streams.proposed().token_counts.tolist() == [1 + TOKENS] * 2


def test_rows_without_room_give_one_token() -> None:
    model = model_of("llama")
    ways = [Sampling()] * 3
    runner = drafted(model, model, max_running_requests=3 + TOKENS)
    streams = Drafted(runner, *ways)
    streams.prompts()
    assert streams.proposed().token_counts.tolist() == [1 + TOKENS, 1, 1], "a step has six rows"
    near = Drafted(drafted(model, model), Sampling())
    near.tokens = [[1 + at % 90 for at in range(93)]]
    near._pages = 96 // runner.config.page_size
    near.prompts()
    builder = PlanBuilder(9)
    builder.row(0, 93, 1)
    builder.row_tokens = [2]
    assert not near.runner.step(builder.build()).token_counts.size, "a row at the end of the context may have no drafts"


def test_it_is_refused_where_nothing_verifies() -> None:
    with pytest.raises(ConfigError, match="a draft model is not served here"):
        drafted(model_of("llama"), model_of("llama"), lora={"places": 2, "rank": 4, "kept": 0})
