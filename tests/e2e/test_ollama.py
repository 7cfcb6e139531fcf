"""Ollama's routes: JSON lines, options, embeddings, and descriptions of models."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.client import Json
from tests.e2e.conftest import Models, Serve
from tests.e2e.embedders import MiniLM
from tests.e2e.families import ToolModel
from tests.e2e.models import Model
from tests.e2e.server import Server
from tests.e2e.simulated import SIM, scripted
from tests.e2e.test_tools import QUESTION, TOOLS, script

SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer", "maximum": 99}},
    "required": ["count"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(serve_for_module: Serve, tmp_path_factory: pytest.TempPathFactory) -> Server:
    model = ToolModel("hermes", tmp_path_factory.mktemp("models") / "hermes")
    said = scripted(tmp_path_factory.mktemp("script"), script(model))
    return serve_for_module(model, *SIM, *said, "--served-model-name", "scripted")


def lines(server: Server, path: str, body: Json) -> list[Json]:
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def joined(parts: list[Json]) -> Json:
    """Joins the messages of a stream."""
    made: Json = {"role": "assistant", "content": ""}
    for part in parts:
        for name, value in part["message"].items():
            if name != "role":
                made[name] = made[name] + value if name in made else value
    return made


def test_lines_say_what_a_whole_answer_does(server: Server) -> None:
    for question in (QUESTION, "Just talk."):
        body: Json = {"model": "scripted", "messages": [{"role": "user", "content": question}], "tools": TOOLS}
        whole = server.ask("/api/chat", {**body, "stream": False})
        parts = lines(server, "/api/chat", body)
        message, said = joined(parts), whole["message"]
        for either in (message, said):
            for call in either.get("tool_calls", []):
                call.pop("id")
        assert message == said
        assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
        for last in (whole, parts[-1]):
            assert last["done_reason"] == "stop"
            assert last["eval_count"] > 0
            assert last["total_duration"] >= last["eval_duration"] > 0
    assert whole["message"]["content"] == "One, two, STOP, three."


def test_options_are_those_of_a_chat(server: Server) -> None:
    body: Json = {"messages": [{"role": "user", "content": "Just talk."}], "stream": False}
    cut = server.ask("/api/chat", {**body, "options": {"num_predict": 2}})
    assert (cut["done_reason"], cut["eval_count"]) == ("length", 2)
    stopped = server.ask("/api/chat", {**body, "options": {"stop": ["STOP"]}})
    assert stopped["message"]["content"] == "One, two, "
    formed = server.ask("/api/chat", {**body, "format": SCHEMA})
    assert json.loads(formed["message"]["content"])["count"] <= 99


def test_a_prompt(server: Server) -> None:
    body: Json = {"model": "scripted:latest", "prompt": "Just talk.", "system": "Be brief."}
    parts = lines(server, "/api/generate", body)
    assert "".join(part["response"] for part in parts) == "One, two, STOP, three."
    assert server.post("/api/generate", {**body, "raw": True}).status_code == 400
    del body["system"]
    raw = server.ask("/api/generate", {**body, "raw": True, "stream": False})
    assert raw["response"] == "One, two, STOP, three."
    assert raw["prompt_eval_count"] < parts[-1]["prompt_eval_count"]


def test_nothing_to_say_loads_the_model(server: Server) -> None:
    for path in ("/api/chat", "/api/generate"):
        loaded = server.ask(path, {"model": "scripted"})
        assert (loaded["done"], loaded["done_reason"]) == (True, "load")
        assert server.ask(path, {"model": "scripted", "keep_alive": 0})["done_reason"] == "unload"


def test_what_is_said_about_models(server: Server) -> None:
    (model,) = server.http.get("/api/tags").json()["models"]
    assert (model["name"], model["model"]) == ("scripted", "scripted")
    assert server.http.get("/api/ps").json()["models"][0]["name"] == "scripted"
    shown = server.ask("/api/show", {"model": "scripted"})
    assert {"completion", "tools", "thinking"} <= set(shown["capabilities"])
    assert "im_start" in shown["template"]
    assert server.http.get("/api/version").json()["version"]


def test_facts_of_the_files_are_told(models: Models, serve: Serve) -> None:
    server = serve(models("smollm2"))
    (model, *_) = server.http.get("/api/tags").json()["models"]
    assert model["details"] == {
        "parent_model": "",
        "format": "gguf",
        "family": "llama",
        "families": ["llama"],
        "parameter_size": "134.52M",
        "quantization_level": "Q4_1",
    }
    shown = server.ask("/api/show", {"model": model["name"]})
    assert shown["details"] == model["details"]
    told = shown["model_info"]
    sizes = [told[f"llama.{key}"] for key in ("block_count", "embedding_length", "attention.head_count")]
    assert sizes == [30, 576, 9]
    assert told["llama.context_length"] == server.http.get("/api/ps").json()["models"][0]["context_length"]
    assert "temperature" in shown["parameters"]
    config = server.http.get("/server_info").json()["config"]
    known = [config[name] for name in ("format", "family", "parameters", "weight_type")]
    assert known == ["gguf", "llama", told["general.parameter_count"], "Q4_1"]


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/api/chat", {"model": "other"}, 404, "does not exist"),
        ("/api/chat", {"messages": [{"content": "a"}]}, 400, "messages[0].role"),
        ("/api/chat", {"messages": [{"role": "user", "content": "a"}], "format": 5}, 400, "format"),
        ("/api/chat", {"messages": [{"role": "user", "content": "a"}], "options": {"top_p": 7}}, 400, "options.top_p"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
        ("/api/embed", {"input": "a"}, 400, "embed"),
        ("/api/show", {}, 400, "model"),
        ("/api/pull", {"model": "a"}, 404, "/api/pull"),
    ],
)
def test_errors_have_ollama_s_shape(server: Server, path: str, body: Any, status: int, said: str) -> None:
    response = server.http.post(path, json=body)
    assert response.status_code == status
    told = response.json()
    assert list(told) == ["error"]
    assert said in told["error"]


def test_vectors(serve: Serve, tmp_path: Path) -> None:
    model = MiniLM(tmp_path / "minilm")
    server = serve(model)
    texts = ["a river", "a stream"]
    ours = server.ask("/api/embed", {"model": model.name, "input": texts})
    theirs = server.ask("/v1/embeddings", {"input": texts, "normalize": True})
    np.testing.assert_allclose(ours["embeddings"], [item["embedding"] for item in theirs["data"]], atol=1e-5)
    assert ours["prompt_eval_count"] == theirs["usage"]["prompt_tokens"]


def test_an_image_is_read(serve: Serve, tiny: Model) -> None:
    server = serve(tiny, "--device", "sim")
    message = {"role": "user", "content": "What is it?", "images": [b64encode(b"no image").decode()]}
    response = server.http.post("/api/chat", json={"messages": [message]})
    assert response.status_code == 400
    assert "image" in response.json()["error"]
