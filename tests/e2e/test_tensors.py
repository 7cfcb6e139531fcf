"""Tensors that a trainer sends to a running server, and values of parameters that it reads back."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from tests.e2e.conftest import Models, Serve
from tests.e2e.models import Model
from tests.e2e.server import Server
from tests.e2e.test_weights import ADMIN, generate

NORM = "model.layers.0.input_layernorm.weight"
OTHERS = ["/update_weights_from_ipc", "/init_weight_transfer_engine", "/update_weights"]


def trained(model: Model, seed: int) -> dict[str, Tensor]:
    """The model's parameters with noise, which imitates a step of training."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: weight.detach() + torch.randn(weight.shape, generator=generator) * weight.std().item() * 0.5
        for name, weight in model.reference.named_parameters()
    }


def send(server: Server, tensors: Mapping[str, Tensor], **more: Any) -> httpx2.Response:
    """Sends an update as a binary body."""
    headers = {**ADMIN, "Content-Type": "application/octet-stream"}
    return server.http.post(
        "/update_weights_from_tensor", content=save(dict(tensors)), params={**more}, headers=headers
    )


def send_json(server: Server, *files: bytes, **more: Any) -> httpx2.Response:
    """Sends an update as JSON, as SGLang's clients do."""
    body = {"serialized_named_tensors": [base64.b64encode(file).decode() for file in files], **more}
    return server.post("/update_weights_from_tensor", body, headers=ADMIN)


def parameter(server: Server, name: str, rows: int = 100) -> Any:
    return server.ask("/get_weights_by_name", {"name": name, "truncate_size": rows}, headers=ADMIN)


def same(found: Any, tensor: Tensor) -> bool:
    """True if JSON numbers equal a tensor: each number is the shortest text of its float32."""
    return torch.equal(torch.tensor(found), tensor.detach())


