"""`forebay route` in front of several brains, some of which the tests kill."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.e2e.client import Json, async_client, events, openai_client, stream_events
from tests.e2e.conftest import FLAGS
from tests.e2e.families import ToolModel
from tests.e2e.models import Model
from tests.e2e.server import Server
from tests.e2e.simulated import SIM, paced, scripted
from tests.e2e.test_breakage import KILLS
from tests.e2e.test_tools import QUESTION, TOOLS, script
from tests.e2e.waiting import eventually, eventually_async

CLIENTS = 24
TOKENS = 60
KV_TOKENS = 1 << 16
STREAMS = 96
STREAM_TOKENS = 1000
WORDS = "([a-z]{2,6} ){300,}"
"""A pattern so long that no answer of these tests reaches its end."""
HEALTH = ("--health-check-interval-secs", "0.1", "--cb-failure-threshold", "100000", "--log-level", "warn")


@dataclass
class Cluster:
    """Backends that tests kill and restart at the same address, and a router in front of them."""

    folder: Path
    stack: ExitStack
    arguments: tuple[str | Path, ...]
    backends: list[Server] = field(default_factory=list)
    logs: int = 0

    def start(self, *arguments: str | Path, command: str = "serve", port: int | None = None) -> Server:
        """Starts a server, which is killed when the test ends."""
        self.logs += 1
        log = self.folder / f"{command}-{self.logs}.log"
        server = Server(*arguments, log=log, command=command, port=port)
        self.stack.callback(server.kill)
        return server

    def add(self, count: int) -> None:
        """Starts backends and waits until they are healthy."""
        started = [self.start(*self.arguments) for _ in range(count)]
        for backend in started:
            backend.wait_for_health()
        self.backends += started

    def route(self, *flags: str) -> Server:
        """Starts a router and waits until it has recognized every backend as a brain."""
        urls = ",".join(backend.url for backend in self.backends)
        router = self.start("--backends", urls, *HEALTH, *flags, command="route")
        router.wait_for_health()
        eventually(lambda: all(load["forebay"] for load in loads(router)), "the router knows all brains")
        return router

    def kill(self, index: int) -> None:
        """Kills a backend with SIGKILL, as the kernel does when memory runs out."""
        self.backends[index].kill()

    def revive(self, index: int) -> None:
        """Starts a killed backend again at its old address."""
        self.backends[index] = self.start(*self.arguments, port=self.backends[index].port)
        self.backends[index].wait_for_health()


def loads(router: Server) -> list[Json]:
    """The router's record of each backend."""
    found: list[Json] = router.http.get("/v1/loads").json()["loads"]
    return found


def is_busy(router: Server, index: int) -> bool:
    """Whether a backend has at least two requests from the router."""
    return bool(loads(router)[index]["own"] >= 2)


def cluster(folder: Path, model: Model, *flags: str) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(folder, stack, (model.path, *FLAGS, *flags))


@pytest.fixture
def simulated(tmp_path: Path, tiny: Model) -> Iterator[Cluster]:
    """Backends with a simulated device."""
    yield from cluster(tmp_path, tiny, *SIM, *paced(tmp_path, 2000, KV_TOKENS))


@pytest.fixture
def slow(tmp_path: Path, tiny: Model) -> Iterator[Cluster]:
    """Simulated backends with steps so long that streams outlive two deaths. One backend has room for all streams."""
    yield from cluster(tmp_path, tiny, *SIM, *paced(tmp_path, 10_000, 1 << 17))


@pytest.fixture
def real(tmp_path: Path, tiny: Model) -> Iterator[Cluster]:
    """Backends that compute with the PyTorch hand: the Rust hand would finish before a test can kill it."""
    yield from cluster(tmp_path, tiny, "--threads", str(tiny.threads), "--hand", "torch")


