"""A tiny random Qwen3.5 with states in the host tier: the same tokens, whatever is copied, killed or preempted."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.client import native_together
from tests.e2e.conftest import Models, Serve
from tests.e2e.models import Model
from tests.e2e.reference import Case, clear_cases
from tests.e2e.server import Server
from tests.e2e.test_model_impl import bodies
from tests.e2e.test_recurrent import FLAGS, HANDS, SMALL, ask

TIER = ("--enable-hierarchical-cache", "--debug-kv-checksum", "--hicache-ratio", "16")
FEW_STATES = ("--max-state-pages", "3")
PROMPT = 200
CACHED = 192
"""The tokens on full pages: 200 tokens fill 12 pages of 16 tokens."""


@pytest.fixture(scope="module")
def model(models: Models) -> Model:
    return models("qwen3.5")


@pytest.fixture(scope="module")
def text(model: Model) -> list[int]:
    return model.encode((Path(__file__).parents[2] / "LICENSE").read_text())


@pytest.fixture(scope="module")
def cases(model: Model) -> list[Case]:
    return clear_cases(model, 8, 16, range(40, 60), seed=9)


def balanced(server: Server) -> None:
    """Checks that the idle server holds no page, and that no copy is in progress or failed."""
    server.wait_until_idle()
    server.wait_for_metric("forebay:copies_outstanding", lambda value: value == 0)
    assert server.replicas()[0]["pages_held"] == 0
    assert server.metric("forebay:copies_failed_total") == 0


def fill(server: Server, text: list[int]) -> None:
    """Sends other prompts, which take over the device's state pages."""
    for at in range(4):
        ask(server, text[300 + 50 * at : 450 + 50 * at], 4)


@HANDS
def test_a_second_turn_is_restored_and_told(hand: str, model: Model, serve: Serve, text: list[int]) -> None:
    server = serve(model, *FLAGS, *FEW_STATES, *TIER, "--hand", hand)
    prompt = text[:PROMPT]
    answer, cached = ask(server, prompt, 20)
    assert cached == 0
    fill(server, text)
    assert server.metric("forebay:state_evictions_total") > 0
    assert server.metric("forebay:host_states_restored_total") == 0
    assert ask(server, prompt, 20) == (answer, CACHED)
    assert server.metric("forebay:host_states_restored_total") == 1
    fill(server, text[40:])
    # The answer is cached too: 219 of the 220 tokens were computed, which fill 13 pages.
    known = [*prompt, *answer, *text[7:20]]
    assert ask(server, known, 4)[1] == 13 * 16
    assert server.metric("forebay:state_cache_misses_total") == 0
    balanced(server)


@HANDS
def test_states_outlive_the_hand(hand: str, model: Model, serve: Serve, text: list[int]) -> None:
    server = serve(model, *FLAGS, *TIER, "--hand", hand)
    answer, _ = ask(server, text[:PROMPT], 20)
    server.wait_for_metric("forebay:copies_outstanding", lambda value: value == 0)
    before = server.hand()
    assert before is not None
    os.kill(before, signal.SIGKILL)
    server.wait_for_metric("forebay:hand_deaths_total", lambda value: value == 1)
    server.wait_for_health()
    assert ask(server, text[:PROMPT], 20) == (answer, CACHED)
    assert server.hand() != before
    assert server.metric("forebay:host_states_restored_total") == 1
    balanced(server)


@HANDS
def test_preemption_changes_no_token(hand: str, model: Model, serve: Serve, cases: list[Case]) -> None:
    server = serve(model, *SMALL, *FEW_STATES, *TIER, "--hand", hand, "--dtype", "float32")
    for _ in range(2):
        answers = native_together(server, bodies(cases), held=True)
        assert [answer["output_ids"] for answer in answers] == [case.tokens for case in cases]
    assert server.metric("vllm:num_preemptions_total") > 0
    assert server.metric("forebay:host_states_restored_total") > 0
    balanced(server)


def test_a_prefill_replica_lends_the_state_with_the_blocks(model: Model, serve: Serve, cases: list[Case]) -> None:
    flags = ("--pd", "1:1", "--pd-local-tokens", "0", "--debug-kv-checksum", "--threads", "1", "--page-size", "4")
    server = serve(model, *FLAGS, *flags, "--dtype", "float32")
    answers = native_together(server, bodies(cases))
    assert [answer["output_ids"] for answer in answers] == [case.tokens for case in cases]
    assert server.metric("forebay:pd_handed_total") == len(cases)
    server.wait_until_idle()
    for name in ("forebay:lent_pages", "forebay:copies_outstanding"):
        server.wait_for_metric(name, lambda value: value == 0)
    decode = server.replicas()[1]
    assert decode["prompt_tokens"] <= 4 * len(cases), "the decode replica computes only positions that fill no page"
    assert server.metric("forebay:copies_failed_total") == 0


def test_without_kept_states_a_tier_is_refused(model: Model, serve: Serve) -> None:
    server = serve(model, *FLAGS, *TIER, "--disable-state-cache", healthy=False)
    assert server.process.wait(30) != 0
    assert "Leave out --disable-state-cache" in server.log()
