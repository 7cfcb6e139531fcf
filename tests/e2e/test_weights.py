"""Weights that change while a server runs, and pauses, over the routes of vLLM and SGLang."""

from __future__ import annotations

import copy
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

from tests.e2e.conftest import Serve
from tests.e2e.models import Model
from tests.e2e.server import Server
from tests.e2e.waiting import eventually

PROMPT = [5, 9, 77, 31, 8, 120, 4, 66, 19, 40, 3, 90, 12, 51, 7, 33, 21, 60]
COUNT = 24
ADMIN = {"Authorization": "Bearer admin"}
SLOW = ("--hand", "torch")
"""The slower hand: on any processor its answers still run when a pause arrives."""


@pytest.fixture(scope="module")
def trained(tiny: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the model with other weights, which imitates a step of training."""
    folder = tmp_path_factory.mktemp("trained")
    shutil.copytree(tiny.path, folder, dirs_exist_ok=True)
    model = copy.deepcopy(tiny.reference)
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight += torch.randn_like(weight) * weight.std() * 0.5
    model.save_pretrained(folder)
    return folder


def generate(server: Server, count: int = COUNT) -> tuple[list[int], str]:
    """The greedy tokens after the prompt, and the version of the weights."""
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    answer = server.ask("/generate", {"input_ids": PROMPT, "sampling_params": sampling})
    return answer["output_ids"], answer["meta_info"]["weight_version"]


def update(server: Server, path: Path, **more: Any) -> httpx2.Response:
    return server.post("/update_weights_from_disk", {"model_path": str(path), **more}, headers=ADMIN)


def test_a_server_goes_on_with_other_weights(serve: Serve, tiny: Model, trained: Path) -> None:
    server = serve(tiny, "--admin-api-key", "admin", "--page-size", "4", "--dp-size", "2")
    first, version = generate(server)
    assert version == "default"
    answer = update(server, trained, weight_version="step 1").json()
    assert answer == {
        "success": True,
        "message": "Succeeded to update model weights.",
        "num_paused_requests": 0,
    }
    second = generate(server)
    assert second[0] != first
    assert second[1] == "step 1"
    assert second[0] == generate(serve(Model("trained", trained, Path(tiny.path) / "tokenizer.json")))[0]
    # All replicas have the new weights, and so do hands that restart.
    server.kill_hands()
    for _ in range(4):
        assert generate(server) == second
    assert update(server, Path(tiny.path), weight_version="step 0").json()["success"]
    assert generate(server) == (first, "step 0")


def test_requests_go_on_with_the_new_weights(serve: Serve, tiny: Model, trained: Path) -> None:
    server = serve(tiny)
    body = {"prompt": PROMPT, "max_tokens": 4000, "temperature": 0, "ignore_eos": True, "return_token_ids": True}

    def tokens(**more: Any) -> list[int]:
        found: list[int] = server.ask("/v1/completions", {**body, **more})["choices"][0]["token_ids"]
        return found

    old = tokens()
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(tokens)
        server.wait_for_metric("vllm:generation_tokens_total", lambda made: made > len(old) + 20)
        assert update(server, trained).json()["num_paused_requests"] == 1
        found = asked.result()
    assert len(found) == 4000
    assert found[:10] == old[:10]
    kept = next(at for at, (one, other) in enumerate(zip(found, old, strict=True)) if one != other)
    # The other tokens are those that the new weights generate after the kept ones.
    assert found[kept:] == tokens(prompt=PROMPT + found[:kept], max_tokens=4000 - kept)
    assert server.metric("vllm:request_success_total", finished_reason="length") == 3


def test_what_cannot_be_loaded_leaves_the_last_weights(
    serve: Serve, tiny: Model, trained: Path, tmp_path: Path
) -> None:
    server = serve(tiny)
    first = generate(server)
    other = tmp_path / "other"
    shutil.copytree(trained, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.01}))
    damaged = tmp_path / "damaged"
    shutil.copytree(trained, damaged)
    with (damaged / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, os.SEEK_END) - 64)
    for path, why in (
        (tmp_path / "none", "can't be read"),
        (tmp_path, "config.json"),
        (other, "these are weights of another model: shape"),
        (damaged, ""),
    ):
        answer = update(server, path)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert why in error["message"], error
        assert error["param"] == "model_path"
    assert update(server, trained, load_format="pt").status_code == 400
    assert server.post("/update_weights_from_disk", {}).status_code == 400
    assert generate(server) == first
    assert not server.http.get("/is_paused").json()["is_paused"]
    assert update(server, trained).json()["success"]


@pytest.mark.parametrize("flags", [("--device", "sim"), ("--pd", "1:1")], ids=["sim", "pd"])
def test_servers_whose_weights_stay_say_so(serve: Serve, tiny: Model, trained: Path, flags: tuple[str, ...]) -> None:
    server = serve(tiny, *flags)
    answer = update(server, trained)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "weights_fixed")
    assert server.http.get("/get_weight_version").status_code == 403
    assert server.post("/pause?mode=keep", {}).json()["status"] == "paused"
    assert server.post("/resume", {}).json()["status"] == "resumed"


@pytest.mark.parametrize("mode", ["keep", "retract"])
def test_a_pause_holds_answers_back(serve: Serve, tiny: Model, mode: str) -> None:
    server = serve(tiny, *SLOW)
    body = {"prompt": PROMPT, "max_tokens": 600, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    undisturbed = server.ask("/v1/completions", body)["choices"]
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(server.ask, "/v1/completions", body)
        before = server.metric("vllm:generation_tokens_total")
        server.wait_for_metric("vllm:generation_tokens_total", lambda tokens: tokens > before + 20)
        answer = (
            server.post("/pause?mode=keep&clear_cache=false", {})
            if mode == "keep"
            else server.post("/pause_generation", {"mode": "retract"})
        ).json()
        assert answer == {"status": "paused", "num_paused_requests": 1}
        assert server.http.get("/is_paused").json() == {"is_paused": True}
        later = pool.submit(generate, server)
        server.wait_for_metric("vllm:num_requests_waiting", lambda waiting: waiting == (2 if mode == "retract" else 1))
        made = server.metric("vllm:generation_tokens_total")
        assert server.post("/flush_cache", {}).status_code == (200 if mode == "retract" else 400)
        assert server.metric("vllm:generation_tokens_total") == made
        assert not asked.done()
        assert not later.done()
        assert server.post("/resume" if mode == "keep" else "/continue_generation", {}).json() == {"status": "resumed"}
        assert asked.result()["choices"] == undisturbed
        assert len(later.result()[0]) == COUNT


def test_a_pause_aborts_or_waits(serve: Serve, tiny: Model) -> None:
    server = serve(tiny, *SLOW)
    body = {"prompt": PROMPT, "max_tokens": 600, "temperature": 0, "ignore_eos": True}
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(server.post, "/v1/completions", body)
        eventually(lambda: server.metric("vllm:num_requests_running") == 1, "the request runs")
        assert server.post("/pause", {}).json()["num_paused_requests"] == 0
        assert asked.result().status_code != 200 or asked.result().json()["choices"][0]["finish_reason"] == "abort"
        server.post("/resume", {})
        finished = pool.submit(server.ask, "/v1/completions", body)
        eventually(lambda: server.metric("vllm:num_requests_running") == 1, "the request runs")
        assert server.post("/pause?mode=wait", {}).json()["num_paused_requests"] == 0
        assert finished.result()["usage"]["completion_tokens"] == 600
        server.post("/resume", {})
    assert generate(server)[1] == "default"
    for path in ("/pause?mode=never", "/pause?clear_cache=perhaps"):
        assert server.post(path, {}).status_code == 400
    assert server.post("/pause_generation", {"mode": "keep"}).status_code == 400


def test_versions_have_names_and_bounds(serve: Serve, tiny: Model) -> None:
    server = serve(tiny, "--admin-api-key", "admin")
    named = server.post("/update_weight_version", {"new_version": "7"}, headers=ADMIN)
    assert named.json() == {"weight_version": "7"}
    assert server.http.get("/get_weight_version", headers=ADMIN).json() == {"weight_version": "7"}
    assert generate(server)[1] == "7"
    assert server.post("/update_weight_version", {"new_version": "x" * 129}, headers=ADMIN).status_code == 400
    for path in ("/pause", "/resume", "/pause_generation", "/continue_generation", "/update_weights_from_disk"):
        assert server.post(path, {}).status_code == 401, path
    assert server.http.get("/is_paused").status_code == 401
