"""Answers with MTP drafts equal those without, whatever a client asks for and however steps are planned."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.conftest import Models, Serve
from tests.e2e.heads import eagle3, with_mtp
from tests.e2e.models import Model
from tests.e2e.reference import prompts
from tests.e2e.server import Server
from tests.e2e.test_speculation import SCHEMA, accepted

TORCH = ("--dtype", "float32", "--device", "deferred")
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
TOKENS = 40
STOPS = 12
"""The number of requests with a stop string, which is one character later in each."""


@pytest.fixture(scope="module")
def model(models: Models) -> Model:
    """A model without an MTP layer."""
    return models("glm4-moe")


@pytest.fixture(scope="module")
def drafting(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The same model with its last layer copied as an MTP layer, whose drafts are seldom right."""
    folder = with_mtp(model, tmp_path_factory.mktemp("mtp") / "longer")
    return Model("glm4-moe-mtp", folder, folder / "tokenizer.json")


def bodies(model: Model, text: str) -> list[dict[str, Any]]:
    """Requests of many kinds. `text` is the greedy answer to the first prompt."""
    common = {"max_tokens": TOKENS, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    several = prompts(model, 8, 16, seed=9)
    first = several[0]
    found: list[dict[str, Any]] = [
        {"prompt": prompt, "n": 3, "seed": seed, "temperature": 0.7} for seed, prompt in enumerate(several)
    ]
    found += [{"prompt": first, "stop": [text[at : at + 3]]} for at in range(4, 4 + STOPS)]
    found += [
        {"prompt": first, "stop": [text[20:23]], "include_stop_str_in_output": True},
        {"prompt": first, "n": 2, "stop": [text[9:12]], "logprobs": 2},
        {"prompt": first, "guided_regex": "(ab|cd|[0-9]){12,30}", "temperature": 1.0, "seed": 3},
        {"prompt": first, "guided_json": SCHEMA, "ignore_eos": False, "temperature": 0.7, "seed": 4},
    ]
    return [common | body for body in found]


def told(answer: dict[str, Any]) -> Any:
    """The fields of an answer that must not differ: no times, ids and values of log-probabilities."""
    choices = [
        (choice["text"], choice["token_ids"], choice["finish_reason"], choice["stop_reason"])
        for choice in answer["choices"]
    ]
    return choices, answer["usage"]["completion_tokens"]


def together(server: Server, asked: list[dict[str, Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(asked)) as pool:
        return [told(answer) for answer in pool.map(lambda body: server.ask("/v1/completions", body), asked)]


@pytest.fixture(scope="module")
def plain(serve_for_module: Serve, model: Model) -> tuple[list[dict[str, Any]], list[Any]]:
    """The requests, and their answers without drafts."""
    server = serve_for_module(model, *TORCH)
    greedy = {"prompt": prompts(model, 8, 16, seed=9)[0], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    text = server.ask("/v1/completions", greedy)["choices"][0]["text"]
    asked = bodies(model, text)
    answers = together(server, asked)
    server.kill()
    ends = [choices[0][2] for choices, _ in answers]
    assert ends.count("stop") >= STOPS
    return asked, answers


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--lookahead", "0"), marks=pytest.mark.slow),
        ("--lookahead", "1", "--chunked-prefill-size", "16"),
        pytest.param(("--dp-size", "2"), marks=pytest.mark.slow),
        ("--max-total-tokens", "480", "--page-size", "4"),
    ],
    ids=" ".join,
)
def test_an_mtp_layer_changes_no_answer(
    serve: Serve, drafting: Model, plain: tuple[list[dict[str, Any]], list[Any]], flags: tuple[str, ...]
) -> None:
    asked, expected = plain
    server = serve(drafting, *TORCH, "--speculative-algorithm", "NEXTN", *flags)
    for _ in range(2):
        # The second time the prompts come from the prefix cache.
        for body, one, other in zip(asked, together(server, asked), expected, strict=True):
            assert one == other, body
    accepted(server)
    assert server.metric(DRAFTED) > 0
    if "--max-total-tokens" in flags:
        assert server.metric("vllm:num_preemptions_total") > 0


def test_an_mtp_layer_survives_the_hand(
    serve: Serve, drafting: Model, plain: tuple[list[dict[str, Any]], list[Any]]
) -> None:
    asked, expected = plain
    server = serve(drafting, *TORCH, "--speculative-algorithm", "NEXTN")
    with ThreadPoolExecutor(1) as client:
        answers = client.submit(together, server, asked)
        server.wait_for_metric(DRAFTED, lambda value: value > 0)
        hand = server.hand()
        assert hand is not None
        os.kill(hand, signal.SIGKILL)
    assert answers.result() == expected
    assert server.metric("forebay:hand_deaths_total") == 1


@pytest.mark.parametrize("lookahead", ["0", "1"])
def test_an_eagle3_head_changes_no_answer(
    serve: Serve, tiny: Model, tmp_path_factory: pytest.TempPathFactory, lookahead: str
) -> None:
    head = eagle3(tiny, tmp_path_factory.mktemp("eagle3") / "head")
    without = serve(tiny, *TORCH)
    greedy = {"prompt": prompts(tiny, 8, 16, seed=9)[0], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    asked = bodies(tiny, without.ask("/v1/completions", greedy)["choices"][0]["text"])
    expected = together(without, asked)
    without.kill()
    config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    flags = ("--speculative-config", json.dumps(config), "--lookahead", lookahead)
    server = serve(tiny, *TORCH, *flags, "--max-total-tokens", "600", "--page-size", "4")
    assert together(server, asked) == expected
    assert server.metric(DRAFTED) > 0
