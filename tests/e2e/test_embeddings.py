"""Embeddings and scores through OpenAI's client and a real hand, compared with transformers."""

from __future__ import annotations

import base64
import json
import math
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openai import BadRequestError
from transformers import BertConfig, BertModel

from tests.e2e.client import openai_client
from tests.e2e.conftest import Models, Serve
from tests.e2e.embedders import CrossEncoder, MiniLM, as_sentence_transformers
from tests.e2e.models import Model, TinyModel
from tests.e2e.server import BINARY, Server
from tests.e2e.waiting import eventually

TEXTS = [
    "A forebay is the pool right in front of a turbine.",
    "Water.",
    "The cat sat on the mat. " * 30,
    "Ein Satz auf Deutsch, mit Umlauten: äöü!",
    "",
    "🌊 emoji and 汉字 and a verylongwordthatnobodyhaseverseenbeforeinanycorpus",
]


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> MiniLM:
    return MiniLM(tmp_path_factory.mktemp("models") / "minilm")


@pytest.fixture(scope="module", params=["rust", "torch"])
def server(minilm: MiniLM, serve_for_module: Serve, request: pytest.FixtureRequest) -> Server:
    return serve_for_module(minilm, "--hand", request.param)


@pytest.fixture(scope="module")
def cross(tmp_path_factory: pytest.TempPathFactory, minilm: MiniLM) -> CrossEncoder:
    return CrossEncoder(tmp_path_factory.mktemp("models") / "cross", minilm)


@pytest.fixture(scope="module", params=["rust", "torch"])
def scorer(cross: CrossEncoder, serve_for_module: Serve, request: pytest.FixtureRequest) -> Server:
    return serve_for_module(cross, "--hand", request.param)


def embed(server: Server, texts: Any, **more: Any) -> np.ndarray:
    """The vectors of `texts`, float32 [inputs, size]."""
    answer = server.ask("/v1/embeddings", {"input": texts, **more})
    assert [one["index"] for one in answer["data"]] == list(range(len(answer["data"])))
    return np.array([one["embedding"] for one in answer["data"]], np.float32)


def cosines(found: np.ndarray, expected: torch.Tensor) -> list[float]:
    pairs = zip(torch.from_numpy(found).double(), expected.double(), strict=True)
    return [float(torch.cosine_similarity(a, b, dim=0)) for a, b in pairs]


def test_the_vectors_are_those_of_sentence_transformers(server: Server, minilm: MiniLM) -> None:
    found = embed(server, TEXTS)
    expected = minilm.vectors([minilm.ids(text) for text in TEXTS])
    assert min(cosines(found, expected)) > 0.99999
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_the_real_client_reads_numbers_and_base64(server: Server, minilm: MiniLM) -> None:
    client = openai_client(server)
    # The client asks for base64 by default, and decodes it.
    default = client.embeddings.create(model=minilm.name, input=TEXTS, user="somebody")
    numbers = client.embeddings.create(model=minilm.name, input=TEXTS, encoding_format="float")
    for one, other in zip(default.data, numbers.data, strict=True):
        np.testing.assert_allclose(one.embedding, other.embedding, rtol=1e-6)
        assert len(one.embedding) == 384
    assert default.usage.prompt_tokens == sum(len(minilm.ids(text)) for text in TEXTS)
    assert default.usage == numbers.usage
    short = client.embeddings.create(model=minilm.name, input=TEXTS[0], dimensions=64, encoding_format="float")
    whole = np.array(numbers.data[0].embedding[:64])
    np.testing.assert_allclose(short.data[0].embedding, whole / np.linalg.norm(whole), atol=1e-6)
    raw = server.ask("/v1/embeddings", {"input": TEXTS[0], "encoding_format": "base64"})
    bytes_ = base64.b64decode(raw["data"][0]["embedding"])
    np.testing.assert_allclose(np.frombuffer(bytes_, "<f4"), numbers.data[0].embedding, rtol=1e-6)
    with pytest.raises(BadRequestError, match="generates no text"):
        client.completions.create(model=minilm.name, prompt="hello")


