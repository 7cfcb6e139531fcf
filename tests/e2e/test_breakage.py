"""Effects on clients and the machine when processes die, are stopped, or never start."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.e2e.client import (
    async_client,
    events,
    native_one_by_one,
    native_stream,
    native_together,
    openai_async_client,
)
from tests.e2e.conftest import Models, Serve
from tests.e2e.models import TINY_CONTEXT, Model
from tests.e2e.processes import alive, descendants, shared_memory
from tests.e2e.reference import prompts
from tests.e2e.sampling import WIDE, narrowest
from tests.e2e.server import Server
from tests.e2e.simulated import SIM, paced
from tests.e2e.waiting import eventually, eventually_async

KILLS = int(os.environ.get("FOREBAY_KILLS", "6"))
"""How often the hand is killed under load."""
FEW_KILLS = 3
STREAMS = 48
TOP_K = 4
# After a death each stream must receive this many tokens, so that it is no longer a suspect.
PROGRESS = 2

Expected = list[tuple[dict[str, Any], list[int]]]


def requests(model: Model, count: int) -> list[dict[str, Any]]:
    """Requests for 60 to 200 tokens from `/generate`, half of them greedy and half seeded."""
    asked = []
    for number, prompt in enumerate(prompts(model, count, 60, seed=12)):
        params = {
            "temperature": 0 if number % 2 else 1.0,
            "top_k": TOP_K,
            "seed": number,
            "max_new_tokens": 60 + number * 37 % 140,
            "ignore_eos": True,
        }
        asked.append({"input_ids": prompt, "sampling_params": params})
    return asked


def undisturbed(server: Server, asked: Sequence[dict[str, Any]]) -> Expected:
    """Requests with their tokens. Requests that another order of float32 additions could change are left out."""
    ranked = [{**request, "return_logprob": True, "top_logprobs_num": TOP_K + 1} for request in asked]
    answers = native_together(server, ranked)
    kept = [
        (request, answer["output_ids"])
        for request, detailed, answer in zip(asked, ranked, answers, strict=True)
        if narrowest(detailed, answer) > WIDE
    ]
    assert len(kept) > len(asked) // 2
    return kept


class Load:
    """Streams that start again as soon as they end, until `finish`; each is compared with the expected tokens.

    Every third stream uses OpenAI's client, whose text shows a token that was lost or sent twice.
    """

    def __init__(self, server: Server, model: Model, expected: Expected) -> None:
        self._server = server
        self._model = model
        self._work: Iterator[tuple[int, tuple[dict[str, Any], list[int]]]] = enumerate(itertools.cycle(expected))
        self._ending = False
        self.live: dict[int, int] = {}
        """The tokens that each stream has received so far."""
        self.finished = 0

    async def run(self, streams: int) -> None:
        """Runs streams until `finish` was called and the last one has ended."""
        async with async_client(self._server) as native, openai_async_client(self._server) as official:
            await asyncio.gather(*(self._lane(native, official) for _ in range(streams)))

    def finish(self) -> None:
        """Starts no more streams."""
        self._ending = True

    async def everyone_moves(self) -> None:
        """Waits until every live stream has ended or received more tokens."""
        assert self.live
        before = dict(self.live)

        def moved() -> bool:
            return all(n not in self.live or self.live[n] >= count + PROGRESS for n, count in before.items())

        await eventually_async(moved, f"all of {len(before)} streams receive tokens")

    async def _lane(self, native: httpx2.AsyncClient, official: Any) -> None:
        while not self._ending:
            number, (request, tokens) = next(self._work)
            self.live[number] = 0
            try:
                if number % 3:
                    await self._native(native, number, request, tokens)
                else:
                    await self._official(official, number, request, tokens)
            finally:
                del self.live[number]
            self.finished += 1

    async def _native(
        self, client: httpx2.AsyncClient, number: int, request: dict[str, Any], wanted: list[int]
    ) -> None:
        def progress(count: int) -> None:
            self.live[number] = count

        answer = await native_stream(client, request, progress)
        assert answer["output_ids"] == wanted

    async def _official(self, client: Any, number: int, request: dict[str, Any], wanted: list[int]) -> None:
        params = dict(request["sampling_params"])
        extra = {"top_k": params.pop("top_k"), "ignore_eos": params.pop("ignore_eos"), "skip_special_tokens": False}
        params["max_tokens"] = params.pop("max_new_tokens")
        text = ""
        # With `logprobs` each token has a chunk, even while its text is held back.
        stream = await client.completions.create(
            model=self._model.name, prompt=request["input_ids"], stream=True, logprobs=0, extra_body=extra, **params
        )
        async for chunk in stream:
            text += chunk.choices[0].text
            self.live[number] += len(chunk.choices[0].logprobs.tokens)
        assert self.live[number] == len(wanted)
        assert text == self._model.decode(wanted)


async def kill_under_load(server: Server, load: Load, kills: int) -> set[int]:
    """Kills the hand repeatedly while all streams run; returns the process ids of the killed hands."""
    killed: set[int] = set()
    running = asyncio.create_task(load.run(STREAMS))
    try:
        await eventually_async(lambda: running.done() or len(load.live) == STREAMS, "all streams run")
        for number in range(1, kills + 1):
            moves = asyncio.create_task(load.everyone_moves())
            await asyncio.wait([running, moves], return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
            await moves
            hand = server.hand()
            assert hand
            assert hand not in killed
            os.kill(hand, signal.SIGKILL)
            killed.add(hand)
            await eventually_async(
                lambda n=number: server.metric("forebay:hand_deaths_total") == n,  # type: ignore[misc]
                "the death is counted",
            )
        load.finish()
        await running
    finally:
        running.cancel()
    return killed


GRAPHS = [
    "--device",
    "deferred",
    "--attention-backend",
    "triton",
    "--cuda-graph-max-bs",
    "8",
    "--chunked-prefill-size",
    "128",
]


@pytest.mark.parametrize(
    ("flags", "kills"),
    [
        (["--hand", "rust"], KILLS),
        pytest.param(["--hand", "torch"], FEW_KILLS, marks=pytest.mark.slow),
        pytest.param(["--device", "deferred", "--lookahead", "0"], FEW_KILLS, marks=pytest.mark.slow),
        (["--device", "deferred", "--lookahead", "1"], FEW_KILLS),
        pytest.param([*GRAPHS, "--chunked-prefill-size", "128"], FEW_KILLS, marks=pytest.mark.slow),
    ],
    ids=["rust", "torch", "deferred-0", "deferred-1", "graphs"],
)
def test_deaths_of_the_hand_under_load(
    serve: Serve, tiny: Model, monkeypatch: pytest.MonkeyPatch, flags: list[str], kills: int
) -> None:
    """Every stream receives exactly the tokens that it receives without deaths."""
    # Use GPU operators in their PyTorch form, which needs no GPU.
    monkeypatch.setenv("FOREBAY_GPU_KERNELS", "reference")
    server = serve(tiny, *flags)
    expected = undisturbed(server, requests(tiny, 96))
    load = Load(server, tiny, expected)
    killed = asyncio.run(kill_under_load(server, load, kills))
    assert len(killed) == kills
    assert load.finished >= STREAMS
    # On a busy machine few streams run at the same time.
    assert server.metric("forebay:requests_replayed_total") > STREAMS // 4
    assert server.metric("vllm:request_success_total", finished_reason="error") == 0
    server.wait_for_health()
    server.wait_until_idle()
    again = native_together(server, [request for request, _ in expected])
    assert [answer["output_ids"] for answer in again] == [tokens for _, tokens in expected]


@pytest.mark.parametrize("lookahead", ["0", "1"])
@pytest.mark.parametrize("device", ["cpu", "deferred"])
def test_a_death_of_an_idle_hand(serve: Serve, tiny: Model, lookahead: str, device: str) -> None:
    server = serve(tiny, "--lookahead", lookahead, "--device", device)
    expected = undisturbed(server, requests(tiny, 6))
    server.wait_until_idle()
    hand = server.hand()
    assert hand
    os.kill(hand, signal.SIGKILL)
    server.wait_for_metric("forebay:hand_deaths_total", lambda deaths: deaths == 1)
    # Requests that arrive while there is no hand wait for the next one.
    answers = native_one_by_one(server, [request for request, _ in expected])
    assert [answer["output_ids"] for answer in answers] == [tokens for _, tokens in expected]


def test_killing_the_brain_leaves_nothing_behind(serve: Serve, tiny: Model) -> None:
    before = shared_memory()
    server = serve(tiny)
    with server.http.stream("POST", "/generate", json=endless()) as stream:
        lines = stream.iter_lines()
        next(lines)
        below = descendants(server.pid)
        assert server.hand() in below
        os.kill(server.pid, signal.SIGKILL)
        server.process.wait()
        eventually(lambda: not any(alive(pid) for pid in below), "the hand has ended too")
    assert shared_memory() <= before


def endless(tokens: int = TINY_CONTEXT - 8) -> dict[str, Any]:
    """A request for a stream that runs for seconds."""
    return {"text": "a", "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}, "stream": True}


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGHUP])
def test_being_told_to_stop_drains(serve: Serve, tiny: Model, told: signal.Signals) -> None:
    """Running requests finish, new ones are refused, and then the server and its hand end."""
    server = serve(tiny)
    below = descendants(server.pid)
    with server.http.stream("POST", "/generate", json=endless()) as stream:
        lines = stream.iter_lines()
        first = next(lines)
        server.process.send_signal(told)
        health = server.wait_for_health(503).json()["error"]
        assert health["code"] == "draining"
        refused = server.post("/v1/completions", {"prompt": "a"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert refused.headers["retry-after"]
        rest = events("\n".join([first, *lines]))
    assert rest[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": TINY_CONTEXT - 8}
    assert server.process.wait(30) == 0
    assert not any(alive(pid) for pid in below)


def test_being_told_twice_to_stop_ends_what_still_runs(serve: Serve, tiny: Model) -> None:
    """The second signal ends requests at once, long before the drain timeout of 30 seconds."""
    server = serve(tiny)
    below = descendants(server.pid)
    with server.http.stream("POST", "/generate", json=endless()) as stream:
        lines = stream.iter_lines()
        first = next(lines)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_health(503)
        server.process.send_signal(signal.SIGINT)
        rest = events("\n".join([first, *lines]))
    assert rest[-1]["error"]["code"] == "aborted"
    assert server.process.wait(30) == 0
    assert not any(alive(pid) for pid in below)


@pytest.mark.parametrize("stream", [True, False])
def test_the_drain_timeout_ends_what_still_runs(serve: Serve, tiny: Model, stream: bool) -> None:
    server = serve(tiny, "--drain-timeout", "0.3")
    body = {**endless(), "stream": stream}

    async def all_of_them() -> list[httpx2.Response]:
        async with async_client(server) as client:
            asked = [asyncio.create_task(client.post("/generate", json=body)) for _ in range(16)]
            await eventually_async(lambda: server.metric("vllm:num_requests_running") == len(asked), "all requests run")
            server.process.send_signal(signal.SIGTERM)
            return list(await asyncio.gather(*asked))

    for response in asyncio.run(all_of_them()):
        if stream:
            assert response.status_code == 200
            last = events(response.text)[-1]
        else:
            assert response.status_code == 503
            last = response.json()
        assert last["error"]["code"] == "aborted"
    assert server.process.wait(30) == 0


def test_sigterm_while_loading(serve: Serve, models: Models) -> None:
    server = serve(models("smollm2"), healthy=False)
    below = eventually(lambda: descendants(server.pid), "the server has started a process")
    assert server.terminate() in (0, -signal.SIGTERM)
    eventually(lambda: not any(alive(pid) for pid in below), "all processes have ended")


def test_requests_wait_for_a_model_that_loads_if_they_are_let(serve: Serve, tiny: Model, tmp_path: Path) -> None:
    flags = (*SIM, *paced(tmp_path, step_us=10, load_s=2))
    body = {"prompt": "a", "max_tokens": 2}
    server = serve(tiny, *flags, "--queue-while-loading", healthy=False)
    eventually(lambda: answers(server, "/livez"), "the server listens")
    assert server.http.get("/health").status_code == 503
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(server.http.post, "/v1/completions", json=body) for _ in range(7)]
        listed = pool.submit(server.http.get, "/v1/models")
        assert [response.result().status_code for response in asked] == [200] * 7
        assert listed.result().status_code == 200
    assert server.http.get("/health").status_code == 200
    hasty = serve(tiny, *flags, healthy=False)
    eventually(lambda: answers(hasty, "/livez"), "the server listens")
    refused = hasty.http.post("/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "starting")


def test_requests_that_wait_for_a_model_end_with_the_server(serve: Serve, tiny: Model, tmp_path: Path) -> None:
    loading = paced(tmp_path, step_us=10, load_s=600)
    server = serve(tiny, *SIM, *loading, "--queue-while-loading", healthy=False)
    eventually(lambda: answers(server, "/livez"), "the server listens")
    descriptors = Path(f"/proc/{server.pid}/fd")
    before = len(list(descriptors.iterdir()))
    with ThreadPoolExecutor(1) as pool, httpx2.Client(base_url=server.url, timeout=60, trust_env=False) as another:
        asked = pool.submit(another.post, "/v1/completions", json={"prompt": "a"})
        eventually(lambda: len(list(descriptors.iterdir())) > before, "the connection is accepted")
        server.process.terminate()
        response = asked.result(timeout=60)
    assert response.status_code == 503
    assert server.process.wait(60) == 0


def answers(server: Server, path: str) -> bool:
    try:
        return bool(server.http.get(path).status_code == 200)
    except httpx2.TransportError:
        return False


def broken(model: Model, folder: Path, name: str) -> Model:
    """A copy of a model whose config is valid but whose weights cannot be loaded."""
    directory = folder / name
    shutil.copytree(model.path, directory)
    weights = directory / "model.safetensors"
    if name == "truncated":
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    elif name == "nonsense":
        weights.write_bytes(b"nonsense" * 1000)
    else:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**config, "hidden_size": 128}))
    return Model(name, directory, directory / "tokenizer.json")


@pytest.mark.parametrize("name", ["truncated", "nonsense", "other shapes"])
def test_a_model_that_cannot_start_ends_the_server(serve: Serve, tiny: Model, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    server = serve(broken(tiny, folder, name), healthy=False)
    below: set[int] = set()

    def ended() -> bool:
        below.update(descendants(server.pid))
        return server.process.poll() is not None

    eventually(ended, "the server exits by itself, so that a supervisor can restart it", 60)
    assert server.process.returncode == 1
    last = server.log().strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert len(last) > len("error: ") + 10
    assert not any(alive(pid) for pid in below)


def test_a_hand_that_hangs_while_it_comes_back_is_started_again(serve: Serve, tiny: Model, tmp_path: Path) -> None:
    """The second start of the interpreter sleeps: the server notices it, and the third start serves."""
    count = tmp_path / "starts"
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *forebay.worker*) echo >> {count};; esac\n'
        f"[ -f {count} ] && [ $(wc -l < {count}) = 2 ] && exec sleep 1000\n"
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    server = serve(tiny, "--hand", "torch", "--load-timeout", "40", "--python", str(python))
    server.ask("/v1/completions", {"prompt": "a", "max_tokens": 3})
    hand = server.hand()
    assert hand
    os.kill(hand, signal.SIGKILL)
    answer = server.ask("/v1/completions", {"prompt": "a", "max_tokens": 3}, timeout=300)
    assert answer["usage"]["completion_tokens"] == 3
    assert server.metric("forebay:hand_deaths_total") == 2


def test_an_architecture_that_is_not_supported_is_said_at_once(serve: Serve, tiny: Model, tmp_path: Path) -> None:
    directory = tmp_path / "models" / "other"
    shutil.copytree(tiny.path, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "architectures": ["MambaForCausalLM"]}))
    server = serve(Model("other", directory, directory / "tokenizer.json"), healthy=False)
    assert server.process.wait(60) == 1
    assert "MambaForCausalLM" in server.log()
    assert "Traceback" not in server.log()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("device", ["cpu", "deferred"])
def test_a_client_that_goes_away_frees_its_request(serve: Serve, tiny: Model, stream: bool, device: str) -> None:
    server = serve(tiny, "--device", device)
    body = {"model": tiny.name, "prompt": "a", "max_tokens": TINY_CONTEXT - 8, "n": 4, "ignore_eos": True}

    async def leave() -> None:
        async with async_client(server) as client:
            asked = asyncio.create_task(client.post("/v1/completions", json={**body, "stream": stream}))
            await eventually_async(lambda: server.metric("vllm:num_requests_running") == 4, "all choices run")
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked

    asyncio.run(leave())
    server.wait_until_idle()
    # The requests had not reached their end, so the abort is what freed them.
    assert server.metric("vllm:generation_tokens_total") < 4 * (TINY_CONTEXT - 8)
    # Pages that a step in flight uses are freed with its result.
    eventually(lambda: server.replicas()[0]["pages_held"] == 0, "the pages are free", 30)


def test_requests_that_wait_are_freed_too(serve: Serve, tiny: Model) -> None:
    server = serve(tiny, "--max-running-requests", "1")

    async def leave() -> None:
        async with async_client(server) as client:
            asked = [asyncio.create_task(client.post("/generate", json=endless())) for _ in range(5)]
            await eventually_async(lambda: server.metric("vllm:num_requests_waiting") == 4, "four requests wait")
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    asyncio.run(leave())
    server.wait_until_idle()
    assert server.metric("vllm:generation_tokens_total") < 5 * (TINY_CONTEXT - 8)
