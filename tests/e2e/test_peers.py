"""Routes and parameters of vLLM, SGLang and llama-server that OpenAI's API does not have."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.e2e.client import Json, events, openai_client
from tests.e2e.conftest import Serve
from tests.e2e.embedders import CrossEncoder, MiniLM
from tests.e2e.models import END, Model
from tests.e2e.server import Server

PROMPT = "The licence of this work"
GREEDY: Json = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(serve_for_module: Serve, tiny: Model) -> Server:
    return serve_for_module(tiny, "--served-model-name", "tiny")


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return openai_client(server)


def chunks(text: str) -> list[Json]:
    """The objects of a llama-server stream, which has no [DONE]."""
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


def test_token_ids_come_with_the_answer(server: Server, tiny: Model) -> None:
    prompt = tiny.encode(PROMPT)
    body: Json = {"prompt": prompt, "max_tokens": 6, "return_token_ids": True, **GREEDY}
    choice = server.ask("/v1/completions", body)["choices"][0]
    assert choice["prompt_token_ids"] == prompt
    assert len(choice["token_ids"]) == 6
    streamed = [chunk["choices"][0] for chunk in events(server.post("/v1/completions", {**body, "stream": True}).text)]
    assert [token for part in streamed for token in part["token_ids"]] == choice["token_ids"]
    assert streamed[0]["prompt_token_ids"] == prompt
    assert all("prompt_token_ids" not in part for part in streamed[1:])

    chat: Json = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 6, "return_token_ids": True, **GREEDY}
    whole = server.ask("/v1/chat/completions", chat)
    assert whole["prompt_token_ids"] == server.ask("/tokenize", {"messages": chat["messages"]})["tokens"]
    parts = events(server.post("/v1/chat/completions", {**chat, "stream": True}).text)
    assert parts[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    streamed_ids = [token for part in parts for token in part["choices"][0].get("token_ids", [])]
    assert streamed_ids == whole["choices"][0]["token_ids"]
    assert "token_ids" not in server.ask("/v1/chat/completions", {**chat, "return_token_ids": False})["choices"][0]


def test_tokens_may_be_named_by_their_ids(server: Server) -> None:
    body: Json = {"prompt": PROMPT, "max_tokens": 4, "logprobs": 1, "return_tokens_as_token_ids": True, **GREEDY}
    answer = server.ask("/v1/completions", {**body, "return_token_ids": True})["choices"][0]
    names = [f"token_id:{token}" for token in answer["token_ids"]]
    assert answer["logprobs"]["tokens"] == names
    assert all(name in top for name, top in zip(names, answer["logprobs"]["top_logprobs"], strict=True))


def test_what_ended_an_answer_is_named(server: Server) -> None:
    whole = server.ask("/v1/completions", {"prompt": PROMPT, "max_tokens": 30, **GREEDY})["choices"][0]
    assert "matched_stop" not in whole
    word = whole["text"][5:8]
    stopped = server.ask("/v1/completions", {"prompt": PROMPT, "max_tokens": 30, "stop": word, **GREEDY})["choices"][0]
    assert (stopped["matched_stop"], stopped["stop_reason"], stopped["finish_reason"]) == (word, word, "stop")
    only_end: Json = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0, "allowed_token_ids": [END]}
    ended = server.ask("/v1/completions", only_end)["choices"][0]
    assert (ended["matched_stop"], ended["stop_reason"]) == (END, None)


def test_a_prompt_alone(server: Server, tiny: Model) -> None:
    for stream in (False, True):
        body: Json = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "stream": stream}
        response = server.post("/v1/completions", body)
        answers = events(response.text) if stream else [response.json()]
        choices = [choice for answer in answers for choice in answer["choices"]]
        assert "".join(choice["text"] for choice in choices) == PROMPT
        assert choices[-1]["finish_reason"] == "length"
    usage = server.ask("/v1/completions", {"prompt": PROMPT, "max_tokens": 0, "n": 3})["usage"]
    assert usage["completion_tokens"] == 0
    assert usage["prompt_tokens"] == len(tiny.encode(PROMPT))
    native = server.ask("/generate", {"text": PROMPT, "sampling_params": {"max_new_tokens": 0}})
    assert (native["text"], native["output_ids"]) == ("", [])


def test_the_best_of_several(server: Server) -> None:
    body: Json = {"prompt": PROMPT, "max_tokens": 8, "seed": 5, "temperature": 1.5, "ignore_eos": True}
    all_of_them = server.ask("/v1/completions", {**body, "n": 5, "logprobs": 0})["choices"]
    means = {choice["text"]: math.fsum(choice["logprobs"]["token_logprobs"]) / 8 for choice in all_of_them}
    expected = sorted(means, key=lambda text: means[text], reverse=True)[:2]
    best = server.ask("/v1/completions", {**body, "n": 2, "best_of": 5})
    assert [choice["text"] for choice in best["choices"]] == expected
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert best["choices"][0]["logprobs"] is None
    assert best["usage"]["completion_tokens"] == 5 * 8


def test_the_template_and_the_tokenizer_are_shown(server: Server) -> None:
    messages = [{"role": "user", "content": "a <|im_end|> b"}]
    text = server.ask("/apply-template", {"messages": messages})["prompt"]
    assert text == "<|im_start|>user\na <|im_end|> b<|im_end|>\n<|im_start|>assistant\n"
    info = server.http.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>"
    assert "{% for message in messages %}" in info["chat_template"]
    assert info["tokenizer_class"]


def test_tokens_in_the_words_of_others(server: Server, tiny: Model) -> None:
    ids = tiny.encode(PROMPT)
    assert server.ask("/tokenize", {"content": PROMPT})["tokens"] == ids
    pieces = server.ask("/tokenize", {"content": PROMPT, "with_pieces": True})["tokens"]
    assert [piece["id"] for piece in pieces] == ids
    assert "".join(piece["piece"] for piece in pieces) == PROMPT
    both = server.ask("/tokenize", {"prompt": [PROMPT, "two"]})
    assert both["tokens"] == [ids, tiny.encode("two")]
    assert both["count"] == [len(ids), len(tiny.encode("two"))]
    answer = server.ask("/detokenize", {"tokens": ids})
    assert answer["prompt"] == answer["text"] == answer["content"] == PROMPT
    wrongs: list[Json] = [{}, {"prompt": []}, {"prompt": "a", "content": "b"}]
    for wrong in wrongs:
        assert server.post("/tokenize", wrong).status_code == 400


def test_llama_cpps_completion(server: Server, tiny: Model) -> None:
    body: Json = {"prompt": PROMPT, "n_predict": 8, "return_tokens": True, **GREEDY}
    whole = server.ask("/completion", body)
    openai = server.ask("/v1/completions", {"prompt": PROMPT, "max_tokens": 8, "return_token_ids": True, **GREEDY})
    assert whole["content"] == openai["choices"][0]["text"]
    assert whole["tokens"] == openai["choices"][0]["token_ids"]
    assert (whole["stop"], whole["stop_type"], whole["truncated"]) == (True, "limit", False)
    assert (whole["tokens_evaluated"], whole["tokens_predicted"]) == (len(tiny.encode(PROMPT)), 8)
    parts = chunks(server.post("/completion", {**body, "stream": True}).text)
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1]["stop_type"] == "limit"

    word = whole["content"][4:7]
    stopped = server.ask("/completion", {**body, "stop": [word]})
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", word)
    assert stopped["content"] == whole["content"].split(word)[0]
    banned = server.ask("/completion", {**body, "logit_bias": [[whole["tokens"][0], False]]})
    assert banned["tokens"][0] != whole["tokens"][0]
    likely = server.ask("/completion", {**body, "n_probs": 2})["completion_probabilities"]
    assert [token["id"] for token in likely] == whole["tokens"]
    assert all(len(token["top_logprobs"]) == 2 for token in likely)
    batch = server.ask("/completion", {**body, "prompt": [PROMPT, "b"]})
    assert [answer["index"] for answer in batch] == [0, 1]
    assert batch[0]["content"] == whole["content"]
    for field, value in (("grammar", "root ::= a"), ("json_schema", {"type": "object"})):
        assert server.post("/completion", {**body, field: value}).status_code == 400
    ignored = server.post("/completion", {**body, "mirostat": 2, "id_slot": 1})
    assert ignored.headers["x-forebay-ignored"] == "mirostat, id_slot"


def test_slots_are_free_and_taken(server: Server) -> None:
    slots = server.http.get("/slots").json()
    assert len(slots) == server.http.get("/server_info").json()["config"]["slots"]
    assert not any(slot["is_processing"] for slot in slots)


def test_the_first_chunk_of_a_stream_has_no_tokens_yet(client: OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "a"}], max_tokens=4, stream=True, stream_options=options
    )
    counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage]
    assert counts[0] == 0
    assert counts == sorted(counts)


def test_strict_parameters(serve: Serve, tiny: Model) -> None:
    server = serve(tiny, "--device", "sim", "--strict-params")
    body: Json = {"prompt": "a", "max_tokens": 2}
    assert server.post("/v1/completions", {**body, "user": "me"}).status_code == 200
    refused = server.post("/v1/completions", {**body, "top_a": 0.5})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "top_a")
    assert server.post("/v1/completions", {**body, "max_tokens": 1_000_000}).status_code == 400


def test_pooling_and_every_spelling_of_score(serve: Serve, tmp_path: Path) -> None:
    server = serve(MiniLM(tmp_path / "minilm"), "--device", "sim")
    vectors = server.ask("/v1/embeddings", {"input": ["a", "b"]})["data"]
    pooled = server.ask("/pooling", {"input": ["a", "b"], "task": "embed"})
    assert pooled["object"] == "list"
    assert [entry["data"] for entry in pooled["data"]] == [entry["embedding"] for entry in vectors]
    assert server.post("/pooling", {"input": "a", "task": "classify"}).status_code == 400
    assert server.post("/v1/embeddings", {"input": ""}).status_code == 400
    spellings = [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"), ("query", "items")]
    spellings += [("queries", "text_2"), ("query", "data_2")]
    scores = [server.ask("/score", {one: "a", others: ["b", "c"]})["data"] for one, others in spellings]
    assert all(score == scores[0] for score in scores)
    for wrong, param in (
        ({}, "text_1"),
        ({"text_1": "a"}, "text_2"),
        ({"queries": ["a", "b"], "documents": ["c"]}, "queries"),
        ({"query": "a", "items": ["b"], "label_token_ids": [1]}, "label_token_ids"),
    ):
        refused = server.post("/score", wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), wrong


def test_scores_as_the_model_gives_them(serve: Serve, tmp_path: Path) -> None:
    model = CrossEncoder(tmp_path / "cross", MiniLM(tmp_path / "minilm"))
    server = serve(model, "--device", "sim")
    body: Json = {"text_1": "a", "text_2": ["b", "c"]}
    squeezed = [entry["score"] for entry in server.ask("/score", body)["data"]]
    raw = [entry["score"] for entry in server.ask("/score", {**body, "use_activation": False})["data"]]
    assert [1 / (1 + math.exp(-score)) for score in raw] == pytest.approx(squeezed, rel=1e-5)
    assert len(server.ask("/pooling", {"input": "a", "task": "score"})["data"][0]["data"]) == 1
