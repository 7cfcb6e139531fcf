"""The feed that the page at `/` draws: steps, waiting requests, and the states of each request."""

from __future__ import annotations

import gzip
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx2

from tests.e2e.client import Json, native_together
from tests.e2e.conftest import Serve
from tests.e2e.models import Model
from tests.e2e.server import Server
from tests.e2e.waiting import eventually

KEYS = ("--api-key", "client", "--admin-api-key", "operator")
MOST_WATCHERS = 64


@dataclass
class Feed:
    """What a client of the feed has received so far."""

    starts: list[Json] = field(default_factory=list)
    ticks: list[Json] = field(default_factory=list)
    ended: bool = False

    def steps(self, replica: int = 0) -> list[list[int]]:
        """All steps of a replica."""
        return [step for tick in self.ticks for step in tick["replicas"][replica]["steps"]]

    def requests(self) -> dict[str, Json]:
        """The last record of every request."""
        return {request["id"]: request for tick in self.ticks for request in tick["requests"]}

    def gone(self) -> list[str]:
        """The ids of the requests that have ended, in order."""
        return [name for tick in self.ticks for name in tick["ended"]]

    def until(self, fine: Callable[[Feed], bool], what: str) -> None:
        """Waits until `fine` holds for the feed."""
        eventually(lambda: fine(self), what)

    def hear(self, lines: Iterator[str]) -> None:
        """Reads events until the feed ends."""
        name = ""
        try:
            for line in lines:
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    heard = self.starts if name == "start" else self.ticks
                    heard.append(json.loads(line.removeprefix("data: ")))
            self.ended = True
        except httpx2.HTTPError:
            pass


