"""Drafts from the answers to other requests: they change no token, and cross no salt and no key."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.client import native_together
from tests.e2e.conftest import Serve
from tests.e2e.models import Model
from tests.e2e.server import Server
from tests.e2e.test_speculation import ALWAYS, accepted, asked, logprobs, told

SHARED = (*ALWAYS, "--speculative-shared-history", "4")
PROMPT = [7, 90, 12, 51, 3, 66, 41, 8, 15]
"""No token occurs twice."""


def counts(server: Server) -> tuple[float, float]:
    """The number of draft tokens from answers to other requests, and how many of them were accepted."""
    metrics = server.metrics()
    drafted = metrics.value("forebay:spec_decode_shared_draft_tokens_total")
    right = metrics.value("forebay:spec_decode_shared_accepted_tokens_total")
    assert metrics.value("vllm:spec_decode_num_draft_tokens_total") >= drafted >= right
    return drafted, right


@pytest.fixture(scope="module")
def expected(serve_for_module: Serve, tiny: Model) -> list[dict[str, Any]]:
    """The answers without speculation."""
    server = serve_for_module(tiny, "--dtype", "float32")
    answers = native_together(server, asked(tiny))
    server.kill()
    return answers


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--dp-size", "2"),
        ("--max-total-tokens", "400", "--page-size", "4", "--lookahead", "0"),
        ("--device", "deferred"),
    ],
    ids=" ".join,
)
def test_answers_of_others_change_no_token(
    serve: Serve, tiny: Model, expected: list[dict[str, Any]], flags: tuple[str, ...]
) -> None:
    server = serve(tiny, "--dtype", "float32", *SHARED, *flags)
    for _ in range(2):
        answers = native_together(server, asked(tiny))
        assert told(answers) == told(expected)
        assert logprobs(answers) == pytest.approx(logprobs(expected), abs=1e-5)
    drafted, right = counts(server)
    assert drafted >= right > 0, "the second answers are drafted from the first ones"
    assert accepted(server) >= right


def test_a_killed_hand_changes_no_token(serve: Serve, tiny: Model, expected: list[dict[str, Any]]) -> None:
    server = serve(tiny, "--dtype", "float32", *SHARED)
    native_together(server, asked(tiny)[:8])
    with ThreadPoolExecutor(1) as client:
        answers = client.submit(native_together, server, asked(tiny))
        server.wait_for_metric("forebay:spec_decode_shared_accepted_tokens_total", lambda value: value > 0)
        hand = server.hand()
        assert hand is not None
        os.kill(hand, signal.SIGKILL)
    assert told(answers.result()) == told(expected)
    assert server.metric("forebay:hand_deaths_total") == 1


def generate(server: Server, key: str, salt: str | None = None, **more: Any) -> list[int]:
    """The tokens of a greedy answer."""
    sampling = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True, **more}
    body = {"input_ids": PROMPT, "sampling_params": sampling} | ({"cache_salt": salt} if salt else {})
    found: list[int] = server.ask("/generate", body, headers={"Authorization": f"Bearer {key}"})["output_ids"]
    return found


@pytest.mark.parametrize("together", [False, True], ids=["apart", "across"])
def test_they_cross_no_salt_and_no_key(serve: Serve, tiny: Model, together: bool) -> None:
    across = ("--share-cache-across-keys",) if together else ()
    keys = ("--api-key", "one", "--api-key", "two")
    server = serve(tiny, "--dtype", "float32", "--no-enable-prefix-caching", *SHARED, *keys, *across)
    # Drafts from a request's own text are always allowed; the counts are of other requests' texts alone.
    first = generate(server, "one")
    before = counts(server)
    for key, salt in (("one", "a"), ("one", "b"), ("two", "b" if together else "a")):
        assert generate(server, key, salt) == first
        if not (together and key == "two"):
            assert counts(server) == before, (key, salt)
    between = counts(server)
    assert (between[1] > before[1]) == together
    assert generate(server, "two") == first
    assert (counts(server)[1] > between[1]) == together
    assert generate(server, "one", "a") == first
    assert counts(server)[1] > between[1], "requests with the same salt and key share drafts"


def test_where_they_are_not_is_said(serve: Serve, tiny: Model) -> None:
    refused = serve(tiny, "--speculative-algorithm", "none", "--speculative-shared-history", "4", healthy=False)
    assert refused.process.wait(60) != 0
    assert "--speculative-shared-history is for --speculative-algorithm ngram" in refused.log()
