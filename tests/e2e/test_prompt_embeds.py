"""Prompts as embeddings, through OpenAI's client and a real hand: the answer is that of the same text."""

from __future__ import annotations

import base64
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from openai import APIStatusError, BadRequestError, OpenAI
from safetensors.torch import save

from tests.e2e.client import openai_client
from tests.e2e.conftest import Models, Serve
from tests.e2e.models import TINY_CONTEXT, Model
from tests.e2e.reference import Case, clear_cases, greedy
from tests.e2e.server import Server

LONGEST = 90
LASTING = 3000
ARENA_BYTES = 65536
HIDDEN = 64
ROW_BYTES = 4 * HIDDEN


def encoded(rows: torch.Tensor) -> str:
    """A matrix as the API accepts it."""
    return base64.b64encode(save({"rows": rows.contiguous()})).decode()


def embeddings(model: Model, prompt: Sequence[int], dtype: torch.dtype = torch.float32) -> str:
    """The embeddings of a prompt's tokens."""
    table: torch.Tensor = model.reference.get_input_embeddings().weight.detach()
    return encoded(table[list(prompt)].to(dtype))


def body(model: Model, case: Case, **more: Any) -> dict[str, Any]:
    """A request for the tokens that transformers generates."""
    count = len(case.tokens)
    greedy_ones = {"max_tokens": count, "temperature": 0, "ignore_eos": True, "skip_special_tokens": False}
    return {"prompt_embeds": embeddings(model, case.prompt), **greedy_ones, **more}


@contextmanager
def asked(server: Server, bodies: Sequence[dict[str, Any]]) -> Iterator[list[Any]]:
    """Sends completions concurrently; yields their futures."""
    with ThreadPoolExecutor(len(bodies)) as threads:
        yield [threads.submit(server.ask, "/v1/completions", one) for one in bodies]


def check(model: Model, cases: Sequence[Case], answers: Sequence[Any]) -> None:
    """Checks that every answer is what transformers generates."""
    for case, answer in zip(cases, answers, strict=True):
        assert answer["choices"][0]["text"] == model.decode(case.tokens)
        assert answer["usage"]["prompt_tokens"] == len(case.prompt)
        assert answer["usage"]["completion_tokens"] == len(case.tokens)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.fixture(scope="module")
def cases(tiny: Model) -> list[Case]:
    return clear_cases(tiny, 24, LONGEST, range(8, 60), seed=21)


@pytest.fixture(scope="module")
def server(serve_for_module: Serve, tiny: Model) -> Server:
    return serve_for_module(tiny, "--served-model-name", "tiny", "--arena-bytes", str(ARENA_BYTES))


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return openai_client(server)


def test_openai_s_client_streams_and_does_not(client: OpenAI, tiny: Model, cases: list[Case]) -> None:
    for case in cases[:4]:
        extra = body(tiny, case)
        params: dict[str, Any] = {name: extra.pop(name) for name in ("max_tokens", "temperature")}
        # OpenAI's client requires a prompt.
        params |= {"model": "tiny", "prompt": "", "extra_body": extra}
        whole = client.completions.create(**params)
        assert whole.choices[0].text == tiny.decode(case.tokens)
        assert whole.usage
        assert whole.usage.prompt_tokens == len(case.prompt)
        streamed = client.completions.create(stream=True, stream_options={"include_usage": True}, **params)
        chunks = list(streamed)
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
        assert chunks[-1].usage.prompt_tokens == len(case.prompt)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_widened(server: Server, tiny: Model, cases: list[Case], dtype: torch.dtype) -> None:
    """Rounded embeddings are a different prompt, so transformers computes the reference from the same rows."""
    rows = tiny.reference.get_input_embeddings().weight.detach()[cases[0].prompt].to(dtype)
    with torch.inference_mode():
        logits = tiny.reference(inputs_embeds=rows.float()[None]).logits[0, -1].float().log_softmax(-1)
    asked_for = {**body(tiny, cases[0]), "prompt_embeds": encoded(rows), "max_tokens": 1, "logprobs": 1}
    answer = server.ask("/v1/completions", asked_for)["choices"][0]
    assert answer["text"] == tiny.decode([int(logits.argmax())])
    assert answer["logprobs"]["token_logprobs"][0] == pytest.approx(float(logits.max()), abs=1e-4)


def test_prompts_and_choices_of_one_request(server: Server, tiny: Model, cases: list[Case]) -> None:
    some = [case for case in cases if len(case.tokens) >= 8][:2]
    request = body(tiny, some[0], max_tokens=8, n=2)
    request["prompt_embeds"] = [embeddings(tiny, case.prompt) for case in some]
    answer = server.ask("/v1/completions", request)
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [tiny.decode(case.tokens[:8]) for case in some for _ in range(2)]
    assert answer["usage"]["prompt_tokens"] == sum(len(case.prompt) for case in some)