def requests(model: Model) -> list[tuple[str, Json]]:
    """Streams of every API, with state that has to survive a failover: stop strings, counts, log-probabilities."""
    ends: Json = {"ignore_eos": True, "temperature": 0}
    made: list[tuple[str, Json]] = []
    for number in range(4):
        prompt = f"Tell me about number {number}." * (number + 1)
        usage = {"stream_options": {"include_usage": True}}
        chat = {"messages": [{"role": "user", "content": prompt}], "max_tokens": TOKENS + number, **ends, **usage}
        made += [
            ("/v1/chat/completions", {"model": model.name, **chat}),
            ("/v1/chat/completions", {"model": model.name, **chat, "logprobs": True, "top_logprobs": 2}),
            ("/v1/completions", {"prompt": prompt, "max_tokens": TOKENS, "logprobs": 2, **ends}),
            ("/v1/completions", {"prompt": prompt, "max_tokens": TOKENS, "echo": True, **ends}),
            ("/v1/completions", {"prompt": prompt, "max_tokens": TOKENS, "echo": True, "logprobs": 1, **ends}),
            ("/v1/completions", {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1, **ends}),
            ("/v1/completions", {"prompt": prompt, "max_tokens": TOKENS, "stop": ["qqq", "zzz"], **ends, **usage}),
            ("/generate", {"text": prompt, "sampling_params": {"max_new_tokens": TOKENS, **ends}}),
            ("/v1/completions", {"prompt": prompt, "max_tokens": TOKENS, "guided_regex": WORDS, "temperature": 0}),
        ]
    return made


def summary(path: str, chunks: list[Json]) -> Json:
    """The content of a stream, independent of its chunk boundaries. The id must be the same in all chunks."""
    assert not any("error" in chunk for chunk in chunks), chunks[-1]
    if path == "/generate":
        last = chunks[-1]
        meta = last["meta_info"]
        assert {chunk["meta_info"]["id"] for chunk in chunks} == {meta["id"]}
        return {"text": last["text"], "ids": last["output_ids"], "finish": meta["finish_reason"]}
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    is_chat = path == "/v1/chat/completions"
    texts = [choice["delta"].get("content") or "" if is_chat else choice["text"] for choice in choices]
    logprobs: list[Any] = []
    for found in (choice.get("logprobs") for choice in choices):
        if found and is_chat:
            logprobs += found["content"]
        elif found:
            logprobs += zip(found["tokens"], found["text_offset"], found["token_logprobs"], strict=True)
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    return {
        "text": "".join(texts),
        "roles": [choice["delta"]["role"] for choice in choices if is_chat and choice["delta"].get("role")],
        "finish": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "logprobs": logprobs,
        "usage": [(usage["prompt_tokens"], usage["completion_tokens"]) for usage in usages],
    }


async def stream(client: httpx2.AsyncClient, path: str, body: Json) -> Json:
    """The summary of one stream."""
    return summary(path, [chunk async for chunk in stream_events(client, path, {**body, "stream": True})])


def test_the_openai_client_sees_no_difference(simulated: Cluster, tiny: Model) -> None:
    simulated.add(2)
    router = simulated.route()
    direct, routed = openai_client(simulated.backends[0]), openai_client(router)
    assert [model.id for model in routed.models.list()] == [model.id for model in direct.models.list()]
    options: Any = {
        "model": tiny.name,
        "messages": [{"role": "user", "content": "Hello."}],
        "max_tokens": 20,
        "extra_body": {"ignore_eos": True},
    }
    whole = routed.chat.completions.create(**options)
    assert whole.choices == direct.chat.completions.create(**options).choices
    chunks = list(routed.chat.completions.create(stream=True, **options))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    wrong = router.post("/v1/chat/completions", {"messages": 3})
    assert wrong.json() == simulated.backends[0].post("/v1/chat/completions", {"messages": 3}).json()
    assert "x-forebay-load" not in wrong.headers


