"""Log-likelihoods of given texts, as evaluators ask for them. The reference is transformers, one text at a time."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
import torch

from tests.e2e.client import Json, events, openai_client
from tests.e2e.conftest import Models, Serve, server_factory
from tests.e2e.models import END, Model
from tests.e2e.reference import prompts
from tests.e2e.server import Server
from tests.e2e.waiting import eventually

TEXTS = 24
"""The number of contexts and continuations for each model."""
SMOLLM2_TEXTS = int(os.environ.get("FOREBAY_SMOLLM2_TEXTS", "3"))
"""The same for SmolLM2, where each takes a second or two: `make test-slow` takes more."""
SUM = 2e-3
"""The largest error of a sum of log-probabilities in float32. PyTorch's own sums differ by half of that."""
SMALL = ("--chunked-prefill-size", "32", "--page-size", "4", "--max-total-tokens", "1024")
POOL = ("--max-total-tokens", "384")
SETTINGS = {
    "llama": ("--lookahead", "1", *SMALL),
    "qwen3-moe": ("--lookahead", "0", *SMALL),
    "deepseek-v32": ("--lookahead", "1", *SMALL),
    "smollm2": ("--chunked-prefill-size", "64"),
}


@pytest.fixture(scope="module", params=SETTINGS)
def scene(
    request: pytest.FixtureRequest, models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Model]]:
    model = models(request.param)
    with ExitStack() as stack:
        serve = server_factory(tmp_path_factory.mktemp("logs"), stack)
        yield serve(model, *SETTINGS[request.param]), model


@pytest.fixture(scope="module")
def server(serve_for_module: Serve, tiny: Model) -> Server:
    return serve_for_module(tiny, *SETTINGS["llama"])