def test_tokens_are_taken_as_they_are(server: Server, minilm: MiniLM) -> None:
    ids = [minilm.ids(text) for text in TEXTS[:3]]
    np.testing.assert_allclose(embed(server, ids), embed(server, TEXTS[:3]), atol=1e-5)
    np.testing.assert_allclose(embed(server, ids[0]), embed(server, TEXTS[0]), atol=1e-5)
    bare = server.ask("/v1/embeddings", {"input": TEXTS[1], "add_special_tokens": False})
    assert bare["usage"]["prompt_tokens"] == len(ids[1]) - 2


def test_a_vector_is_the_same_alone_in_company_and_in_any_order(server: Server) -> None:
    chance = random.Random(4)
    texts = [
        " ".join(chance.choices(["water", "turbine", "cat", "a", "of"], k=chance.randint(1, 60))) for _ in range(150)
    ]
    together = embed(server, texts)
    order = chance.sample(range(150), 150)
    shuffled = embed(server, [texts[at] for at in order])
    # Matrix products of other shapes add in another order, which changes the last bits.
    np.testing.assert_allclose(shuffled, together[order], atol=1e-5)
    with ThreadPoolExecutor(16) as pool:
        alone = list(pool.map(lambda text: embed(server, text)[0], texts))
    np.testing.assert_allclose(alone, together, atol=1e-5)