@contextmanager
def watching(server: Server, key: str | None = None) -> Iterator[Feed]:
    """Connects a client to the feed, and waits for the first tick."""
    feed = Feed()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    client = httpx2.Client(base_url=server.url, timeout=60, trust_env=False)
    with client, client.stream("GET", "/v1/live", headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream"
        thread = threading.Thread(target=feed.hear, args=(response.iter_lines(),), daemon=True)
        thread.start()
        feed.until(lambda feed: bool(feed.ticks), "a tick arrives")
        yield feed
    thread.join(10)


def request(tokens: int, prompt: int = 40, at: int = 0) -> Json:
    ids = [(7 * at + 3 * i) % 90 + 4 for i in range(prompt)]
    return {"input_ids": ids, "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}}


def test_steps_and_requests_are_told_as_they_are(serve: Serve, tiny: Model) -> None:
    server = serve(tiny)
    with watching(server) as feed:
        [start] = feed.starts
        facts = server.http.get("/server_info").json()
        assert start["version"] == 1
        assert start["interval_ms"] == 250
        [replica] = start["replicas"]
        assert replica["pages"] > 0
        assert replica["page_size"] > 0
        assert start["model"] in json.dumps(facts)
        native_together(server, [request(20 + at, at=at) for at in range(4)])
        feed.until(lambda feed: len(feed.gone()) == 4, "all requests have ended")
        last = feed.requests()
        assert sorted(feed.gone()) == sorted(last)
        assert sorted(one["max_tokens"] for one in last.values()) == [20, 21, 22, 23]
        assert all(one["prompt"] == 40 for one in last.values())
    steps = feed.steps()
    numbers = [step[0] for step in steps]
    assert numbers == sorted(set(numbers))
    assert feed.ticks[-1]["replicas"][0]["lost"] == 0
    for _, planned_us, done_us, device_us, _, _, _, _, _, in_flight in steps:
        assert planned_us <= done_us
        assert device_us <= done_us - planned_us + 5000
        assert in_flight in (0, 1)
    assert any(step[9] == 1 for step in steps), "no step was planned while another one ran"
    # The computed positions: prompts of 40 tokens, and a row for each generated token but the first.
    assert sum(step[7] for step in steps) == 4 * 40 + sum(19 + at for at in range(4))
    assert sum(step[6] for step in steps) >= 4
    assert sum(step[5] for step in steps) == sum(19 + at for at in range(4))


def test_a_request_that_comes_and_goes_between_two_ticks_is_told(serve: Serve, tiny: Model) -> None:
    server = serve(tiny, "--device", "sim")
    with watching(server) as feed:
        server.ask("/generate", request(3))
        feed.until(lambda feed: bool(feed.gone()), "the request has ended")
        [(name, told)] = feed.requests().items()
        assert feed.gone() == [name]
        assert (told["prompt"], told["generated"], told["max_tokens"]) == (40, 3, 3)


def test_a_life_has_every_moment_once_and_in_order(serve: Serve, tiny: Model) -> None:
    server = serve(tiny, "--device", "sim", "--chunked-prefill-size", "16")
    with watching(server) as feed:
        server.ask("/generate", request(150))
        feed.until(lambda feed: bool(feed.gone()), "the request has ended")
    [name] = feed.gone()
    life = server.http.get(f"/v1/live/requests/{name}").json()
    events = life["events"]
    assert life["id"] == name
    times = [event["at_us"] for event in events]
    assert times == sorted(times)
    whats = [event["what"] for event in events]
    assert whats[:3] == ["received", "queued", "admitted"]
    assert whats.count("first_token") == 1
    assert events[-1]["what"] == "finished"
    assert events[-1]["reason"] == "length"
    assert sum(event["tokens"] for event in events if event["what"] == "prefill") == 40
    assert whats.count("prefill") >= 3
    assert 1 + sum(event["count"] for event in events if event["what"] == "tokens") == 150
    for unknown in ("99999", "x", "-1", "%00"):
        answer = server.http.get(f"/v1/live/requests/{unknown}")
        assert answer.status_code == 404
        assert answer.json()["error"]["type"] == "not_found_error"


def test_the_trace_has_every_step_on_two_rows(serve: Serve, tiny: Model) -> None:
    server = serve(tiny, "--device", "sim")
    server.ask("/generate", request(30))
    answer = server.http.get("/v1/live/trace")
    assert "attachment" in answer.headers["content-disposition"]
    events = answer.json()["traceEvents"]
    steps = [event for event in events if event["ph"] == "X" and event["name"].startswith("step ")]
    plans = [event for event in events if event["ph"] == "X" and event["name"] == "plan"]
    assert len(steps) == len(plans) == server.metric("forebay:steps_total")
    assert sum(event["args"]["tokens"] for event in steps) == 40 + 29
    assert {event["ph"] for event in events} == {"M", "X"}


def test_a_death_and_its_replay_are_seen(serve: Serve, tiny: Model) -> None:
    server = serve(tiny)
    hand = server.hand()
    assert hand
    with (
        watching(server) as feed,
        server.http.stream("POST", "/generate", json={**request(3900), "stream": True}) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        os.kill(hand, signal.SIGKILL)
        assert [line for line in lines if line][-1] == "data: [DONE]"
        feed.until(lambda feed: bool(feed.gone()), "the request has ended")
        feed.until(lambda feed: feed.ticks[-1]["replicas"][0]["respawns"] == 1, "the feed counts a respawn")
    [name] = feed.gone()
    whats = [event["what"] for event in server.http.get(f"/v1/live/requests/{name}").json()["events"]]
    assert "replayed" in whats
    assert whats.count("finished") == 1


def test_nobody_but_an_operator_watches_where_there_are_keys(serve: Serve, tiny: Model) -> None:
    server = serve(tiny, "--device", "sim", *KEYS)
    for path in ("/v1/live", "/v1/live/trace", "/v1/live/requests/1"):
        for key in (None, "client", "other"):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            assert server.http.get(path, headers=headers).status_code == 401
    with watching(server, "operator"):
        pass
    assert server.http.get("/").status_code == 200


def test_the_feed_ends_when_the_server_drains(serve: Serve, tiny: Model) -> None:
    server = serve(tiny, "--device", "sim")
    with watching(server) as feed:
        assert server.terminate() == 0
        feed.until(lambda feed: feed.ended, "the feed has ended by itself")


def test_so_many_watch_and_no_more(serve: Serve, tiny: Model) -> None:
    server = serve(tiny, "--device", "sim")
    connections = [HTTPConnection("127.0.0.1", server.port, timeout=30) for _ in range(MOST_WATCHERS)]
    for connection in connections:
        connection.request("GET", "/v1/live")
    assert all(connection.getresponse().status == 200 for connection in connections)
    refused = server.http.get("/v1/live")
    assert refused.status_code == 429
    assert refused.headers["retry-after"]
    # Clients that do not read delay no request.
    native_together(server, [request(50, at=at) for at in range(8)])
    for connection in connections:
        connection.close()
    eventually(lambda: watches(server), "a place for a client is free again")


def watches(server: Server) -> bool:
    """Whether the server accepts one more client of the feed."""
    with server.http.stream("GET", "/v1/live") as response:
        return response.status_code == 200


def test_the_page_is_there_unless_it_is_not_wanted(serve: Serve, tiny: Model) -> None:
    server = serve(tiny, "--device", "sim")
    page = server.http.get("/", headers={"Accept-Encoding": "identity"})
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert page.headers["etag"]
    names = [part for part in page.text.split('"') if part.startswith(("assets/", "./assets/"))]
    assert len(names) >= 3
    for name in names:
        answer = server.http.get(f"/{name.removeprefix('./')}")
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
    connection = HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("GET", "/", headers={"Accept-Encoding": "gzip"})
    packed = connection.getresponse()
    assert packed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(packed.read()).decode() == page.text
    assert server.http.get("/", headers={"If-None-Match": page.headers["etag"]}).status_code in (200, 304)
    assert server.http.get("/assets/nothing.js").status_code == 404
    assert server.http.post("/").status_code == 405
    head = server.http.head("/")
    assert (head.status_code, head.text) == (200, "")
    without = serve(tiny, "--device", "sim", "--no-webui")
    for path in ("/", "/assets/x.js"):
        assert without.http.get(path).status_code == 404
    with watching(without):
        pass


def test_a_router_tells_of_its_backends(serve: Serve, tiny: Model, tmp_path: Path) -> None:
    backends = [serve(tiny, "--device", "sim") for _ in range(2)]
    urls = ",".join(backend.url for backend in backends)
    router = Server(
        "--backends", urls, "--health-check-interval-secs", "0.2", log=tmp_path / "route.log", command="route"
    )
    try:
        router.wait_for_health()
        feed = Feed()
        with router.http.stream("GET", "/v1/live") as response:
            thread = threading.Thread(target=feed.hear, args=(response.iter_lines(),), daemon=True)
            thread.start()
            client = httpx2.Client(base_url=router.url, timeout=60, trust_env=False)
            with client:
                for at in range(4):
                    assert client.post("/generate", json=request(5, at=at)).status_code == 200
                assert client.get("/").text == backends[0].http.get("/").text
                assert client.post("/").status_code == 404
            feed.until(lambda feed: sent(feed) == 4, "all requests were sent")
            assert feed.starts[0]["router"] is True
            assert [backend["url"] for backend in feed.starts[0]["backends"]] == [backend.url for backend in backends]
            assert all(backend["breaker"] == "closed" for backend in feed.ticks[-1]["backends"])
            backends[1].kill()
            feed.until(lambda feed: readiness(feed) == [False, True], "one backend is not ready")
            assert router.terminate() == 0
            feed.until(lambda feed: feed.ended, "the feed has ended by itself")
        thread.join(10)
    finally:
        router.kill()


def test_a_page_of_the_router_s_may_ask_and_others_may_not(serve: Serve, tiny: Model, tmp_path: Path) -> None:
    backend = serve(tiny, "--device", "sim")
    router = Server("--backends", backend.url, log=tmp_path / "route.log", command="route")
    try:
        router.wait_for_health()
        own = f"127.0.0.1:{router.port}"
        for headers, status in (
            ({"Origin": f"http://{own}"}, 200),
            ({"Origin": "http://evil.example"}, 403),
            ({"Origin": "null"}, 403),
            # DNS rebinding: a host name of another site that resolves to this machine.
            ({"Host": "evil.example", "Origin": "http://evil.example"}, 403),
        ):
            answer = router.post("/generate", request(2), headers=headers)
            assert answer.status_code == status, headers
            assert router.http.get("/", headers=headers).status_code == status
        typeless = {"Origin": f"http://{own}", "Sec-Fetch-Site": "same-origin", "Content-Type": "text/plain"}
        assert router.http.post("/generate", content="{}", headers=typeless).status_code == 415
    finally:
        router.kill()


def sent(feed: Feed) -> int:
    """The number of requests sent to all backends."""
    return sum(backend["sent"] for backend in feed.ticks[-1]["backends"]) if feed.ticks else 0


def readiness(feed: Feed) -> list[Any]:
    return sorted(backend["ready"] for backend in feed.ticks[-1]["backends"])