def distributions(model: Model, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities [tokens, vocabulary] of the token that follows each of `tokens`."""
    with torch.inference_mode():
        logits: torch.Tensor = model.reference(input_ids=torch.tensor([tokens])).logits[0]
    return logits.float().log_softmax(-1)


def parts(model: Model) -> list[tuple[list[int], list[int]]]:
    """Contexts with continuations, of 1 to about 90 tokens."""
    count = SMOLLM2_TEXTS if model.name == "smollm2" else TEXTS
    texts = [text for text in prompts(model, 2 * count, 90, seed=8) if len(text) > 1][:count]
    return [(text[:cut], text[cut:]) for number, text in enumerate(texts) for cut in [1 + number % (len(text) - 1)]]


@cache
def expected(model: Model, context: tuple[int, ...], continuation: tuple[int, ...]) -> tuple[float, bool]:
    """The log-probability of a continuation, and whether greedy decoding gives it."""
    of = distributions(model, [*context, *continuation])[len(context) - 1 : -1]
    chosen = of.gather(1, torch.tensor(continuation)[:, None])
    return float(chosen.double().sum()), tuple(of.argmax(-1).tolist()) == continuation


def read(choice: Json, context: int, until: int | None) -> tuple[float, bool]:
    """What lm-eval's `local-completions` reads from a choice: the log-likelihood, and whether it is greedy."""
    logprobs = choice["logprobs"]
    tokens, top = logprobs["token_logprobs"][context:until], logprobs["top_logprobs"][context:until]
    return sum(tokens), all(token == max(likely.values()) for token, likely in zip(tokens, top, strict=True))


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_log_likelihoods_are_those_of_transformers(scene: tuple[Server, Model], max_tokens: int) -> None:
    server, model = scene
    cases = parts(model)
    # lm-eval sends lists of token ids in batches, several requests at a time.
    batches = [cases[at : at + 4] for at in range(0, len(cases), 4)]

    def ask(batch: list[tuple[list[int], list[int]]]) -> list[Json]:
        whole = [context + continuation for context, continuation in batch]
        body = {"prompt": whole, "temperature": 0, "max_tokens": max_tokens, "logprobs": 1, "seed": 1234, "echo": True}
        choices = server.ask("/v1/completions", {"model": model.name, **body})["choices"]
        return sorted(choices, key=lambda choice: int(choice["index"]))

    with ThreadPoolExecutor(4) as threads:
        found = [choice for choices in threads.map(ask, batches) for choice in choices]
    greedy = 0
    for (context, continuation), choice in zip(cases, found, strict=True):
        likelihood, is_greedy = read(choice, len(context), -max_tokens or None)
        wanted, wanted_greedy = expected(model, tuple(context), tuple(continuation))
        assert abs(likelihood - wanted) < SUM
        assert is_greedy == wanted_greedy
        greedy += is_greedy
        assert len(choice["logprobs"]["tokens"]) == len(context + continuation) + max_tokens
    assert greedy < len(cases)


def test_a_greedy_continuation_is_one(scene: tuple[Server, Model]) -> None:
    server, model = scene
    context = parts(model)[0][0]
    body: Json = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    said = server.ask("/v1/completions", {"prompt": context, "max_tokens": 5, **body})["choices"][0]["token_ids"]
    whole = {"prompt": context + said, "max_tokens": 0, "logprobs": 1, "echo": True}
    assert read(server.ask("/v1/completions", whole)["choices"][0], len(context), None)[1]


def test_ranks_and_alternatives_are_those_of_transformers(scene: tuple[Server, Model]) -> None:
    server, model = scene
    for prompt in prompts(model, 3, 80, seed=3):
        body: Json = {"prompt": prompt, "max_tokens": 1, "prompt_logprobs": 4, "temperature": 0}
        listed = server.ask("/v1/completions", body)["choices"][0]["prompt_logprobs"]
        assert listed[0] is None
        assert len(listed) == len(prompt)
        for token, entries, of in zip(prompt[1:], listed[1:], distributions(model, prompt), strict=False):
            top = of.topk(4).indices.tolist()
            ids = list(dict.fromkeys([token, *top]))
            assert [int(id_) for id_ in entries] == ids
            for id_, entry in zip(ids, entries.values(), strict=True):
                assert entry["rank"] == 1 + int((of > of[id_]).sum())
                assert abs(entry["logprob"] - float(of[id_])) < 1e-4
            assert entries[str(token)]["decoded_token"] == model.decode([token]) or "\ufffd" in model.decode([token])


TEXT = "The licence of this program, and what it permits."


def test_every_way_to_give_a_prompt(server: Server, tiny: Model) -> None:
    ids = tiny.encode(TEXT)
    client = openai_client(server)
    ask: Any = client.completions.create
    options: Any = {"model": tiny.name, "max_tokens": 0, "echo": True, "logprobs": 2}
    (one,) = ask(prompt=TEXT, **options).choices
    logprobs = one.logprobs
    assert one.text == "".join(logprobs.tokens) == TEXT
    assert [len(column) for column in (logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs)] == [
        len(ids)
    ] * 3
    assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
    assert all(2 <= len(top) <= 3 for top in logprobs.top_logprobs[1:])
    assert [TEXT[at : at + len(token)] for at, token in zip(logprobs.text_offset, logprobs.tokens, strict=True)] == (
        logprobs.tokens
    )
    assert one.finish_reason == "length"
    for prompt in (ids, [TEXT], [ids], [TEXT, "b"], [ids, ids[:3]]):
        answer = ask(prompt=prompt, **options)
        assert answer.choices[0].logprobs == logprobs
        assert answer.choices[0].text == TEXT
        assert answer.usage.completion_tokens == 0
    assert answer.usage.prompt_tokens == len(ids) + 3
    (single,) = ask(prompt=ids[:1], **options).choices
    assert (single.logprobs.token_logprobs, single.logprobs.top_logprobs) == ([None], [None])


def test_the_answer_s_follow_the_prompt_s(server: Server, tiny: Model) -> None:
    body: Json = {"prompt": TEXT, "max_tokens": 4, "logprobs": 3, "temperature": 0, "ignore_eos": True}
    alone = server.ask("/v1/completions", body)["choices"][0]
    echoed = server.ask("/v1/completions", {**body, "echo": True})["choices"][0]
    assert echoed["text"] == TEXT + alone["text"]
    count = len(tiny.encode(TEXT))
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert echoed["logprobs"][name][count:] == alone["logprobs"][name]
    assert echoed["logprobs"]["text_offset"][count:] == [at + len(TEXT) for at in alone["logprobs"]["text_offset"]]


@pytest.mark.parametrize("max_tokens", [0, 5])
@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_says_the_same(server: Server, n: int, max_tokens: int) -> None:
    body: Json = {"prompt": [TEXT, "A second one."], "max_tokens": max_tokens, "logprobs": 1, "echo": True, "n": n}
    body |= {"seed": 7, "ignore_eos": True}
    whole = server.ask("/v1/completions", body)["choices"]
    chunks = events(server.post("/v1/completions", {**body, "stream": True}).text)
    for choice in whole:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [x for c in mine for x in (c["logprobs"] or {}).get(name, [])] == choice["logprobs"][name]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]


