"""Hands on another machine, which is another process tree behind a TCP connection in these tests."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.e2e.client import stream_events
from tests.e2e.conftest import Serve
from tests.e2e.models import Model
from tests.e2e.network import Network
from tests.e2e.processes import alive, descendants, is_hand
from tests.e2e.server import BINARY, CACHE, Server, free_port
from tests.e2e.waiting import eventually

STREAMS = 12
KILLS = int(os.environ.get("FOREBAY_KILLS", "2"))
"""How often an outpost is killed under load."""
PROMPTS = [[5 + at, 9, 17, 33 + at, 65] for at in range(STREAMS)]


class Worker:
    """A running `forebay worker`. Always `kill` it."""

    def __init__(self, gate: Gate, *flags: str, address: str, number: int) -> None:
        self._log = gate.folder / f"worker-{number}.log"
        with self._log.open("wb") as file:
            self.process = subprocess.Popen(
                [BINARY, "worker", "--join", address, "--token-file", gate.token, *flags],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, "NO_COLOR": "1", "FOREBAY_CACHE": str(CACHE)},
            )

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def hands(self) -> list[int]:
        return [pid for pid in descendants(self.process.pid) if is_hand(pid)]

    def ends(self) -> int:
        """Waits until the worker ends by itself; returns the exit status."""
        return self.process.wait(30)

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.wait(30)


class Gate:
    """The address where workers join, and the workers of a test."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.token = folder / "token"
        self.address = f"127.0.0.1:{free_port()}"
        self.workers: list[Worker] = []
        self._stack = stack

    def flags(self) -> tuple[str, ...]:
        return ("--listen-hands", self.address, "--join-token-file", str(self.token))

    def worker(self, *flags: str, address: str | None = None) -> Worker:
        """Starts a worker, which joins at `address`, or else at the gate's own address."""
        eventually(self.token.is_file, "the token is made", 60)
        made = Worker(self, *flags, address=address or self.address, number=len(self.workers))
        self.workers.append(made)
        self._stack.callback(made.kill)
        return made


@pytest.fixture
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    with ExitStack() as stack:
        yield Gate(tmp_path_factory.mktemp("gate"), stack)