def test_requests_wait_for_room_in_a_small_arena(server: Server, tiny: Model, cases: list[Case]) -> None:
    """Only a few requests fit into the arena at a time, and each frees its room."""
    assert sum(len(case.prompt) for case in cases) * ROW_BYTES * 3 > 4 * ARENA_BYTES
    with asked(server, [body(tiny, case) for case in cases * 3]) as answers:
        check(tiny, cases * 3, [answer.result() for answer in answers])
    largest = cases[0].prompt * (1 + 256 // len(cases[0].prompt))
    request = {"prompt_embeds": embeddings(tiny, largest[:256]), "max_tokens": 1}
    assert server.ask("/v1/completions", request)["usage"]["prompt_tokens"] == 256


@pytest.mark.parametrize(
    "flags",
    [
        ["--lookahead", "0", "--inline-intake"],
        ["--chunked-prefill-size", "16", "--page-size", "4"],
        ["--max-total-tokens", "400", "--max-running-requests", "20", "--intake-threads", "3"],
    ],
    ids=" ".join,
)
def test_chunks_batches_and_preemption(serve: Serve, tiny: Model, cases: list[Case], flags: list[str]) -> None:
    server = serve(tiny, *flags)
    bodies = [body(tiny, case) for case in cases]
    for number, case in enumerate(cases):
        if number % 3 == 0:
            del bodies[number]["prompt_embeds"]
            bodies[number]["prompt"] = case.prompt
    # All requests arrive before the first one can end: together they need more pages than the small pool has.
    with ExitStack() as stack:
        with server.held(len(bodies)):
            answers = stack.enter_context(asked(server, bodies))
        texts = [answer.result()["choices"][0]["text"] for answer in answers]
    assert texts == [tiny.decode(case.tokens) for case in cases]
    assert (server.metric("vllm:num_preemptions_total") > 0) == ("--max-total-tokens" in flags)


@pytest.mark.parametrize("hand", ["rust", "torch"])
def test_the_hand_may_die(serve: Serve, tiny: Model, cases: list[Case], hand: str) -> None:
    server = serve(tiny, "--arena-bytes", str(8 * ARENA_BYTES), "--hand", hand)
    long = [greedy(tiny.reference, case.prompt, 400) for case in cases[:6]]
    # Longer than the compared tokens, so that the last kill still interrupts a stream.
    lasting = [{**body(tiny, case), "max_tokens": LASTING} for case in long]
    with asked(server, lasting) as answers:
        for deaths in (1, 2, 3):
            so_far = server.metric("vllm:generation_tokens_total")
            server.wait_for_metric("vllm:generation_tokens_total", lambda now, then=so_far: now > then + 60)  # type: ignore[misc]
            pid = server.hand()
            assert pid
            os.kill(pid, signal.SIGKILL)
            server.wait_for_metric("forebay:hand_deaths_total", lambda now, n=deaths: now == n)  # type: ignore[misc]
        # In a batch two sums may round differently, so only the text before the first near tie must agree.
        for case, answer in zip(long, answers, strict=True):
            first, second = case.logprobs.topk(2).values.unbind(-1)
            unclear = (first - second < 1e-3).nonzero()[:1].flatten().tolist()
            said = tiny.decode(case.tokens[: unclear[0] if unclear else len(case.tokens)]).rstrip("\ufffd")
            assert answer.result()["choices"][0]["text"].startswith(said)
    assert server.metric("forebay:requests_replayed_total") > 0


def test_other_models_and_the_simulated_device(serve: Serve, models: Models) -> None:
    model = models("qwen3")
    case = clear_cases(model, 1, LONGEST, range(8, 60), seed=5)[0]
    request = body(model, case)
    server = serve(model)
    check(model, [case], [server.ask("/v1/completions", request)])
    server.kill()
    server = serve(model, "--device", "sim")
    answer = server.ask("/v1/completions", request)
    assert answer["usage"]["prompt_tokens"] == len(case.prompt)
    assert answer["usage"]["completion_tokens"] == len(case.tokens)


def test_what_is_wrong_is_named(client: OpenAI, server: Server, tiny: Model) -> None:
    def refused(embeds: Any, **more: Any) -> APIStatusError:
        with pytest.raises(APIStatusError) as caught:
            client.completions.create(
                model="tiny", prompt="", max_tokens=1, extra_body={"prompt_embeds": embeds}, **more
            )
        assert caught.value.type == "invalid_request_error"
        return caught.value

    two = base64.b64encode(save({"a": torch.zeros(1, HIDDEN), "b": torch.zeros(1, HIDDEN)})).decode()
    for embeds, message in [
        ("not base64!", "not base64"),
        (base64.b64encode(b"PK\x03\x04 a pickle").decode(), "not the bytes of safetensors"),
        (two, "2 tensors"),
        (encoded(torch.zeros(1, HIDDEN, dtype=torch.int32)), "type I32"),
        (encoded(torch.zeros(HIDDEN)), "the shape is"),
        (encoded(torch.zeros(1, HIDDEN + 1)), f"the model has {HIDDEN}"),
        (encoded(torch.full((3, HIDDEN), torch.nan)), "position 0 is not finite"),
        (encoded(torch.zeros(TINY_CONTEXT, HIDDEN)), "maximum context length"),
    ]:
        error = refused(embeds)
        assert isinstance(error, BadRequestError), error
        assert error.param == "prompt_embeds"
        assert message in error.message
    assert refused(encoded(torch.zeros(1, HIDDEN)), echo=True).param == "echo"
    too_large = refused(encoded(torch.zeros(ARENA_BYTES // ROW_BYTES + 1, HIDDEN)))
    assert (too_large.status_code, too_large.param, too_large.code) == (413, "prompt_embeds", "payload_too_large")
    both = server.post("/v1/completions", {"prompt": "a", "prompt_embeds": encoded(torch.zeros(1, HIDDEN))})
    assert (both.status_code, both.json()["error"]["param"]) == (400, "prompt_embeds")
    assert server.ask("/v1/completions", {"prompt": "a", "max_tokens": 1})
