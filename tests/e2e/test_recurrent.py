"""Tiny random recurrent models through the whole server: tokens of transformers, and cached states.

Both hands serve Qwen3.5. Only the Rust hand serves layers of a single part, and parts that run in parallel.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import native_together
from tests.e2e.conftest import Models, Serve
from tests.e2e.models import Model
from tests.e2e.reference import Case, clear_cases
from tests.e2e.server import Server
from tests.e2e.test_model_impl import bodies

HANDS = pytest.mark.parametrize("hand", ["rust", pytest.param("torch", marks=pytest.mark.slow)])
FLAGS = ("--max-total-tokens", "16384", "--context-length", "2048", "--chunked-prefill-size", "64")
SMALL = ("--max-total-tokens", "160", "--context-length", "128", "--page-size", "4", "--chunked-prefill-size", "32")
PAGE = 16
TURNS = 10


@pytest.fixture(scope="module")
def model(models: Models) -> Model:
    return models("qwen3.5")


@pytest.fixture(scope="module")
def text(model: Model) -> list[int]:
    return model.encode((Path(__file__).parents[2] / "LICENSE").read_text())


def ask(server: Server, tokens: list[int], max_tokens: int) -> tuple[list[int], int]:
    """The answer's tokens, and the number of prompt tokens that a cached state covered."""
    sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
    body: dict[str, Any] = {"input_ids": tokens, "sampling_params": sampling}
    answer = server.ask("/generate", body)
    return answer["output_ids"], answer["meta_info"]["cached_tokens"]


def talk(server: Server, text: list[int]) -> tuple[list[list[int]], list[int]]:
    """Holds a conversation; returns the answers, and for each turn the number of earlier tokens computed again."""
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


@pytest.fixture(scope="module")
def cases(model: Model) -> list[Case]:
    return clear_cases(model, 6, 80, range(8, 20), seed=4)


@pytest.fixture(scope="module", params=["rust", pytest.param("torch", marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest, model: Model, serve_for_module: Serve) -> Server:
    return serve_for_module(model, *FLAGS, "--hand", request.param, "--dtype", "float32")


def test_together_they_get_the_tokens_of_transformers(server: Server, cases: list[Case]) -> None:
    together(server, cases)


def together(server: Server, cases: list[Case]) -> None:
    for _ in range(2):
        answers = native_together(server, bodies(cases))
        assert [answer["output_ids"] for answer in answers] == [case.tokens for case in cases]
    assert server.metric("forebay:state_cache_hits_total") > 0


def test_a_death_of_the_hand_changes_no_token(server: Server, cases: list[Case]) -> None:
    die(server, cases)


def die(server: Server, cases: list[Case]) -> None:
    with ThreadPoolExecutor(1) as threads:
        with server.held(len(cases)):
            asked = threads.submit(native_together, server, bodies(cases))
        server.kill_hands()
        answers = asked.result()
    assert [answer["output_ids"] for answer in answers] == [case.tokens for case in cases]


@HANDS
def test_preemption_changes_no_token(hand: str, model: Model, serve: Serve) -> None:
    preempt(serve(model, *SMALL, "--hand", hand, "--dtype", "float32"), model)


def preempt(server: Server, model: Model) -> None:
    cases = clear_cases(model, 8, 16, range(40, 60), seed=9)
    answers = native_together(server, bodies(cases), held=True)
    assert [answer["output_ids"] for answer in answers] == [case.tokens for case in cases]
    assert server.metric("vllm:num_preemptions_total") > 0


@pytest.mark.parametrize("family", ["nemotron-3", "falcon-h1"])
def test_layers_of_other_parts_keep_states_survive_and_give_way(
    family: str, models: Models, serve: Serve, serve_for_module: Serve
) -> None:
    model = models(family)
    cases = clear_cases(model, 6, 80, range(8, 20), seed=4)
    server = serve_for_module(model, *FLAGS, "--dtype", "float32")
    assert server.http.get("/server_info").json()["config"]["hand"] == "rust"
    together(server, cases)
    die(server, cases)
    preempt(serve(model, *SMALL, "--dtype", "float32"), model)


@pytest.mark.parametrize("hand", ["rust", "torch"])
def test_a_conversation_hits_at_every_turn_and_says_what_it_says_without(
    hand: str, model: Model, serve_for_module: Serve, text: list[int]
) -> None:
    server = serve_for_module(model, *FLAGS, "--hand", hand)
    answers, again = talk(server, text)
    assert max(again) <= PAGE
    assert server.metric("forebay:state_loads_total") == TURNS - 1
    plain = serve_for_module(model, *FLAGS, "--hand", hand, "--disable-radix-cache")
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


def test_the_rust_hand_is_the_one_that_serves(model: Model, serve_for_module: Serve) -> None:
    info = serve_for_module(model, *FLAGS).http.get("/server_info").json()["config"]
    assert info["hand"] == "rust"


def test_more_requests_than_states_fit_are_not_run_together(model: Model, serve: Serve) -> None:
    server = serve(model, *FLAGS, "--max-running-requests", "65536", "--mem-fraction-static", "0.01")
    info = server.http.get("/server_info").json()["config"]
    assert info["max_running_requests"] < 65536
    assert f"--max-running-requests 65536 is lowered to {info['max_running_requests']}" in server.log()
