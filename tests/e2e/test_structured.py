"""Structured output: every spelling, a validator over many schemas, and the same tokens whatever happens."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx2
import pytest
from jsonschema.validators import validator_for

from tests.e2e import schemas
from tests.e2e.client import async_client, native_together, openai_client
from tests.e2e.conftest import Models, Serve
from tests.e2e.models import Model
from tests.e2e.server import Server

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "Who are you?"}]
MANY = 300


@pytest.fixture(scope="module")
def server(serve_for_module: Serve, tiny: Model) -> Server:
    return serve_for_module(tiny, "--device", "sim")


def fits(text: str) -> bool:
    value = json.loads(text)
    return validator_for(PERSON)(PERSON).is_valid(value)


SPELLINGS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_object"}}, "{"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "p", "strict": True, "schema": PERSON}}}, "p"),
    ({"structured_outputs": {"json": PERSON}}, "p"),
    ({"structured_outputs": {"json": json.dumps(PERSON)}}, "p"),
    ({"guided_json": PERSON}, "p"),
    ({"json_schema": json.dumps(PERSON)}, "p"),
    ({"structured_outputs": {"regex": "[a-c]{3}"}}, "[a-c]{3}"),
    ({"guided_regex": "[a-c]{3}"}, "[a-c]{3}"),
    ({"regex": "[a-c]{3}"}, "[a-c]{3}"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    ({"guided_choice": ["yes", "no"]}, "yes|no"),
    ({"structured_outputs": {"grammar": 'start: "a" (","  "b")~1..3'}}, "a(,b){1,3}"),
    ({"guided_grammar": 'root ::= "a" ("," "b"){1,3}'}, "a(,b){1,3}"),
    ({"ebnf": 'root ::= "a" ("," "b"){1,3}'}, "a(,b){1,3}"),
    (
        {
            "response_format": {
                "type": "structural_tag",
                "format": {
                    "type": "tag",
                    "begin": "<p>",
                    "content": {"type": "regex", "pattern": "[0-9]{2}"},
                    "end": "</p>",
                },
            }
        },
        "<p>[0-9]{2}</p>",
    ),
]


def right(text: str, wanted: str) -> bool:
    if wanted == "p":
        return fits(text)
    if wanted == "{":
        return isinstance(json.loads(text), dict)
    return re.fullmatch(wanted, text) is not None


@pytest.mark.parametrize(("form", "wanted"), SPELLINGS, ids=[str(sorted(form)) for form, _ in SPELLINGS])
def test_every_spelling_is_kept(server: Server, form: dict[str, Any], wanted: str) -> None:
    chat = server.ask("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2000, "n": 2, **form})
    texts = [choice["message"]["content"] for choice in chat["choices"]]
    completion = server.ask("/v1/completions", {"prompt": "Say", "max_tokens": 2000, **form})
    texts.append(completion["choices"][0]["text"])
    own = {key: value for key, value in form.items() if key in ("json_schema", "regex", "ebnf")}
    if own:
        native = server.ask("/generate", {"text": "Say", "sampling_params": {"max_new_tokens": 2000, **own}})
        texts.append(native["text"])
    assert {choice["finish_reason"] for choice in chat["choices"] + completion["choices"]} == {"stop"}
    assert all(right(text, wanted) for text in texts), texts


def test_the_openai_client_parses_what_it_asked_for(server: Server, tiny: Model) -> None:
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        tags: list[bool]

    parsed = openai_client(server).chat.completions.parse(
        model=tiny.name,
        messages=[{"role": "user", "content": "Who?"}],
        response_format=Person,
        max_tokens=3000,
    )
    assert isinstance(parsed.choices[0].message.parsed, Person)


async def _judge(server: Server, asked: list[schemas.Schema]) -> Counter[str]:
    seen: Counter[str] = Counter()
    wrong: list[str] = []
    gate = asyncio.Semaphore(32)

    async def one(client: httpx2.AsyncClient, number: int, schema: schemas.Schema) -> None:
        body = {"prompt": f"Number {number}", "max_tokens": 3000, "guided_json": schema}
        async with gate:
            response = await client.post("/v1/completions", json=body)
        if response.status_code == 400:
            error = response.json()["error"]
            assert error["param"].startswith("guided_json"), error
            seen["refused"] += 1
            return
        assert response.status_code == 200, f"{response.text}: {schema}"
        choice = response.json()["choices"][0]
        if choice["finish_reason"] == "length":
            seen["too long"] += 1
            return
        seen["finished"] += 1
        value = json.loads(choice["text"])
        kind = validator_for(schema)
        validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
        try:
            errors = list(validator.iter_errors(value))
        except re.error:
            # The pattern is valid in ECMAScript, but not in Python.
            seen["not judged"] += 1
            return
        if errors:
            wrong.append(f"{schema}: {choice['text']}: {errors[0].message}")

    async with async_client(server) as client:
        await asyncio.gather(*(one(client, number, schema) for number, schema in enumerate(asked)))
    assert not wrong, "\n".join(wrong)
    return seen


def test_no_finished_answer_is_refused_by_the_judge(server: Server) -> None:
    suite = asyncio.run(_judge(server, list(schemas.of_the_suite())))
    made = asyncio.run(_judge(server, list(schemas.made_up(MANY, 1))))
    print(f"suite: {dict(suite)}, made up: {dict(made)}")
    assert suite.total() + made.total() >= 900
    assert suite["finished"] >= 250
    assert made["finished"] >= 0.7 * MANY


def requests(count: int) -> list[dict[str, Any]]:
    """Requests for `/generate`, two of three with a constraint, greedy and sampled."""
    forms: list[dict[str, Any]] = [
        {},
        {"json_schema": json.dumps(PERSON)},
        {"regex": "([a-z]{2,6} ){5,40}"},
    ]
    return [
        {
            "text": f"Request number {number} " * (1 + number % 5),
            "sampling_params": {
                "max_new_tokens": 60,
                "temperature": float(number % 2),
                "sampling_seed": number,
                **forms[number % 3],
            },
        }
        for number in range(count)
    ]


def ids(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def check_forms(answers: list[dict[str, Any]]) -> None:
    for number, answer in enumerate(answers):
        finished = answer["meta_info"]["finish_reason"]["type"] == "stop"
        if number % 3 == 1 and finished:
            assert fits(answer["text"]), answer["text"]
        if number % 3 == 2:
            assert re.fullmatch("([a-z]{2,6} )*[a-z]{0,6}", answer["text"]), answer["text"]


@pytest.fixture(scope="module")
def expected(serve_for_module: Serve, tiny: Model) -> list[list[int]]:
    """The tokens of a hand that computes one step after the other."""
    serial = serve_for_module(tiny, "--lookahead", "0")
    answers = native_together(serial, requests(24))
    check_forms(answers)
    return ids(answers)


@pytest.mark.parametrize(
    "flags",
    [
        ("--lookahead", "1"),
        ("--device", "deferred"),
        ("--max-total-tokens", "640", "--max-running-requests", "16"),
        ("--arena-bytes", "65536", "--mask-threads", "2"),
    ],
    ids=["lookahead", "deferred", "preemption", "small arena"],
)
def test_the_tokens_do_not_depend_on_what_runs_ahead_or_is_short(
    serve: Serve, tiny: Model, expected: list[list[int]], flags: tuple[str, ...]
) -> None:
    server = serve(tiny, *flags)
    answers = native_together(server, requests(24), held=True)
    assert ids(answers) == expected
    if "--max-total-tokens" in flags:
        assert server.metric("vllm:num_preemptions_total") > 0
    assert server.metric("forebay:masks_total") > 300


def test_the_tokens_are_the_same_when_the_hand_is_killed(serve: Serve, tiny: Model, expected: list[list[int]]) -> None:
    server = serve(tiny, "--max-running-requests", "8")
    hand = server.hand()
    assert hand is not None
    begun = Event()

    def slow_down_and_kill() -> None:
        # At its own speed the hand may have computed all answers before the client has read two tokens.
        while not begun.wait(0.02):
            os.kill(hand, signal.SIGCONT)
            time.sleep(0.001)
            os.kill(hand, signal.SIGSTOP)
        os.kill(hand, signal.SIGKILL)

    def seen(count: int) -> None:
        if count > 1:
            begun.set()

    async def together() -> list[dict[str, Any]]:
        from tests.e2e.client import native_stream

        async with async_client(server) as client:
            return list(await asyncio.gather(*(native_stream(client, one, seen) for one in requests(24))))

    with ThreadPoolExecutor(1) as pool:
        killer = pool.submit(slow_down_and_kill)
        try:
            answers = asyncio.run(together())
        finally:
            begun.set()
        killer.result()
    assert ids(answers) == expected
    assert server.metric("forebay:hand_deaths_total") == 1
    assert server.metric("forebay:requests_replayed_total") > 0


def test_the_default_model_answers_in_the_form(serve: Serve, models: Models) -> None:
    server = serve(models("smollm2"))
    answer = server.ask(
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "Invent a person. Answer in JSON."}],
            "temperature": 0,
            "max_tokens": 60,
            "logprobs": True,
            "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
        },
    )
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert fits(choice["message"]["content"])
    # Log-probabilities are the model's own: the schema forces tokens that were unlikely.
    assert min(token["logprob"] for token in choice["logprobs"]["content"]) < -1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_json": {"properties": {"a": {"not": {}}}}}, "guided_json.properties.a.not"),
        ({"guided_json": {"x-guidance": {"lenient": True}}}, "guided_json.x-guidance"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "x"}}}, "response_format.format.type"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex"),
        ({"thinking_budget": 5}, "thinking_budget"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"guided_regex": "[0-9]+", "allowed_token_ids": [1500]}, "response_format"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_form_is_a_400_that_names_its_place(
    server: Server, body: dict[str, Any], param: str, stream: bool
) -> None:
    response = server.post("/v1/completions", {"prompt": "x", "stream": stream, **body})
    if param == "response_format" and stream:
        # The first mask finds this error, when the stream has begun.
        assert '"param":"response_format"' in response.text
        return
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_bad_words_do_not_come(server: Server) -> None:
    body: dict[str, Any] = {"prompt": "Say", "max_tokens": 60, "ignore_eos": True}
    text = server.ask("/v1/completions", body)["choices"][0]["text"]
    words = text.split()
    bad = [words[3], f"{words[10]} {words[11]}"]
    without = server.ask("/v1/completions", {**body, "bad_words": bad})["choices"][0]["text"]
    assert text != without
    assert all(f" {word} " not in f"{without} " for word in bad), (bad, without)


@pytest.fixture(scope="module")
def reasoner(serve_for_module: Serve, tiny: Model, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """A model whose tokenizer has tokens around its reasoning."""
    folder = tmp_path_factory.mktemp("reasoner") / "tiny-reasoner"
    shutil.copytree(Path(tiny.path), folder)
    text = (folder / "tokenizer.json").read_text().replace('"<repo_name>"', '"<think>"')
    (folder / "tokenizer.json").write_text(text.replace('"<reponame>"', '"</think>"'))
    model = Model("tiny-reasoner", folder, folder / "tokenizer.json")
    return serve_for_module(model, "--device", "sim", "--sim-output-tokens", "1000")


def test_a_thinking_budget_ends_the_reasoning(reasoner: Server) -> None:
    body: dict[str, Any] = {"prompt": "x <think>", "max_tokens": 40, "skip_special_tokens": False, "ignore_eos": True}
    for name in ("thinking_budget", "thinking_token_budget", "reasoning_budget"):
        answer = reasoner.ask("/v1/completions", {**body, name: 7, "logprobs": 0})["choices"][0]
        assert answer["logprobs"]["tokens"].index("</think>") == 7
    unlimited = reasoner.ask("/v1/completions", {**body, "thinking_budget": -1})["choices"][0]
    assert "</think>" not in unlimited["text"]


def test_the_form_begins_behind_the_reasoning(reasoner: Server) -> None:
    body: dict[str, Any] = {"max_tokens": 60, "skip_special_tokens": False, "regex": "[0-9]{2}", "thinking_budget": 4}
    inside = reasoner.ask("/v1/completions", {"prompt": "x <think>", **body})["choices"][0]
    assert re.fullmatch(r"(?s).*</think>[0-9]{2}", inside["text"])
    behind = reasoner.ask("/v1/completions", {"prompt": "<think> x </think>", **body})["choices"][0]
    assert re.fullmatch("[0-9]{2}", behind["text"])


def test_an_operator_may_switch_it_off_or_make_it_lenient(serve: Serve, tiny: Model) -> None:
    without = serve(tiny, "--device", "sim", "--no-grammar")
    response = without.post("/v1/completions", {"prompt": "x", "regex": "a"})
    assert response.status_code == 400
    assert "--no-grammar" in response.json()["error"]["message"]
    assert without.metric("forebay:grammar_trie_seconds") == 0
    lenient = serve(tiny, "--device", "sim", "--grammar-lenient")
    unique = {"type": "array", "uniqueItems": True, "items": {"const": 1}, "minItems": 2, "maxItems": 2}
    answer = lenient.ask("/v1/completions", {"prompt": "x", "max_tokens": 100, "guided_json": unique})
    assert json.loads(answer["choices"][0]["text"]) == [1, 1]
