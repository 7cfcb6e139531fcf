"""`forebay route`: requests that wait in one brain's queue move to another brain."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import Json
from tests.e2e.conftest import FLAGS
from tests.e2e.models import Model
from tests.e2e.server import Server
from tests.e2e.simulated import SIM, paced
from tests.e2e.test_router import KV_TOKENS, Cluster
from tests.e2e.waiting import eventually

LONG: Json = {"prompt": list(range(100, 700)), "max_tokens": 300, "ignore_eos": True}
"""Takes three seconds; while it waits, later requests queue after its prompt."""
MOVED = "forebay_router_backend_moved_total"


@pytest.fixture
def fleet(tmp_path: Path, tiny: Model) -> Iterator[Cluster]:
    """Two brains that each compute one request at a time, at 10 ms per token."""
    flags = (*SIM, *paced(tmp_path, 10_000, KV_TOKENS), "--max-running-requests", "1")
    with ExitStack() as stack:
        fleet = Cluster(tmp_path, stack, (tiny.path, *FLAGS, *flags))
        fleet.add(2)
        yield fleet


def short(number: int, stream: bool) -> Json:
    """A request whose prompt no other request has."""
    prompt = list(range(100 + 20 * number, 120 + 20 * number))
    return {"prompt": prompt, "max_tokens": 4, "temperature": 0, "stream": stream}


def answer(server: Server, body: Json) -> str:
    """The text of a completion, whole or as a stream."""
    if not body["stream"]:
        whole: Any = server.ask("/v1/completions", body)
        text: str = whole["choices"][0]["text"]
        return text
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return "".join(text_of(line) for line in lines[:-1])


def text_of(line: str) -> str:
    """The text of an event."""
    text: str = json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    return text


@pytest.mark.parametrize("flags", [(), ("--disable-queue-moves",)])
def test_who_waits_behind_long_requests_moves_to_an_idle_brain(fleet: Cluster, flags: tuple[str, ...]) -> None:
    router = fleet.route("--policy", "round_robin", *flags)
    busy, idle = fleet.backends
    with ThreadPoolExecutor(8) as pool:
        long = [pool.submit(busy.ask, "/v1/completions", LONG) for _ in range(2)]
        eventually(lambda: busy.http.get("/v1/loads").json()["waiting"] == 1, "one of the long requests waits")
        bodies = [short(number, stream=number % 2 == 0) for number in range(6)]
        asked = [pool.submit(answer, router, body) for body in bodies]
        found = [future.result() for future in asked]
        behind = long[0].done()
    assert found == [answer(idle, body) for body in bodies]
    # In turn, each brain was sent three of the six requests.
    assert router.metric(MOVED, backend=busy.url) == (0 if flags else 3)
    assert router.metric(MOVED, backend=idle.url) == 0
    assert behind == bool(flags)
