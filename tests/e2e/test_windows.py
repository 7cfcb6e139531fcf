"""A model with a window in every second layer: pages of the window part, prefix hits, preemption."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.client import native_together
from tests.e2e.conftest import Serve
from tests.e2e.models import Model, TinyModel
from tests.e2e.reference import Case, clear_cases
from tests.e2e.server import Server

HANDS = pytest.mark.parametrize("hand", ["rust", "torch"])
FLAGS = ("--page-size", "4", "--dtype", "float32")
ONE_POOL = "--disable-hybrid-kv-cache-manager"


def bodies(cases: list[Case]) -> list[dict[str, Any]]:
    return [
        {
            "input_ids": case.prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": len(case.tokens), "ignore_eos": True},
        }
        for case in cases
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return TinyModel("gpt-oss", tmp_path_factory.mktemp("models") / "tiny-windows")


@pytest.fixture(scope="module")
def cases(model: Model) -> list[Case]:
    return clear_cases(model, 8, 90, range(30, 60), seed=4)


def answer(server: Server, cases: list[Case]) -> list[list[int]]:
    return [answer["output_ids"] for answer in native_together(server, bodies(cases), held=True)]


@HANDS
@pytest.mark.parametrize("chunk", ["1", pytest.param("7", marks=pytest.mark.slow), "17"])
def test_passed_pages_are_given_back_and_no_token_changes(
    hand: str, chunk: str, model: Model, cases: list[Case], serve: Serve
) -> None:
    server = serve(model, *FLAGS, "--hand", hand, "--chunked-prefill-size", chunk, "--max-total-tokens", "2048")
    expected = [case.tokens for case in cases]
    assert answer(server, cases) == expected
    assert server.metric("forebay:window_pages_passed_total") > 0
    # The second time, prefixes are cached.
    hits = server.metric("vllm:prefix_cache_hits_total")
    assert answer(server, cases) == expected
    assert server.metric("vllm:prefix_cache_hits_total") > hits
    assert "Windows of 24 tokens: 256 pages for their layers, 512 for the others" in server.log()


@HANDS
def test_preemption_and_few_pages_change_no_token(hand: str, model: Model, cases: list[Case], serve: Serve) -> None:
    # No two of the requests fit to their ends, in whichever order they arrive.
    flags = ("--max-total-tokens", "160", "--context-length", "160", "--swa-full-tokens-ratio", "0.4")
    server = serve(model, *FLAGS, *flags, "--hand", hand, "--chunked-prefill-size", "16")
    assert answer(server, cases) == [case.tokens for case in cases]
    assert server.metric("vllm:num_preemptions_total") > 0


@HANDS
def test_one_pool_gives_the_same_tokens_and_says_so(hand: str, model: Model, cases: list[Case], serve: Serve) -> None:
    server = serve(model, *FLAGS, "--hand", hand, ONE_POOL)
    assert answer(server, cases) == [case.tokens for case in cases]
    assert server.metric("forebay:window_pages_passed_total") == 0
    assert "Windows of 24 tokens: all layers share one pool, because a flag says so" in server.log()


def test_a_host_tier_has_one_pool_and_says_so(model: Model, cases: list[Case], serve: Serve) -> None:
    server = serve(model, *FLAGS, "--enable-hierarchical-cache")
    assert answer(server, cases) == [case.tokens for case in cases]
    assert "because blocks of the host tier are whole pages" in server.log()