@pytest.mark.parametrize("tokens_a_row", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_nobody_notices_that_backends_die(simulated: Cluster, tiny: Model, tokens_a_row: int) -> None:
    alone = simulated.start(*simulated.arguments)
    alone.wait_for_health()
    simulated.arguments += ("--sim-tokens-a-row", str(tokens_a_row))
    simulated.add(3)
    router = simulated.route("--policy", "shortest_queue")
    asked = requests(tiny)

    async def expectations() -> list[Json]:
        async with async_client(alone) as client:
            return [await stream(client, path, body) for path, body in asked]

    expected = asyncio.run(expectations())
    failures: list[str] = []
    done = [0]

    async def client_loop(client: httpx2.AsyncClient, stop: asyncio.Event, seed: int) -> None:
        draw = random.Random(seed)
        while not stop.is_set():
            index = draw.randrange(len(asked))
            path, body = asked[index]
            try:
                found = await stream(client, path, body)
            except (AssertionError, httpx2.HTTPError) as error:
                failures.append(f"{path}: {error!r}")
                continue
            if found != expected[index]:
                failures.append(f"{path}: {json.dumps(found)[:300]} is not {json.dumps(expected[index])[:300]}")
            done[0] += 1

    async def progress(of: Callable[[], int], what: str) -> None:
        before = of()
        await eventually_async(lambda: of() >= before + CLIENTS, what)

    async def run() -> None:
        stop = asyncio.Event()
        async with async_client(router) as client:
            clients = [asyncio.create_task(client_loop(client, stop, seed)) for seed in range(CLIENTS)]
            for kill in range(KILLS):
                await progress(lambda: done[0], "requests are answered")
                victim = kill % len(simulated.backends)
                await asyncio.to_thread(simulated.kill, victim)
                await progress(lambda: done[0], "requests are answered by the others")
                await asyncio.to_thread(simulated.revive, victim)
                await eventually_async(partial(is_busy, router, victim), "the restarted backend has requests again")
            stop.set()
            await asyncio.gather(*clients)

    asyncio.run(run())
    assert not failures, f"{len(failures)} of {done[0]}: {failures[:3]}"
    assert router.metric("forebay_router_failovers_total") >= KILLS
    assert router.metric("forebay_router_errors_total") == 0


def killed_in_the_middle(cluster: Cluster, router: Server, path: str, body: Json) -> list[Json]:
    """The events of a stream whose backend is killed after eight of them."""
    found = []
    with router.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        text = []
        for line in lines:
            text.append(line)
            found = [one for one in text if one.startswith("data: {")]
            if len(found) == 8:
                break
        busy = next(index for index, load in enumerate(loads(router)) if load["own"])
        cluster.kill(busy)
        text += list(lines)
    return events("\n".join(text))


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param({"temperature": 0}, marks=pytest.mark.slow),
        pytest.param({"temperature": 0.9, "seed": 7, "frequency_penalty": 0.5}, marks=pytest.mark.slow),
        {"temperature": 0.9, "seed": 7, "guided_regex": WORDS},
    ],
)
def test_the_tokens_of_a_real_model_do_not_depend_on_who_computes_them(real: Cluster, sampling: Json) -> None:
    real.add(2)
    router = real.route()
    body = {"prompt": "Once upon a time", "max_tokens": 600, "ignore_eos": True, **sampling}
    whole = real.backends[0].ask("/v1/completions", body)
    chunks = killed_in_the_middle(real, router, "/v1/completions", body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert router.metric("forebay_router_failovers_total") == 1


def test_a_stream_with_several_choices_ends_with_an_error(simulated: Cluster) -> None:
    simulated.add(2)
    router = simulated.route()
    body = {"prompt": "p", "n": 2, "max_tokens": 2000, "ignore_eos": True}
    last = killed_in_the_middle(simulated, router, "/v1/completions", body)[-1]
    assert last["error"]["code"] == "backend_failed"


def test_a_client_that_goes_away_frees_the_backend(simulated: Cluster) -> None:
    simulated.add(1)
    router = simulated.route()
    body = {"prompt": "p", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with router.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        [load] = loads(router)
        assert (load["own"], load["requests"]) == (1, 1)
        # The backend reports its load within the stream.
        eventually(lambda: loads(router)[0]["report"]["running"] == 1, "the backend has reported the request")
    simulated.backends[0].wait_until_idle()
    eventually(lambda: loads(router)[0]["requests"] == 0, "the router counts no request")


def test_a_router_hears_of_the_requests_of_others(simulated: Cluster) -> None:
    simulated.add(1)
    router = simulated.route()
    body = {"prompt": "p", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with simulated.backends[0].http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        eventually(lambda: loads(router)[0]["requests"] == 1, "the router counts the request")
        assert loads(router)[0]["own"] == 0
    eventually(lambda: loads(router)[0]["requests"] == 0, "the router no longer counts the request")


def test_prompts_go_where_their_beginnings_are(simulated: Cluster) -> None:
    simulated.add(3)
    router = simulated.route("--policy", "cache_aware")
    long = "The story of a river that wanted to be a lake. " * 12
    for story in range(3):
        for question in range(4):
            body = {"prompt": f"{story}{long} Question {question}?", "max_tokens": 4}
            router.ask("/v1/completions", body)
            eventually(lambda: any(load["blocks"] for load in loads(router)), "a backend has reported its blocks")
    cached = [backend.metric("vllm:prefix_cache_hits_total") for backend in simulated.backends]
    queries = [backend.metric("vllm:prefix_cache_queries_total") for backend in simulated.backends]
    # Every question about a story but the first finds most of its prompt in the prefix cache.
    assert sum(cached) > 0.6 * sum(queries), (cached, queries)


def test_a_request_that_kills_brains_kills_two_and_the_fleet_lives(simulated: Cluster) -> None:
    simulated.add(3)
    router = simulated.route("--policy", "shortest_queue")
    # The prompt "fatal" imitates a request that crashes brains: the test kills each brain that runs it.
    endless = {"max_tokens": 3000, "ignore_eos": True, "stream": True}
    dead: list[int] = []

    def executioner() -> None:
        while len(dead) < 3 and not over.is_set():
            for index, backend in enumerate(simulated.backends):
                if index not in dead and backend.metric("vllm:num_requests_running") > 0:
                    dead.append(index)
                    simulated.kill(index)
            over.wait(0.001)

    over = threading.Event()
    watching = threading.Thread(target=executioner)
    watching.start()
    try:
        answer = router.post("/v1/completions", {"prompt": "fatal", "max_tokens": 3000, "ignore_eos": True})
    finally:
        over.set()
        watching.join()
    assert answer.status_code == 502, answer.text
    assert answer.json()["error"]["code"] == "backend_died_twice"
    assert answer.headers["x-should-retry"] == "false"
    assert len(dead) == 2
    text = router.post("/v1/completions", {"prompt": "p", **endless, "max_tokens": 20, "return_token_ids": True}).text
    assert "error" not in text
    assert token_count(text) == 20


REPEATS = [0, *(pytest.param(repeat, marks=pytest.mark.slow) for repeat in range(1, 4))]


@pytest.mark.parametrize("repeat", REPEATS)
def test_innocent_streams_survive_two_deaths(slow: Cluster, repeat: int) -> None:
    """Requests that were in flight at both deaths run alone on the last brain, and none fails."""
    alone = slow.start(*slow.arguments)
    alone.wait_for_health()
    slow.add(3)
    router = slow.route("--policy", "shortest_queue")
    path, fixed = "/v1/completions", {"max_tokens": STREAM_TOKENS, "temperature": 0, "ignore_eos": True}
    asked: list[Json] = [{"prompt": f"Story {repeat} of number {number}.", **fixed} for number in range(STREAMS)]

    async def undisturbed() -> list[Json]:
        async with async_client(alone) as client:
            return await asyncio.gather(*(stream(client, path, body) for body in asked))

    async def disturbed() -> list[Json]:
        async with async_client(router) as client:
            streams = [asyncio.create_task(stream(client, path, body)) for body in asked]

            def all_run() -> bool:
                running = sum(load["own"] for load in loads(router))
                return running + sum(task.done() for task in streams) == STREAMS

            def all_have_gone_on() -> bool:
                metrics = router.metrics()
                trials = ("forebay_router_backend_on_trial", "forebay_router_trials_waiting")
                suspects = metrics.value("forebay_router_suspects_total")
                return suspects >= STREAMS // 3 and not any(map(metrics.value, trials)) and all_run()

            await eventually_async(all_run, "all streams run")
            await asyncio.to_thread(slow.kill, 0)
            # The router blames a death during a trial on the request on trial, so wait until all trials are over.
            await eventually_async(all_have_gone_on, "all trials are over and all streams run")
            await asyncio.to_thread(slow.kill, 1)
            return await asyncio.gather(*streams)

    async def both() -> tuple[list[Json], list[Json]]:
        return await asyncio.gather(disturbed(), undisturbed())

    found, expected = asyncio.run(both())
    assert found == expected
    assert router.metric("forebay_router_given_up_total") == 0
    # A third of the streams are suspects after the first death, and half of them after the second.
    assert router.metric("forebay_router_suspects_total") >= STREAMS * 3 // 4


def token_count(text: str) -> int:
    """The number of tokens in a stream with `return_token_ids`: under load one event has several."""
    return sum(len(choice["token_ids"] or []) for event in events(text) for choice in event["choices"])


def cached(server: Server, body: Json, key: str | None = None) -> int:
    """The number of cached tokens of a prompt of 80 tokens."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer = server.ask("/v1/completions", {"prompt": list(range(100, 180)), "max_tokens": 1, **body}, headers=headers)
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def test_salts_keep_prompts_apart(simulated: Cluster) -> None:
    simulated.add(1)
    [backend] = simulated.backends
    salts: list[Json] = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}]
    assert [cached(backend, salt) for salt in salts * 2] == [0, 0, 0, 64, 64, 64]


def test_clients_with_different_keys_find_nothing_of_each_other(simulated: Cluster) -> None:
    backend = simulated.start(*simulated.arguments, "--api-key", "one", "--api-key", "two")
    backend.wait_for_health()
    assert [cached(backend, {}, key) for key in ("one", "two", "one", "two")] == [0, 0, 64, 64]


def names(server: Server, headers: dict[str, str]) -> bytes:
    """The block hashes of a prompt, as the backend reports them to a router."""
    tag = {"x-forebay-router": "router=1;seq=1;floor=1;seed=0;blocks=1", **headers}
    answer = server.post("/v1/completions", {"prompt": list(range(100, 180)), "max_tokens": 1}, headers=tag)
    assert answer.status_code == 200
    return answer.headers.get("x-forebay-blocks", "").encode()


def test_names_of_blocks_agree_by_their_secret_alone(simulated: Cluster, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef")
    secret.chmod(0o600)
    known = ("--cache-secret-file", str(secret))
    servers = [simulated.start(*simulated.arguments, *flags) for flags in (known, known, (), ())]
    for server in servers:
        server.wait_for_health()
    found = [names(server, {}) for server in servers]
    assert all(found)
    assert found[0] == found[1]
    assert len(set(found)) == 3
    short = tmp_path / "short"
    short.write_text("too short")
    refused = simulated.start(*simulated.arguments, "--cache-secret-file", str(short))
    assert refused.process.wait(60) != 0
    assert "9 bytes are too few" in refused.log()


def test_only_a_router_with_the_key_hears_of_blocks(simulated: Cluster) -> None:
    backend = simulated.start(*simulated.arguments, "--router-key", "between-us")
    backend.wait_for_health()
    simulated.backends.append(backend)
    right = {"x-forebay-router-key": "between-us"}
    assert names(backend, {}) == names(backend, {"x-forebay-router-key": "guessed"}) == b""
    assert names(backend, right)
    assert backend.http.get("/v1/blocks?after=0").status_code == 403
    assert backend.http.get("/v1/blocks?after=0", headers=right).status_code == 200
    router = simulated.route("--router-key", "between-us")
    router.ask("/v1/completions", {"prompt": "p " * 100, "max_tokens": 2})
    eventually(lambda: loads(router)[0]["blocks"] > 0, "the router has received the blocks")


def test_wrong_words_of_a_router_are_refused(simulated: Cluster) -> None:
    simulated.add(1)
    [backend] = simulated.backends
    body = {"prompt": "p", "max_tokens": 4, "stream": True}
    tag = "router=1;seq=1;floor=1;seed=1;blocks=0"

    def param(headers: dict[str, str], **change: Any) -> str:
        response = backend.post("/v1/completions", {**body, **change}, headers=headers)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        found: str = error["param"]
        return found

    assert param({"x-forebay-router": "nonsense"}) == "x-forebay-router"
    named = {"x-forebay-router": tag, "x-forebay-stream": "5;name"}
    assert param({"x-forebay-router": tag, "x-forebay-resume": "0"}) == "x-forebay-stream"
    assert param({**named, "x-forebay-resume": "9999"}) == "x-forebay-resume"
    assert param({**named, "x-forebay-resume": "0"}, n=2) == "x-forebay-resume"
    assert param({**named, "x-forebay-resume": "0"}, stream=False) == "x-forebay-resume"
    content = json.dumps(body)
    for ids in ("1,2,3,4,", "-1,", "999999,"):
        headers = {**named, "x-forebay-resume": str(len(ids))}
        response = backend.http.post("/v1/completions", content=ids + content, headers=headers)
        assert response.json()["error"]["param"] == "x-forebay-resume", ids
    for path in ("/v1/loads?wait=x", "/v1/loads?wait=-1", "/v1/blocks?after=x"):
        assert backend.http.get(path).status_code == 400


def test_it_drains_when_it_is_told_to_stop(simulated: Cluster) -> None:
    simulated.add(1)
    router = simulated.route()
    body = {"prompt": "p", "max_tokens": 300, "ignore_eos": True, "stream": True, "return_token_ids": True}
    with router.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        first = next(lines)
        router.process.terminate()
        text = "\n".join([first, *lines])
    assert token_count(text) == 300
    assert router.process.wait(30) == 0


def test_it_ends_at_once_when_it_is_told_twice(simulated: Cluster) -> None:
    simulated.add(1)
    router = simulated.route("--drain-timeout", "3600")
    body = {"prompt": "p", "max_tokens": 300, "ignore_eos": True, "stream": True}
    with router.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        first = next(lines)
        router.process.send_signal(signal.SIGHUP)
        router.wait_for_health(503)
        router.process.terminate()
        rest = events("\n".join([first, *lines]))
    assert rest[-1]["error"]["code"] == "aborted"
    assert router.process.wait(30) == 0


def test_calls_of_tools_survive_their_brain(tmp_path: Path) -> None:
    """The second brain parses the text sent so far, so that no call starts twice and no argument is lost."""
    model = ToolModel("kimi_k2", tmp_path / "kimi_k2")
    flags = (*SIM, *paced(tmp_path, 30_000, KV_TOKENS), *scripted(tmp_path, script(model)))
    with ExitStack() as stack:
        fleet = Cluster(tmp_path, stack, (model.path, *FLAGS, *flags))
        fleet.add(2)
        router = fleet.route()
        client = openai_client(router)
        asked: Any = {"model": model.name, "messages": [{"role": "user", "content": QUESTION}], "tools": TOOLS}
        calls: list[Json] = []
        reasons, killed = [], False
        for chunk in client.chat.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                for call in choice.delta.tool_calls or []:
                    assert call.function
                    if call.id:
                        calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
                    calls[call.index]["arguments"] += call.function.arguments or ""
                reasons += [choice.finish_reason] if choice.finish_reason else []
            if calls and calls[0]["arguments"] and not killed:
                killed = True
                fleet.kill(next(index for index, load in enumerate(loads(router)) if load["own"]))
    assert killed
    assert reasons == ["tool_calls"]
    assert [call["id"] for call in calls] == ["functions.get_weather:0", "functions.get_time:1"]
    arguments = [json.loads(call["arguments"]) for call in calls]
    assert arguments == [{"city": "Zürich", "days": 2}, {"city": "Zürich"}]