def body(model: Model, prompt: list[int], tokens: int) -> dict[str, Any]:
    return {
        "model": model.name,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def gone(hand: int) -> None:
    eventually(lambda: not alive(hand), "the hand has ended", 10)


async def streams(server: Server, model: Model, tokens: int) -> list[list[int]]:
    """The tokens of all prompts, as concurrent streams that must all end normally."""

    async def one(client: httpx2.AsyncClient, prompt: list[int]) -> list[int]:
        found: list[int] = []
        asked = {**body(model, prompt, tokens), "stream": True}
        async for event in stream_events(client, "/v1/completions", asked):
            for choice in event.get("choices", []):
                found += choice.get("token_ids") or []
        return found

    async with httpx2.AsyncClient(base_url=server.url, timeout=120, trust_env=False) as client:
        return await asyncio.gather(*(one(client, prompt) for prompt in PROMPTS))


async def found_after(server: Server, deaths: int, began: float) -> float:
    """Waits until the server has counted this many deaths; returns the seconds since `began`."""
    await asyncio.to_thread(server.wait_for_metric, "forebay:hand_deaths_total", lambda value: value >= deaths)
    return time.monotonic() - began


def report(what: str, found: list[float]) -> None:
    """Prints the delays after which deaths were noticed, for `pytest -rP`."""
    print(f"{what}: found after {statistics.median(found):.2f} s, at most {max(found):.2f} s")


def test_a_hand_elsewhere_gives_the_same_tokens_and_may_be_killed(serve: Serve, tiny: Model, gate: Gate) -> None:
    tokens = 1000
    wanted = asyncio.run(streams(serve(tiny), tiny, tokens))
    assert all(len(answer) == tokens for answer in wanted)
    server = serve(tiny, *gate.flags(), "--hand-restarts", "50", healthy=False)
    waiting = server.wait_for_health(503)
    assert server.hands() == []
    eventually(
        lambda: "waits for an outpost with free hands: 0/1" in server.http.get("/health").text,
        "/health names what is missing",
        20,
    )
    assert waiting.status_code == 503
    worker = gate.worker("--name", "first")
    server.wait_for_health()
    assert "outpost first" in server.log()
    assert server.hands() == []
    assert asyncio.run(streams(server, tiny, tokens)) == wanted

    found: list[float] = []
    for number in range(KILLS):
        eventually(worker.hands, "the hand runs", 20)
        server.wait_for_health()
        (hand,) = worker.hands()

        async def killed(hand: int = hand, worker: Worker = worker, number: int = number) -> list[list[int]]:
            running = asyncio.create_task(streams(server, tiny, tokens))
            await asyncio.sleep(0.05 + 0.03 * (number % 10))
            began = time.monotonic()
            # Kill the hand alone, or the whole worker.
            os.kill(hand if number % 2 else worker.process.pid, signal.SIGKILL)
            found.append(await found_after(server, number + 1, began))
            if number % 2 == 0:
                gate.worker("--name", f"again-{number}")
            return await running

        assert asyncio.run(killed()) == wanted
        assert server.metric("forebay:hand_deaths_total") == number + 1, "the hand is killed under load"
        gone(hand)
        worker = gate.workers[-1]
    report("killed", found)

    eventually(worker.hands, "the hand runs", 20)
    (hand,) = worker.hands()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(40) == 0
    gone(hand)
    assert worker.process.poll() is None, "the worker waits for the next server"
    worker.kill(signal.SIGTERM)
    assert worker.process.returncode == 0


@pytest.mark.parametrize(("fault", "at_most"), [("cut", 2), ("silence", 10)])
def test_requests_survive_the_deaths_of_a_network(
    serve: Serve, tiny: Model, gate: Gate, fault: str, at_most: float
) -> None:
    tokens = 1000
    wanted = asyncio.run(streams(serve(tiny), tiny, tokens))
    server = serve(tiny, *gate.flags(), "--hand-restarts", "100", healthy=False)
    found: list[float] = []
    with Network(int(gate.address.rpartition(":")[2])) as network:
        worker = gate.worker(address=network.address)
        for number in range(KILLS):
            server.wait_for_health()
            (hand,) = eventually(worker.hands, "the hand runs", 20)

            async def broken(number: int = number) -> list[list[int]]:
                running = asyncio.create_task(streams(server, tiny, tokens))
                await asyncio.sleep(0.05 + 0.03 * (number % 10))
                began = time.monotonic()
                (network.cut if fault == "cut" else network.silence)()
                found.append(await found_after(server, number + 1, began))
                if fault == "silence":
                    network.restore()
                return await running

            assert asyncio.run(broken()) == wanted
            gone(hand)
    report(fault, found)
    assert max(found) < at_most


def test_ranks_of_a_replica_run_on_one_worker(serve: Serve, tiny: Model, gate: Gate) -> None:
    wanted = asyncio.run(streams(serve(tiny, "--hand", "torch"), tiny, 24))
    server = serve(tiny, *gate.flags(), "--tp-size", "2", healthy=False)
    small, large = gate.worker("--name", "small"), gate.worker("--hands", "2", "--name", "large")
    server.wait_for_health()
    assert (len(small.hands()), len(large.hands())) == (0, 2)
    assert asyncio.run(streams(server, tiny, 24)) == wanted


def test_what_workers_cannot_have_is_refused(serve: Serve, tiny: Model, gate: Gate) -> None:
    for flags, words in (
        (("--device", "sim"), "--device sim"),
        (("--enable-hierarchical-cache", "--hicache-size", "1"), "a tier of host memory"),
        (("--cpu-affinity", "auto"), "--cpu-affinity"),
    ):
        refused = serve(tiny, *gate.flags(), *flags, healthy=False)
        assert refused.process.wait(60) == 1
        assert f"--listen-hands does not go with {words}" in refused.log()


def test_strangers_are_refused_with_one_line(serve: Serve, tiny: Model, gate: Gate, tmp_path: Path) -> None:
    server = serve(tiny, *gate.flags(), healthy=False)
    eventually(gate.token.is_file, "the token is made", 60)
    right = gate.token.read_text().strip()
    for text, words in (
        (right[:-1] + ("0" if right[-1] != "0" else "1"), "the token has another secret"),
        (right.replace(right.split(".")[1], "0" * 64), "another certificate than the token names"),
        ("nothing", "no token"),
    ):
        gate.token = tmp_path / "wrong"
        gate.token.write_text(text)
        worker = gate.worker()
        assert worker.ends() == 1
        assert words in worker.log().splitlines()[-1]
    assert "the token has another secret" in server.log()
    assert server.http.get("/health").status_code == 503


def test_a_token_line_is_all_that_a_worker_needs(gate: Gate, serve: Serve, tiny: Model) -> None:
    subprocess.run([BINARY, "worker", "--make-token", gate.token], check=True)
    made = gate.token.read_text()
    again = subprocess.run([BINARY, "worker", "--make-token", gate.token], capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "is there already" in again.stderr
    server = serve(tiny, *gate.flags(), healthy=False)
    gate.worker()
    server.wait_for_health()
    assert gate.token.read_text() == made
    kept = json.loads((gate.token.parent / "token.key").read_text())
    assert set(kept) == {"certificate", "key"}
    assert gate.token.read_text().startswith("fbw1.")
    assert all(path.stat().st_mode & 0o077 == 0 for path in gate.folder.glob("token*"))