def test_choices_share_what_is_said_of_their_prompt(server: Server, tiny: Model) -> None:
    prompt = prompts(tiny, 1, 90, seed=77)[0] + [5] * 40
    computed = server.metric("vllm:prompt_tokens_total")
    body: Json = {"prompt": prompt, "max_tokens": 2, "prompt_logprobs": 1, "n": 4, "seed": 3, "ignore_eos": True}
    answer = server.ask("/v1/completions", body)
    first, *others = (choice["prompt_logprobs"] for choice in answer["choices"])
    assert len(first) == len(prompt)
    assert all(other == first for other in others)
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["usage"]["completion_tokens"] == 8
    hits = server.metric("vllm:prefix_cache_hits_total")
    best = server.ask("/v1/completions", {**body, "n": 1, "best_of": 4})
    assert best["choices"][0]["prompt_logprobs"] == first
    assert server.metric("vllm:prompt_tokens_total") >= computed + len(prompt)
    assert server.metric("vllm:prefix_cache_hits_total") > hits, (
        "choices without prompt_logprobs take the prompt from the prefix cache"
    )


def test_a_chat_s_prompt(server: Server, tiny: Model) -> None:
    body: Json = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2, "return_token_ids": True}
    answer = server.ask("/v1/chat/completions", {**body, "prompt_logprobs": 0})
    ids = answer["prompt_token_ids"]
    listed = answer["prompt_logprobs"]
    assert listed[0] is None
    assert [list(entries) for entries in listed[1:]] == [[str(id_)] for id_ in ids[1:]]
    of = distributions(tiny, ids)
    for at, (id_, entries) in enumerate(zip(ids[1:], listed[1:], strict=True)):
        assert abs(entries[str(id_)]["logprob"] - float(of[at, id_])) < 1e-4
    assert "prompt_logprobs" not in server.ask("/v1/chat/completions", body)


