"""Several models in one server: names, loads, sleep, and what clients observe of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.conftest import FLAGS, Models
from tests.e2e.embedders import MiniLM
from tests.e2e.models import Model
from tests.e2e.processes import alive, descendants
from tests.e2e.server import BINARY, Server
from tests.e2e.simulated import SIM, paced
from tests.e2e.waiting import eventually

ADMIN = {"Authorization": "Bearer admin"}
QUEUE = 2


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return MiniLM(tmp_path_factory.mktemp("minilm"))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Starts servers with any arguments."""
    with ExitStack() as stack:

        def serve(*arguments: str | Path) -> Server:
            log = tmp_path / f"server-{len(list(tmp_path.glob('*.log')))}.log"
            server = Server(*arguments, *FLAGS, "--threads", "1", log=log)
            stack.callback(server.kill)
            server.wait_for_health()
            return server

        yield serve


def config(folder: Path, *models: dict[str, Any]) -> tuple[str, Path]:
    file = folder / "models.json"
    file.write_text(json.dumps({"models": models}))
    return "--models-config", file


def states(server: Server) -> dict[str, str]:
    return {name: model["state"] for name, model in server.http.get("/health").json()["models"].items()}


def complete(server: Server, model: str, tokens: int = 4, **options: Any) -> Any:
    body = {"model": model, "prompt": "a", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return server.post("/v1/completions", body, **options)


def test_clients_switch_between_models_that_compute(start: Any, models: Models, minilm: Model, tmp_path: Path) -> None:
    llama, qwen = models("llama"), models("qwen2")
    server = start(
        *config(
            tmp_path,
            {"name": "llama", "source": str(llama.path), "aliases": ["small"]},
            {"name": "qwen", "source": str(qwen.path), "flags": ["--context-length", "64"]},
            {"name": "minilm", "source": str(minilm.path)},
        )
    )
    assert states(server) == dict.fromkeys(["llama", "qwen", "minilm"], "unloaded")
    assert server.hands() == [], "no model is loaded before its first request"
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    assert [card.id for card in client.models.list()] == ["llama", "qwen", "minilm"]
    prompt = llama.encode("one two three")
    for _ in range(2):
        for name, model in (("llama", llama), ("qwen", qwen)):
            said = client.completions.create(model=name, prompt=prompt, max_tokens=5, temperature=0)
            assert said.model == name
            assert said.usage
            assert said.usage.completion_tokens <= 5
            assert said.choices[0].text == greedy(model, prompt, said.usage.completion_tokens), name
        vector = client.embeddings.create(model="minilm", input="one two three").data[0].embedding
        assert len(vector) == 384
    assert states(server) == dict.fromkeys(["llama", "qwen", "minilm"], "ready")
    assert len(server.hands()) == 3
    cards = {card["id"]: card for card in server.http.get("/v1/models").json()["data"]}
    assert cards["qwen"]["max_model_len"] == 64
    assert cards["qwen"]["status"] == {"value": "loaded"}
    assert cards["llama"]["size"] > 0
    # A model that generates text refuses the route of embeddings.
    wrong = server.post("/v1/embeddings", {"model": "llama", "input": "a"})
    assert wrong.status_code == 400
    unknown = complete(server, "other")
    assert unknown.status_code == 404
    assert "This server has `llama`, `qwen`, `minilm`" in unknown.json()["error"]["message"]
    for name in ("small", "small:latest", "llama:latest"):
        assert complete(server, name).json()["model"] == name
    # Routes that Ollama's clients use.
    server.http.post("/models/unload", json={"model": "minilm"})
    for name, capability in (("minilm", "embedding"), ("llama", "completion")):
        shown = server.ask("/api/show", {"model": name})
        assert capability in shown["capabilities"]
        assert shown["details"]["family"]
    assert states(server)["minilm"] == "unloaded", "/api/show loads no model"
    server.http.post("/models/load", json={"model": "minilm"})
    assert {model["name"] for model in server.http.get("/api/tags").json()["models"]} == {"llama", "qwen", "minilm"}
    assert loaded(server) == {"llama", "qwen", "minilm"}
    body = {"model": "qwen:latest", "prompt": "a", "raw": True, "stream": False, "options": {"num_predict": 2}}
    assert server.ask("/api/generate", body)["done"]
    dismissed = {"model": "qwen", "keep_alive": 0}
    assert server.ask("/api/generate", dismissed)["done_reason"] == "unload"
    eventually(lambda: states(server)["qwen"] == "asleep", "keep_alive 0 puts the model to sleep")
    assert loaded(server) == {"llama", "minilm"}
    assert server.ask("/api/generate", dismissed)["done_reason"] == "unload"
    assert states(server)["qwen"] == "asleep", "a second keep_alive 0 loads no model"
    assert server.ask("/api/generate", {"model": "qwen", "keep_alive": "5m"})["done_reason"] == "load"
    assert loaded(server) == {"llama", "qwen", "minilm"}
    assert 290 < server.http.get("/health").json()["models"]["qwen"]["idle_in"] <= 300
    metrics = server.metrics()
    assert metrics.value("forebay:model_loads_total", model_name="qwen") == 2
    assert metrics.value("forebay:model_state", model_name="qwen", state="ready") == 1
    assert metrics.value("vllm:request_success_total", model_name="llama") >= 2
    below = descendants(server.pid)
    assert server.terminate() == 0
    assert not [pid for pid in below if alive(pid)], "a process is left"


def test_models_of_transformers_code_share_a_server_with_native_ones(
    start: Any, models: Models, tmp_path: Path
) -> None:
    native, called, recurrent = models("llama"), models("starcoder2"), models("qwen3.5")
    flags = ["--model-impl", "transformers"]
    server = start(
        *config(
            tmp_path,
            {"name": "native", "source": str(native.path)},
            {"name": "called", "source": str(called.path)},
            {"name": "recurrent", "source": str(recurrent.path), "flags": flags},
        )
    )
    prompt = native.encode("one two three")
    for _ in range(2):
        for name, model in (("native", native), ("called", called), ("recurrent", recurrent)):
            body = {"model": name, "prompt": prompt, "max_tokens": 5, "temperature": 0}
            said = server.ask("/v1/completions", body)
            assert said["choices"][0]["text"] == greedy(model, prompt, said["usage"]["completion_tokens"]), name
            server.http.post("/models/unload", json={"model": name})


def loaded(server: Server) -> set[str]:
    """The models in memory, as `/api/ps` lists them."""
    return {model["name"] for model in server.http.get("/api/ps").json()["models"]}


def greedy(model: Model, prompt: list[int], tokens: int) -> str:
    """The greedy text that transformers generates."""
    import torch

    ids = model.reference.generate(
        torch.tensor([prompt]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
    )[0]
    return model.decode(ids[len(prompt) :].tolist())


def sims(tiny: Model, folder: Path, *names: str, **entry: Any) -> tuple[str | Path, ...]:
    """Flags for simulated models with these names."""
    return (*SIM, *config(folder, *({"name": name, "source": str(tiny.path), **entry} for name in names)))


def test_one_place_is_taken_in_turns_without_thrashing(start: Any, tiny: Model, tmp_path: Path) -> None:
    server = start(*sims(tiny, tmp_path, "a", "b"), "--models-max", "1", "--models-min-stay", "0.5")
    requests = 40

    def ask(name: str) -> None:
        for _ in range(requests // 2):
            assert complete(server, name).status_code == 200

    with ThreadPoolExecutor() as pool:
        list(pool.map(ask, ["a", "b", "a", "b"]))
    metrics = server.metrics()
    loads = metrics.value("forebay:model_loads_total")
    assert 2 <= loads <= requests / 2, "few requests load a model"
    assert sorted(states(server).values()) == ["asleep", "ready"]


def test_requests_wait_for_the_load_and_others_go_on(start: Any, tiny: Model, tmp_path: Path) -> None:
    slow = {"name": "slow", "source": str(tiny.path), "flags": list(paced(tmp_path, 1000.0, load_s=3.0))}
    quick = {"name": "quick", "source": str(tiny.path)}
    server = start(*SIM, *config(tmp_path, quick, slow), "--models-queue", str(QUEUE))
    assert complete(server, "quick").status_code == 200
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(complete, server, "slow") for _ in range(QUEUE)]
        eventually(
            lambda: server.metric("forebay:model_requests_waiting", model_name="slow") == QUEUE,
            "both requests wait for the load",
        )
        assert states(server) == {"quick": "ready", "slow": "loading"}
        beyond = complete(server, "slow")
        assert beyond.status_code == 503
        assert int(beyond.headers["retry-after"]) >= 1
        assert beyond.json()["error"]["code"] == "model_queue_full"
        assert complete(server, "quick").status_code == 200, "the other model answers during the load"
        assert states(server)["slow"] == "loading"
        assert [request.result().status_code for request in waiting] == [200] * QUEUE


def test_a_client_that_gives_up_leaves_the_queue(start: Any, tiny: Model, tmp_path: Path) -> None:
    entry = {"flags": list(paced(tmp_path, 1000.0, load_s=600.0))}
    server = start(*sims(tiny, tmp_path, "a", **entry))
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=1)
    with client, pytest.raises(openai.APITimeoutError):
        client.completions.create(model="a", prompt="a")
    eventually(
        lambda: server.metric("forebay:model_requests_waiting", model_name="a") == 0, "the request has left the queue"
    )
    assert states(server) == {"a": "loading"}
    assert server.terminate() == 0, "a load does not delay the exit"


def test_idle_models_sleep_and_wake(start: Any, tiny: Model) -> None:
    server = start(*SIM, tiny.path, "--served-model-name", "a", "--sleep-idle-seconds", "0.3")
    for loads in (1, 2):
        assert complete(server, "a").status_code == 200
        assert server.metric("forebay:model_loads_total") == loads
        eventually(lambda: states(server) == {"a": "asleep"}, "the model sleeps")
        assert server.http.get("/is_sleeping").json() == {"is_sleeping": True}
    threads = len(list(Path(f"/proc/{server.pid}/task").iterdir()))
    for _ in range(5):
        assert complete(server, "a").status_code == 200
        eventually(lambda: states(server) == {"a": "asleep"}, "the model sleeps")
    assert len(list(Path(f"/proc/{server.pid}/task").iterdir())) <= threads + 2, "threads of a model are left"


def test_a_stream_keeps_its_model(start: Any, tiny: Model, tmp_path: Path) -> None:
    entry = {"flags": list(paced(tmp_path, 20_000.0)), "idle_seconds": 0}
    server = start(*sims(tiny, tmp_path, "a", "b", **entry), "--models-max", "1", "--models-min-stay", "0")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    options: Any = {"ignore_eos": True}
    stream = client.completions.create(model="a", prompt="a", max_tokens=50, stream=True, extra_body=options)
    next(stream)
    with ThreadPoolExecutor() as pool:
        other = pool.submit(complete, server, "b")
        eventually(lambda: server.metric("forebay:model_requests_waiting", model_name="b") == 1, "the request waits")
        rest = [chunk.choices[0].finish_reason for chunk in stream]
        assert rest[-1] == "length"
        # On a busy machine a chunk may have several tokens.
        assert 40 <= len(rest) <= 49
        assert other.result().status_code == 200
    assert states(server)["a"] == "asleep"


def test_administrators_load_and_unload(start: Any, tiny: Model, tmp_path: Path) -> None:
    server = start(*sims(tiny, tmp_path, "a", "b"), "--api-key", "user", "--admin-api-key", "admin")
    user = {"Authorization": "Bearer user"}
    wishes = ("/models/load", "/models/unload", "/release_memory_occupation", "/resume_memory_occupation")
    for path in wishes:
        assert server.post(path, {"model": "a"}, headers=user).status_code == 401
    for path in ("/sleep", "/wake_up"):
        assert server.http.post(path, headers=user).status_code == 401
    assert complete(server, "a").status_code == 401
    assert states(server) == {"a": "unloaded", "b": "unloaded"}, "a request without a key loads no model"

    def ask(path: str, body: Any = None) -> Any:
        response = server.http.post(path, json=body, headers=ADMIN)
        assert response.status_code == 200, response.text
        return response.json()

    assert ask("/models/load", {"model": "a"}) == {"success": True, "models": {"a": "ready"}}
    assert ask("/sleep?level=1")["models"] == {"a": "asleep", "b": "unloaded"}
    assert ask("/wake_up")["models"] == {"a": "ready"}
    assert ask("/sleep?level=2&model=a")["models"] == {"a": "unloaded"}
    assert ask("/wake_up")["models"] == {}
    ask("/resume_memory_occupation", {"model": "b"})
    assert ask("/release_memory_occupation")["models"] == {"a": "unloaded", "b": "asleep"}
    assert ask("/models/unload", {"model": "b"})["models"] == {"b": "unloaded"}
    assert server.post("/sleep?level=3", None, headers=ADMIN).status_code == 400
    assert server.post("/models/load", {}, headers=ADMIN).status_code == 400
    assert server.post("/models/load", {"model": "c"}, headers=ADMIN).status_code == 404
    damaged: list[Any] = [{"model": 7}, [], {"model": "x" * (16 << 10)}]
    for wish in damaged:
        assert server.post("/release_memory_occupation", wish, headers=ADMIN).status_code == 400
    # A client that may not unload a model may not set its keep_alive either.
    body = {"model": "a", "prompt": "x", "raw": True, "stream": False, "keep_alive": 0, "options": {"num_predict": 1}}
    assert server.post("/api/generate", body, headers=user).status_code == 200
    assert states(server)["a"] == "ready"
    assert server.post("/api/generate", body, headers=ADMIN).status_code == 200
    eventually(lambda: states(server)["a"] == "asleep", "an administrator's keep_alive 0 puts the model to sleep")


def test_the_described_routes_are_those_that_answer(start: Any, tiny: Model, tmp_path: Path) -> None:
    server = start(*sims(tiny, tmp_path, "a", "b"))
    paths = server.http.get("/openapi.json").json()["paths"]
    assert {"/models/load", "/models/unload", "/sleep", "/wake_up", "/is_sleeping", "/v1/chat/completions"} <= set(
        paths
    )
    assert not {"/v1/batches", "/v1/loads", "/pause", "/v1/load_lora_adapter"} & set(paths)
    for path, item in paths.items():
        for verb in item.keys() & {"get", "post", "delete"}:
            body: dict[str, Any] = {"json": {}} if verb == "post" else {}
            with server.http.stream(verb.upper(), path.replace("{", "").replace("}", ""), **body) as response:
                if response.status_code in (404, 405):
                    error = json.loads(response.read())["error"]
                    assert not isinstance(error, dict) or error.get("code") not in ("unknown_url", "method_not_allowed")


def test_a_terminal_lists_the_models_of_a_server(start: Any, tiny: Model, tmp_path: Path) -> None:
    server = start(*sims(tiny, tmp_path, "a", "b"), "--api-key", "user", "--admin-api-key", "admin")
    assert server.http.post("/models/load", json={"model": "b"}, headers=ADMIN).status_code == 200

    def listed(*flags: str) -> subprocess.CompletedProcess[str]:
        command = [BINARY, "ls", server.url, *flags]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert [line.split()[0::3] for line in listed("--api-key", "user").stdout.splitlines()] == [
        ["MODEL"],
        ["a", "unloaded"],
        ["b", "ready"],
    ]
    models = json.loads(listed("--api-key", "user", "--json").stdout)
    assert [(model["name"], model["state"]) for model in models] == [("a", "unloaded"), ("b", "ready")]
    assert [model["bytes"] for model in models] == [0, 0], "a simulated device has no weights"
    refused = listed()
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "--api-key" in refused.stderr
    assert listed("--download-dir", str(tmp_path)).returncode == 2


def test_a_killed_hand_of_a_loading_model_fails_that_load_alone(start: Any, models: Models, tmp_path: Path) -> None:
    llama = models("llama")
    server = start(
        *config(tmp_path, {"name": "a", "source": str(llama.path)}, {"name": "b", "source": str(llama.path)})
    )
    assert complete(server, "b").status_code == 200
    (before,) = server.hands()
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(complete, server, "a")
        loading = eventually(lambda: [pid for pid in server.hands() if pid != before], "the hand of the load starts")
        os.kill(loading[0], signal.SIGKILL)
        assert complete(server, "b").status_code == 200
        failed = answer.result()
    assert failed.status_code == 503
    assert failed.json()["error"]["code"] == "model_failed"
    assert "signal 9" in failed.json()["error"]["message"]
    eventually(lambda: complete(server, "a").status_code == 200, "the load is tried again", 60)
    assert before in server.hands()


def test_a_model_that_cannot_be_loaded_fails_alone(start: Any, models: Models, tmp_path: Path) -> None:
    llama = models("llama")
    broken = {"name": "broken", "source": str(llama.path), "flags": ["--max-total-tokens", "1", "--hand-restarts", "0"]}
    server = start(*config(tmp_path, {"name": "a", "source": str(llama.path)}, broken))
    failed = complete(server, "broken")
    assert failed.status_code == 503
    assert failed.json()["error"]["code"] == "model_failed"
    assert "page" in failed.json()["error"]["message"], failed.text
    again = complete(server, "broken")
    assert "tried again in" in again.json()["error"]["message"], "a failed load is not repeated at once"
    assert complete(server, "a").status_code == 200
    assert states(server) == {"a": "ready", "broken": "unloaded"}


def test_kept_responses_outlive_the_sleep_of_their_model(start: Any, tiny: Model, tmp_path: Path) -> None:
    server = start(*sims(tiny, tmp_path, "a", "b"), "--models-max", "1", "--models-min-stay", "0")
    said = server.ask("/v1/responses", {"model": "a", "input": "hello", "max_output_tokens": 4})
    assert complete(server, "b").status_code == 200
    assert states(server)["a"] == "asleep"
    kept = server.http.get(f"/v1/responses/{said['id']}")
    assert kept.status_code == 200
    assert kept.json()["output"] == said["output"]
    more = {"model": "b", "input": "and?", "previous_response_id": said["id"], "max_output_tokens": 4}
    assert server.ask("/v1/responses", more)["previous_response_id"] == said["id"]
    assert server.http.delete(f"/v1/responses/{said['id']}").status_code == 200


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("{tiny}", "{tiny}"), "means two models"),
        (("{tiny}", "{tiny}", "--router-key", "x"), "--router-key is for a server of one model"),
        (("--models-dir", "{empty}"), "there is no model to serve"),
        (("--models-config", "{pinned}", "--models-max", "1"), "as many pinned models as --models-max allows"),
    ],
)
def test_what_cannot_be_served_is_said_at_the_start(
    tiny: Model, tmp_path: Path, arguments: tuple[str, ...], reason: str
) -> None:
    (tmp_path / "empty").mkdir()
    entry = {"source": str(tiny.path)}
    _, pinned = config(tmp_path, {"name": "a", "pinned": True, **entry}, {"name": "b", **entry})
    places = {"tiny": tiny.path, "empty": tmp_path / "empty", "pinned": pinned}
    server = Server(*(argument.format(**places) for argument in arguments), log=tmp_path / "log")
    try:
        assert server.process.wait(60) == 1
        assert reason in server.log().splitlines()[-1]
    finally:
        server.kill()


def test_a_folder_of_models_is_listed(start: Any, models: Models, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "llama").symlink_to(models("llama").path)
    (folder / "qwen").symlink_to(models("qwen2").path)
    (folder / "broken.gguf").write_bytes(b"no model")
    server = start(*SIM, "--models-dir", folder)
    assert set(states(server)) == {"llama", "qwen"}
    assert complete(server, "qwen").status_code == 200
    assert states(server) == {"llama": "unloaded", "qwen": "ready"}
    assert server.http.get("/v1/models/llama").json()["state"] == "unloaded"
    assert server.http.get("/slots?model=llama").status_code == 503
    assert server.http.get("/slots?model=qwen").status_code in (200, 400, 501)
    assert server.http.get("/server_info?model=qwen").json()["served_model_names"] == ["qwen"]