def folder_of(server: Server) -> Path | None:
    """The server's folder for tensors, found by the lock that its process holds. `None` if it has no folder."""
    for descriptor in Path(f"/proc/{server.pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            file = descriptor.readlink()
            if file.parent.name.startswith("forebay-weights-"):
                return file.parent
    return None


def saved(model: Model, tensors: Mapping[str, Tensor], folder: Path) -> Model:
    """Saves a checkpoint with these tensors; returns its model."""
    folder.mkdir()
    for path in Path(model.path).iterdir():
        if path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
            (folder / path.name).symlink_to(path)
    (folder / "model.safetensors").write_bytes(save(dict(tensors)))
    return Model(folder.name, folder, folder / "tokenizer.json")


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_server_goes_on_with_sent_tensors(serve: Serve, models: Models, tmp_path: Path, family: str) -> None:
    model = models(family)
    server = serve(model, "--admin-api-key", "admin", "--page-size", "4", "--dp-size", "2")
    first = generate(server)
    new = trained(model, 1)
    answer = send(server, new, weight_version="1").json()
    assert answer == {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
    second = generate(server)
    assert second == (generate(serve(saved(model, new, tmp_path / "one")))[0], "1")
    assert second[0] != first[0]
    # All replicas have the new tensors, and so do hands that restart.
    server.kill_hands()
    for _ in range(4):
        assert generate(server) == second
    assert same(parameter(server, NORM), new[NORM])
    # Replace some of these tensors, in another type.
    some = {name: tensor.bfloat16() for name, tensor in trained(model, 2).items() if ".layers.0." in name}
    assert len(some) > 3
    files = [save({name: tensor}) for name, tensor in some.items()]
    assert send_json(server, *files, weight_version="2", load_format=None, flush_cache=True).json()["success"]
    mixed = {**new, **{name: tensor.float() for name, tensor in some.items()}}
    third = generate(server)
    assert third == (generate(serve(saved(model, mixed, tmp_path / "two")))[0], "2")
    server.kill_hands()
    assert generate(server) == third
    folder = folder_of(server)
    assert folder is not None
    assert len(list(folder.glob("step-*"))) == 1, "the files of the first update are gone"
    # After an update from a checkpoint no file of a tensor is left.
    answer = server.post("/update_weights_from_disk", {"model_path": str(model.path)}, headers=ADMIN)
    assert answer.json()["success"]
    assert generate(server)[0] == first[0]
    assert not list(folder.glob("step-*"))
    assert send(server, {NORM: new[NORM]}).json()["success"]
    assert folder_of(server) == folder
    assert server.terminate() == 0
    assert not folder.exists()


def test_what_has_no_place_leaves_the_last_weights(serve: Serve, tiny: Model) -> None:
    server = serve(tiny, "--admin-api-key", "admin")
    first = generate(server)
    norm = trained(tiny, 1)[NORM]
    octets = {**ADMIN, "Content-Type": "application/octet-stream"}

    def refused(answer: httpx2.Response, why: str, param: str, status: int = 400) -> None:
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert why in error["message"], error
        assert error["param"] == param

    field = "serialized_named_tensors"
    refused(send_json(server, pickle.dumps({NORM: norm.tolist()})), "came as a pickle", field)
    refused(send_json(server, save({"other": norm})), "the served checkpoint has no tensor other", field)
    refused(send_json(server, save({NORM: norm[1:]})), f"{NORM} has the shape", field)
    refused(send_json(server, save({NORM: norm.int()})), f"{NORM} has the type I32", field)
    refused(send_json(server, *[save({NORM: norm})] * 2), f"{NORM} is there twice", field)
    refused(send_json(server), "has 0 texts", field)
    refused(send_json(server, save({})), "there is no tensor to change", field)
    refused(send_json(server, save({NORM: norm}), load_format="flattened_bucket"), "load_format", "load_format")
    body = {field: ["a?bc"]}
    refused(server.post("/update_weights_from_tensor", body, headers=ADMIN), "not base64", f"{field}[0]")
    refused(server.post("/update_weights_from_tensor", {}, headers=ADMIN), "missing field", "body")
    refused(send(server, {NORM: norm[1:]}), f"{NORM} has the shape", "body")
    refused(send(server, {NORM: norm}, weight_version="x" * 129), "`weight_version` has 129 bytes", "weight_version")
    damaged = server.http.post("/update_weights_from_tensor", content=save({NORM: norm})[:-4], headers=octets)
    refused(damaged, "safetensors number 0 is damaged", "body")
    large = server.http.post("/update_weights_from_tensor", content=bytes(64 << 20), headers=octets)
    assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")
    assert generate(server) == first
    assert not server.http.get("/is_paused", headers=ADMIN).json()["is_paused"]
    for path in ("/update_weights_from_tensor", "/get_weights_by_name", *OTHERS):
        assert server.post(path, {}).status_code == 401, path
    for path in OTHERS:
        answer = server.post(path, {}, headers=ADMIN)
        assert (answer.status_code, answer.json()["error"]["code"]) == (501, "not_implemented")
        assert "/update_weights_from_tensor" in answer.json()["error"]["message"]


def test_one_update_is_received_at_a_time(serve: Serve, tiny: Model) -> None:
    server = serve(tiny)
    norm = {NORM: trained(tiny, 1)[NORM]}
    statuses = []

    def slowly() -> Any:
        file = save(norm)
        yield file[:10]
        statuses.append(send(server, norm).status_code)
        yield file[10:]

    headers = {"Content-Type": "application/octet-stream"}
    answer = server.http.post("/update_weights_from_tensor", content=slowly(), headers=headers)
    assert (answer.status_code, statuses) == (200, [409])
    assert send(server, norm).status_code == 200


def test_parameters_are_read_by_name(serve: Serve, models: Models) -> None:
    tiny = models("llama")
    server = serve(tiny)
    state = tiny.reference.state_dict()
    assert same(parameter(server, NORM), state[NORM])
    query = "model.layers.1.self_attn.q_proj.weight"
    assert same(parameter(server, query, 3), state[query][:3])
    asked = server.http.get("/get_weights_by_name", params={"name": query, "truncate_size": 2})
    assert same(asked.json(), state[query][:2])
    asked = server.http.request("GET", "/get_weights_by_name", json={"name": query, "truncate_size": 1})
    assert same(asked.json(), state[query][:1])
    for body in ({"name": "none"}, {}, {"name": query, "truncate_size": -1}):
        assert server.post("/get_weights_by_name", body).status_code == 400
    # A GGUF file has floats and quantized blocks, under the family's names.
    quantised = serve(models("smollm2"))
    reference = models("smollm2").reference.state_dict()
    assert same(parameter(quantised, NORM, 1000), reference[NORM])
    answer = quantised.post("/get_weights_by_name", {"name": query})
    assert answer.status_code == 400
    assert "only plain floats are read" in answer.json()["error"]["message"]
    refused = send(quantised, {NORM: reference[NORM]})
    assert refused.status_code == 400
    assert "serve a checkpoint of safetensors" in refused.json()["error"]["message"]


def test_log_probabilities_of_samples_are_those_of_a_recomputation(serve: Serve, models: Models) -> None:
    """The log-probabilities of sampling and of recomputation are equal, so a trainer's ratio of both is 1."""
    tiny = models("llama")
    server = serve(tiny, "--page-size", "4")
    assert send(server, trained(tiny, 1), weight_version="1").json()["success"]
    prompts = [list(range(5 + number, 25 + 3 * number)) for number in range(8)]

    def sampled(number: int) -> Any:
        body = {
            "prompt": prompts[number],
            "max_tokens": 40,
            "seed": number,
            "temperature": 1,
            "logprobs": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        return server.ask("/v1/completions", body)["choices"][0]

    # Sample all prompts at once: other requests of a step change nothing.
    with ThreadPoolExecutor() as pool:
        choices = list(pool.map(sampled, range(len(prompts))))
    worst = 0.0
    for prompt, choice in zip(prompts, choices, strict=True):
        ids = prompt + choice["token_ids"]
        body = {"prompt": ids, "max_tokens": 1, "prompt_logprobs": 0, "temperature": 0}
        listed = server.ask("/v1/completions", body)["choices"][0]["prompt_logprobs"]
        again = [entry[str(token)]["logprob"] for token, entry in zip(ids, listed, strict=True) if entry]
        own = choice["logprobs"]["token_logprobs"]
        worst = max(worst, *(abs(one - other) for one, other in zip(own, again[len(prompt) - 1 :], strict=True)))
    assert worst <= 1e-5, worst