def test_the_native_route_lists_from_a_position_on(server: Server, tiny: Model) -> None:
    ids = tiny.encode(TEXT)
    of = distributions(tiny, ids)
    for start in (0, 5, len(ids) - 1):
        body: Json = {"input_ids": ids, "return_logprob": True, "logprob_start_len": start, "top_logprobs_num": 2}
        body |= {"return_text_in_logprobs": True, "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
        meta = server.ask("/generate", body)["meta_info"]
        listed = meta["input_token_logprobs"]
        assert listed[0] == [None, ids[start], tiny.decode([ids[start]])]
        assert [entry[1] for entry in listed] == ids[start:]
        for at, (value, id_, _) in enumerate(listed[1:], start=start):
            assert abs(value - float(of[at, id_])) < 1e-4
            likely = meta["input_top_logprobs"][at - start + 1]
            assert [id_ for _, id_, _ in likely] == of[at].topk(2).indices.tolist()
        assert len(meta["output_token_logprobs"]) == 2
        last = events(server.post("/generate", {**body, "stream": True}).text)[-1]["meta_info"]
        assert last["input_token_logprobs"] == listed
    alone = {"input_ids": ids, "return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0}}
    meta = server.ask("/generate", alone)["meta_info"]
    assert len(meta["input_token_logprobs"]) == len(ids)
    assert (meta["completion_tokens"], meta["finish_reason"]) == (0, {"type": "length", "length": 0})
    assert "input_token_logprobs" not in server.ask("/generate", {**alone, "logprob_start_len": -1})["meta_info"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": "x"}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 21}, "logprobs"),
        ("/v1/completions", {"prompt": "a", "best_of": 2, "n": 3}, "best_of"),
        ("/v1/completions", {"prompt": "a", "best_of": 2, "stream": True}, "best_of"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "prompt_logprobs": 1, "stream": True},
            "prompt_logprobs",
        ),
        ("/generate", {"text": "a", "return_logprob": True, "logprob_start_len": 500}, "logprob_start_len"),
        ("/generate", {"text": "a", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
    ],
    ids=str,
)
def test_what_can_not_be_is_refused_by_name(server: Server, path: str, body: Json, param: str) -> None:
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


def test_cuts_company_and_lookahead_change_no_digit(serve: Serve, tiny: Model) -> None:
    """The compiled kernels give a row the same bits in any batch. After a preemption a row is computed twice."""
    server = serve(tiny, "--lookahead", "1", "--chunked-prefill-size", "32", "--page-size", "4", *POOL)
    other = serve(tiny, "--lookahead", "0", "--disable-radix-cache", "--chunked-prefill-size", "512")
    texts = prompts(tiny, 40, 90, seed=21)

    def ask(server: Server, prompt: list[int]) -> Any:
        body: Json = {"prompt": prompt, "max_tokens": 40, "logprobs": 2, "echo": True, "temperature": 0}
        return server.ask("/v1/completions", {**body, "ignore_eos": True})["choices"][0]["logprobs"]

    alone = [ask(other, prompt) for prompt in texts]
    before = server.metric("vllm:num_preemptions_total")
    with ThreadPoolExecutor(40) as threads:
        with server.held(len(texts)):
            answers = [threads.submit(ask, server, prompt) for prompt in texts]
        together = [answer.result() for answer in answers]
    assert together == alone
    assert server.metric("vllm:num_preemptions_total") > before, "some requests are preempted"


@pytest.mark.parametrize("max_tokens", [0, 20])
def test_a_hand_that_dies_costs_no_value_and_repeats_none(serve: Serve, tiny: Model, max_tokens: int) -> None:
    server = serve(tiny, "--chunked-prefill-size", "16", "--page-size", "4", "--max-total-tokens", "2048")
    texts = prompts(tiny, 24, 90, seed=33)

    def ask(prompt: list[int]) -> Any:
        body: Json = {"prompt": prompt, "max_tokens": max_tokens, "logprobs": 1, "echo": True, "temperature": 0}
        return server.ask("/v1/completions", {**body, "ignore_eos": True})["choices"][0]["logprobs"]

    expected = [ask(prompt) for prompt in texts]
    server.ask("/flush_cache", {})
    before = server.hand()
    with ThreadPoolExecutor(24) as threads:
        answers = [threads.submit(ask, prompt) for prompt in texts]
        eventually(
            lambda: server.metric("vllm:num_requests_running") > 0 or all(a.done() for a in answers),
            "a request runs",
            30,
        )
        assert before is not None
        os.kill(before, signal.SIGKILL)
        assert [answer.result() for answer in answers] == expected
    eventually(lambda: server.hand() not in (None, before), "a new hand runs", 60)


def test_the_simulated_device_has_some_too(serve: Serve, tiny: Model) -> None:
    server = serve(tiny, "--device", "sim")
    body: Json = {"prompt": TEXT, "max_tokens": 3, "logprobs": 2, "echo": True, "ignore_eos": True}
    answers = [server.ask("/v1/completions", body)["choices"][0]["logprobs"] for _ in range(2)]
    assert answers[0] == answers[1]
    count = len(tiny.encode(TEXT))
    assert [value is None for value in answers[0]["token_logprobs"]] == [True] + [False] * (count + 2)
    assert len(set(answers[0]["token_logprobs"][1:count])) > count // 3, "each token has a value of its own"
    assert END not in tiny.encode(TEXT)
