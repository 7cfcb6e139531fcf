"""Seeded tokens depend on the request alone: not on batch, chunks, prefix cache, lookahead or pool size."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.e2e.client import cut, native_one_by_one, native_together
from tests.e2e.conftest import Serve
from tests.e2e.models import Model
from tests.e2e.reference import prompts
from tests.e2e.sampling import WIDE, narrowest

REQUESTS = 48
TOP_K = 6

Requests = list[tuple[dict[str, Any], list[int]]]


def sampled(prompt: list[int], number: int) -> dict[str, Any]:
    """A request for `/generate` whose parameters depend on its number, with the log-probabilities that margins need."""
    params = {
        "temperature": [0, 0.7, 1.0, 1.4][number % 4],
        "top_k": TOP_K,
        "seed": 1000 + number,
        "max_new_tokens": 12 + number % 30,
        "ignore_eos": True,
    }
    return {"input_ids": prompt, "sampling_params": params, "return_logprob": True, "top_logprobs_num": TOP_K + 1}


@pytest.fixture(scope="module")
def requests(serve_for_module: Serve, tiny: Model) -> Requests:
    """Requests with their tokens from the simplest server, which computes them one by one.

    Requests are left out if the order of additions may decide one of their choices.
    """
    server = serve_for_module(tiny, "--lookahead", "0", "--disable-radix-cache", "--max-running-requests", "1")
    asked = [sampled(prompt, number) for number, prompt in enumerate(prompts(tiny, REQUESTS, 90, seed=8))]
    answers = native_one_by_one(server, asked)
    server.kill()
    kept = [(a, b["output_ids"]) for a, b in zip(asked, answers, strict=True) if narrowest(a, b) > WIDE]
    assert len(kept) > REQUESTS // 2
    return kept


@pytest.mark.parametrize(
    "flags",
    [
        ["--lookahead", "1"],
        ["--lookahead", "0", "--chunked-prefill-size", "7", "--page-size", "4"],
        ["--lookahead", "1", "--chunked-prefill-size", "32", "--page-size", "1"],
        ["--lookahead", "1", "--disable-radix-cache", "--max-total-tokens", "400"],
        [
            "--lookahead",
            "1",
            "--chunked-prefill-size",
            "64",
            "--max-total-tokens",
            "400",
            "--max-running-requests",
            "20",
        ],
        ["--speculative-algorithm", "ngram", "--speculative-unpriced", "--max-total-tokens", "400"],
        ["--hand", "torch", "--lookahead", "1", "--chunked-prefill-size", "32"],
        ["--device", "deferred", "--lookahead", "0", "--chunked-prefill-size", "7", "--page-size", "4"],
        ["--device", "deferred", "--lookahead", "1", "--max-total-tokens", "400"],
    ],
    ids=" ".join,
)
def test_tokens_depend_on_the_request_alone(serve: Serve, tiny: Model, requests: Requests, flags: list[str]) -> None:
    server = serve(tiny, *flags)
    shuffled = random.Random(1).sample(requests, len(requests))
    # All together; again with cached prefixes; in small batches; alone.
    for size in (len(requests), len(requests), 5, 1):
        for some in cut(shuffled, size) if size > 1 else cut(shuffled[:12], 1):
            # A large batch arrives as a whole before it is computed, and so fills the small pools.
            answers = native_together(server, [request for request, _ in some], held=size > 5)
            assert [answer["output_ids"] for answer in answers] == [tokens for _, tokens in some]
    assert (server.metric("vllm:prefix_cache_hits_total") > 0) == ("--disable-radix-cache" not in flags)
    assert (server.metric("vllm:num_preemptions_total") > 0) == ("--max-total-tokens" in flags)


def test_unrelated_load_changes_nothing(serve: Serve, tiny: Model, requests: Requests) -> None:
    """Penalties, biases, log-probabilities and seeds of other requests change nothing."""
    server = serve(tiny)
    noise = []
    for number, prompt in enumerate(prompts(tiny, len(requests), 60, seed=9)):
        params = {"temperature": 2.0, "max_new_tokens": 40, "frequency_penalty": 1.5, "repetition_penalty": 2}
        params |= {"logit_bias": {str(number): 5}, "stop_token_ids": [number], "min_p": 0.01}  # type: ignore[dict-item]
        noise.append({"input_ids": prompt, "sampling_params": params})
    mixed = [request for pair in zip([r for r, _ in requests], noise, strict=True) for request in pair]
    answers = native_together(server, mixed)
    assert [answer["output_ids"] for answer in answers[::2]] == [tokens for _, tokens in requests]


def test_text_is_the_same_whole_and_streamed(serve: Serve, tiny: Model, requests: Requests) -> None:
    server = serve(tiny)
    asked = [request for request, _ in requests]
    streamed = native_together(server, asked)
    whole = native_one_by_one(server, asked)
    assert (
        [a["text"] for a in streamed]
        == [a["text"] for a in whole]
        == [tiny.decode(tokens, skip_special_tokens=True) for _, tokens in requests]
    )
