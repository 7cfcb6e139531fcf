"""Recurrent states that are kept for later requests, through the whole server, on a tiny random Qwen3.5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Models, Serve
from tests.e2e.models import Model
from tests.e2e.server import Server

FLAGS = ("--max-total-tokens", "16384", "--context-length", "2048", "--chunked-prefill-size", "64")
PAGE = 16
TURNS = 10


@pytest.fixture(scope="module")
def model(models: Models) -> Model:
    return models("qwen3.5")


@pytest.fixture(scope="module")
def text(model: Model) -> list[int]:
    return model.encode((Path(__file__).parents[2] / "LICENSE").read_text())


def ask(server: Server, tokens: list[int], max_tokens: int) -> tuple[list[int], int]:
    """The answer's tokens, and those of the prompt that came from a kept state."""
    sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
    body: dict[str, Any] = {"input_ids": tokens, "sampling_params": sampling}
    answer = server.ask("/generate", body)
    return answer["output_ids"], answer["meta_info"]["cached_tokens"]


def talk(server: Server, text: list[int]) -> tuple[list[list[int]], list[int]]:
    """A conversation: its answers, and at each turn the tokens before its new part that were computed again."""
    said, known = text[:75], 0
    answers, again = [], []
    for turn in range(TURNS):
        answer, cached = ask(server, said, 20 + turn)
        answers.append(answer)
        again.append(known - cached)
        said = said + answer
        known = len(said)
        said = said + text[100 + 9 * turn : 109 + 9 * turn]
    return answers, again


def test_a_conversation_hits_at_every_turn_and_says_what_it_says_without(
    model: Model, serve_for_module: Serve, text: list[int]
) -> None:
    server = serve_for_module(model, *FLAGS)
    answers, again = talk(server, text)
    assert max(again) <= PAGE
    assert server.metric("forebay:state_loads_total") == TURNS - 1
    plain = serve_for_module(model, *FLAGS, "--disable-radix-cache")
    without, computed = talk(plain, text)
    assert without == answers
    assert computed[-1] > 200


def test_the_second_request_that_leaves_a_prefix_finds_its_state(
    model: Model, serve_for_module: Serve, text: list[int]
) -> None:
    server = serve_for_module(model, *FLAGS, "--max-state-pages", "20")
    beginning = text[:160]
    found = [ask(server, [*beginning, *text[at : at + 40]], 3)[1] for at in (300, 400, 500)]
    assert found == [0, 0, 160]
    assert server.metric("forebay:state_cache_misses_total") == 160


def test_without_the_state_cache_nothing_is_shared(model: Model, serve_for_module: Serve, text: list[int]) -> None:
    server = serve_for_module(model, *FLAGS, "--disable-state-cache")
    answers = [ask(server, text[:100], 5) for _ in range(2)]
    assert answers[0] == answers[1]
    assert answers[0][1] == 0