def test_what_is_too_long_is_refused_or_cut_as_transformers_does(server: Server, minilm: MiniLM) -> None:
    long = "cats and dogs " * 200
    response = server.post("/v1/embeddings", {"input": ["short", long]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("input[1]", "context_length_exceeded")
    assert "256" in error["message"]
    for asked, length in [(-1, 256), (100, 100), (3, 3)]:
        answer = server.ask("/v1/embeddings", {"input": [long, "a"], "truncate_prompt_tokens": asked})
        expected = minilm.vectors([minilm.ids(long, truncation=True, max_length=length), minilm.ids("a")])
        assert answer["usage"]["prompt_tokens"] == length + 3
        found = np.array([one["embedding"] for one in answer["data"]], np.float32)
        assert min(cosines(found, expected)) > 0.99999


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/embeddings", "{", 400, None),
        ("/v1/embeddings", '{"model": "minilm"}', 400, "input"),
        ("/v1/embeddings", '{"input": [1, "a"]}', 400, "input"),
        ("/v1/embeddings", '{"input": [30522]}', 400, "input[0]"),
        ("/v1/embeddings", '{"input": []}', 400, "input"),
        ("/v1/embeddings", json.dumps({"input": ["a"] * 2049}), 400, "input"),
        ("/v1/embeddings", '{"input": "a", "dimensions": 385}', 400, "dimensions"),
        ("/v1/embeddings", '{"input": "a", "encoding_format": "hex"}', 400, "encoding_format"),
        ("/v1/embeddings", '{"input": "a", "model": "other"}', 404, "model"),
        ("/rerank", '{"query": "a"}', 400, "documents"),
        ("/score", '{"text_1": ["a", "b"], "text_2": "c"}', 400, "text_1"),
        ("/v1/chat/completions", '{"messages": []}', 400, "model"),
        ("/generate", '{"text": "a"}', 400, "model"),
    ],
)
def test_errors_have_the_shape_of_openai(server: Server, path: str, body: str, status: int, param: str | None) -> None:
    response = server.http.post(path, content=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
    assert error["message"]
    assert error["type"]


def test_a_request_of_2048_inputs_and_its_numbers(server: Server) -> None:
    server.wait_until_idle()
    names = ["vllm:request_success_total", "vllm:e2e_request_latency_seconds_count", "vllm:prompt_tokens_total"]
    labels: list[dict[str, str]] = [{"finished_reason": "stop"}, {}, {}]

    def numbers() -> list[float]:
        metrics = server.metrics()
        return [metrics.value(name, **which) for name, which in zip(names, labels, strict=True)]

    before = numbers()
    inputs = [[101, 2000 + at, 102] for at in range(2048)]
    found = embed(server, inputs)
    assert found.shape == (2048, 384)
    np.testing.assert_allclose(found[777], embed(server, inputs[777])[0], atol=1e-5)
    assert np.subtract(numbers(), before).tolist() == [2049, 2049, 3 * 2049]
    assert server.metric("vllm:time_to_first_token_seconds_count") == 0
    assert server.metric("vllm:inter_token_latency_seconds_count") == 0


def test_a_client_that_goes_away_leaves_nothing_behind(server: Server) -> None:
    aborted = "vllm:request_success_total"
    before = server.metric(aborted, finished_reason="abort")
    body = {"input": ["A long text about rivers and turbines and cats. " * 20] * 400}
    with pytest.raises(Exception, match=r"[Tt]imed out"):
        server.post("/v1/embeddings", body, timeout=0.5)
    eventually(lambda: server.metric(aborted, finished_reason="abort") > before, "inputs are aborted", 60)
    server.wait_until_idle()
    assert embed(server, "still there").shape == (1, 384)


def test_a_hand_that_dies_is_not_noticed(minilm: MiniLM, serve: Serve) -> None:
    server = serve(minilm)
    texts = ["A text about rivers and turbines and cats. " * 12] * 200
    expected = embed(server, texts[:1])
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(embed, server, texts)
        server.wait_for_metric("vllm:num_requests_running", lambda count: count > 0)
        hand = server.hand()
        assert hand is not None
        os.kill(hand, signal.SIGKILL)
        found = answer.result()
    np.testing.assert_allclose(found, np.repeat(expected, 200, axis=0), atol=1e-5)
    assert server.metric("forebay:hand_deaths_total") == 1


QUERY = "How does a turbine work?"
DOCUMENTS = ["Water turns its blades.", "Cats sleep a lot.", " ", "A generator makes electricity of rotation. " * 4]


def sigmoid(values: Sequence[float]) -> list[float]:
    return [1 / (1 + math.exp(-value)) for value in values]


def test_scores_are_those_of_transformers(scorer: Server, cross: CrossEncoder) -> None:
    logits = cross.logits([(QUERY, document) for document in DOCUMENTS])
    answer = scorer.ask("/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS})
    assert [one["score"] for one in answer["data"]] == pytest.approx(sigmoid(logits), abs=1e-5)
    assert [one["index"] for one in answer["data"]] == [0, 1, 2, 3]
    pairs = {"text_1": DOCUMENTS, "text_2": DOCUMENTS[::-1]}
    logits = cross.logits(list(zip(DOCUMENTS, DOCUMENTS[::-1], strict=True)))
    found = [one["score"] for one in scorer.ask("/score", pairs)["data"]]
    assert found == pytest.approx(sigmoid(logits), abs=1e-5)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_put_into_order(scorer: Server, cross: CrossEncoder, path: str) -> None:
    scores = sigmoid(cross.logits([(QUERY, document) for document in DOCUMENTS]))
    order = sorted(range(4), key=lambda at: -scores[at])
    answer = scorer.ask(path, {"query": QUERY, "documents": DOCUMENTS})
    assert [one["index"] for one in answer["results"]] == order
    assert [one["document"]["text"] for one in answer["results"]] == [DOCUMENTS[at] for at in order]
    best = scorer.ask(path, {"query": QUERY, "documents": DOCUMENTS, "top_n": 1, "return_documents": False})
    assert [list(one) for one in best["results"]] == [["index", "relevance_score"]]
    assert best["results"][0]["relevance_score"] == pytest.approx(scores[order[0]], abs=1e-5)
    assert answer["usage"]["total_tokens"] == sum(len(cross.ids(QUERY, text_pair=text)) for text in DOCUMENTS)


def test_of_a_pair_that_is_too_long_the_document_is_cut(scorer: Server, cross: CrossEncoder) -> None:
    long = "words and more words " * 100
    response = scorer.post("/rerank", {"query": QUERY, "documents": ["a", long]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "documents[1]")
    options = {"truncation": "only_second", "max_length": 60}
    kept = cross.hub_tokenizer(QUERY, long, return_tensors="pt", **options)
    with torch.inference_mode():
        logit = float(cross.model(**kept).logits[0, 0])
    answer = scorer.ask("/score", {"text_1": QUERY, "text_2": long, "truncate_prompt_tokens": 60})
    assert answer["usage"]["prompt_tokens"] == 60
    assert answer["data"][0]["score"] == pytest.approx(sigmoid([logit])[0], abs=1e-5)
    too_short = scorer.post("/score", {"text_1": QUERY, "text_2": "a", "truncate_prompt_tokens": 5})
    assert too_short.status_code == 400
    no_vector = scorer.post("/v1/embeddings", {"input": "a"})
    assert "/rerank or /score" in no_vector.json()["error"]["message"]


def test_an_embedder_scores_by_cosine(server: Server, minilm: MiniLM) -> None:
    answer = server.ask("/score", {"text_1": QUERY, "text_2": DOCUMENTS})
    vectors = minilm.vectors([minilm.ids(text) for text in [QUERY, *DOCUMENTS]])
    assert [one["score"] for one in answer["data"]] == pytest.approx((vectors[1:] @ vectors[0]).tolist(), abs=1e-5)


@pytest.mark.parametrize("hand", ["rust", "torch"])
@pytest.mark.parametrize("told", ["by-flag", "by-repository"])
def test_a_causal_model_embeds_in_chunks_and_from_the_prefix_cache(
    told: str, hand: str, tmp_path: Path, serve: Serve
) -> None:
    model = TinyModel("qwen3", tmp_path / "model")
    if told == "by-repository":
        as_sentence_transformers(tmp_path / "model")
    (tmp_path / "logs").mkdir()
    flags = ["--chunked-prefill-size", "64"] + (["--is-embedding"] if told == "by-flag" else [])
    server = serve(model, *flags, *(["--hand", "torch"] if hand == "torch" else []))
    assert server.http.get("/server_info").json()["config"]["hand"] == hand
    chance = random.Random(2)
    shared = [chance.randrange(3, 2000) for _ in range(100)]
    prompts = [shared + [chance.randrange(3, 2000) for _ in range(length)] for length in (1, 7, 50, 200)]
    with torch.inference_mode():
        states = [model.reference.model(input_ids=torch.tensor([p])).last_hidden_state[0, -1] for p in prompts]
    expected = torch.nn.functional.normalize(torch.stack(states).float(), dim=-1)
    assert min(cosines(embed(server, prompts), expected)) > 0.99999
    # The second time, from cached blocks.
    assert min(cosines(embed(server, prompts), expected)) > 0.99999
    assert server.metric("vllm:prefix_cache_hits_total") >= 4 * 96
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert server.post("/v1/completions", {"prompt": "a"}).status_code == 400


@pytest.mark.parametrize("hand", ["rust", "torch"])
def test_a_mean_of_a_causal_model_counts_what_an_earlier_prompt_has_computed(
    hand: str, tmp_path: Path, serve: Serve
) -> None:
    model = TinyModel("qwen3", tmp_path / "model")
    as_sentence_transformers(tmp_path / "model", "mean_tokens")
    (tmp_path / "logs").mkdir()
    server = serve(model, "--chunked-prefill-size", "64", "--hand", hand)
    chance = random.Random(2)
    shared = [chance.randrange(3, 2000) for _ in range(100)]
    prompts = [shared + [chance.randrange(3, 2000) for _ in range(length)] for length in (1, 7, 50, 200)]
    with torch.inference_mode():
        states = [model.reference.model(input_ids=torch.tensor([p])).last_hidden_state[0].mean(0) for p in prompts]
    expected = torch.nn.functional.normalize(torch.stack(states).float(), dim=-1)
    for _ in range(2):
        assert min(cosines(embed(server, prompts), expected)) > 0.99999
    assert server.metric("vllm:prefix_cache_hits_total") == 0


WAYS = {
    "float32": (["--dtype", "float32"], 1e-5),
    "bfloat16": (["--dtype", "bfloat16"], 5e-3),
    "int8": (["--dtype", "float32", "--quantization", "w8a8_int8"], 0.05),
}


@pytest.mark.parametrize("way", WAYS)
def test_encoders_need_no_python(way: str, minilm: MiniLM, cross: CrossEncoder, serve: Serve, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho started >> {tmp_path}/starts\nexit 1\n")
    python.chmod(0o755)
    flags, atol = WAYS[way]
    server = serve(minilm, "--python", str(python), *flags)
    assert server.http.get("/server_info").json()["config"]["hand"] == "rust"
    texts = [QUERY, *DOCUMENTS]
    vectors = minilm.vectors([minilm.ids(text) for text in texts])
    np.testing.assert_allclose(embed(server, texts), vectors, atol=atol)
    answer = server.ask("/score", {"text_1": QUERY, "text_2": DOCUMENTS})
    cosines_ = (vectors[1:] @ vectors[0]).tolist()
    assert [one["score"] for one in answer["data"]] == pytest.approx(cosines_, abs=2 * atol)
    server.kill()
    server = serve(cross, "--python", str(python), *flags)
    scores = sigmoid(cross.logits([(QUERY, document) for document in DOCUMENTS]))
    for path, key, place in [("/rerank", "results", "relevance_score"), ("/score", "data", "score")]:
        body = {"query": QUERY, "documents": DOCUMENTS} if key == "results" else {"text_1": QUERY, "text_2": DOCUMENTS}
        found = {one["index"]: one[place] for one in server.ask(path, body)[key]}
        assert [found[index] for index in range(len(DOCUMENTS))] == pytest.approx(scores, abs=4 * atol)
    answer = server.ask("/pooling", {"input": QUERY, "task": "classify"})
    assert len(answer["data"]) == 1
    assert not (tmp_path / "starts").exists()


def test_what_the_rust_hand_lacks_of_an_encoder_is_said(tmp_path: Path, serve: Serve, cross: CrossEncoder) -> None:
    folder = tmp_path / "odd"
    sizes: dict[str, Any] = {"hidden_size": 60, "intermediate_size": 128, "num_attention_heads": 4}
    config = BertConfig(**sizes, vocab_size=30522, max_position_embeddings=64, num_hidden_layers=1)
    BertModel(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copyfile(Path(cross.path) / name, folder / name)
    server = serve(Model("odd", folder, folder / "tokenizer.json"))
    info = server.http.get("/server_info").json()["config"]
    assert info["hand"] == "torch"
    assert info["hand_reason"] == "the Rust hand does not have inner dimensions that are odd"
    assert embed(server, ["a"]).shape == (1, 60)
    server.kill()
    refused = serve(Model("odd", folder, folder / "tokenizer.json"), "--hand", "rust", healthy=False)
    assert refused.process.wait(60) == 1
    assert "the Rust hand does not have inner dimensions that are odd" in refused.log()


def test_a_generator_makes_no_vectors(models: Models, serve: Serve) -> None:
    server = serve(models("llama"))
    for path, body in [("/v1/embeddings", {"input": "a"}), ("/rerank", {"query": "a", "documents": ["b"]})]:
        response = server.post(path, body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "model")
        assert "--is-embedding" in response.json()["error"]["message"]


def test_prompts_of_an_encoder_must_fit_into_a_step(minilm: MiniLM) -> None:
    command = [str(BINARY), "serve", str(minilm.path), "--port", "0", "--chunked-prefill-size", "100"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "must fit into one step" in done.stderr


def test_a_simulated_device_embeds(minilm: MiniLM, serve: Serve, tmp_path: Path) -> None:
    server = serve(minilm, "--device", "sim", "--context-length", "512")
    found = embed(server, TEXTS)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    np.testing.assert_array_equal(embed(server, TEXTS[::-1]), found[::-1])
    output = tmp_path / "run.jsonl"
    command = [str(BINARY), "bench", "serve", "--backend", "openai-embeddings", "--base-url", server.url]
    command += ["--model", minilm.name, "--tokenizer", str(minilm.path), "--random-input-len", "500"]
    command += ["--random-range-ratio", "1", "--num-prompts", "50", "--max-concurrency", "10", "--no-progress"]
    command += ["--dataset-name", "random", "--random-output-len", "1", "--output-file", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    run = json.loads(output.read_text().splitlines()[-1])
    assert (run["completed"], run["failed"]) == (50, 0)
    assert run["total_input_tokens"] == pytest.approx(50 * 500, rel=0.05)
