"""The effect of a burst of large requests on the streams beside it: gaps between tokens, by where the burst is read.

    python -m benchmarks.intake --rounds 3

64 streams decode on a simulated device whose every step takes 5 ms, whatever is in it. Once a second 96 requests with
1.4 MB of embeddings each (as many positions as an image has in SGLang's own measurement) come at the same moment. So
only the host's work affects the gaps between the streams' tokens: parsing, base64, conversion and the copy into the
arena. On a machine with few cores, the kernel's copies of 180 MB over loopback count too, and so do the clients. One
row shows the effect of these two alone: its bursts go to a process that discards them.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import selectors
import socket
import socketserver
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from benchmarks import compare, models, records
from benchmarks.cells import markdown, number, spread, table_of
from benchmarks.load import Workload, client_command, kept, run_client, start
from benchmarks.processes import Running, ServerError
from benchmarks.records import Results
from benchmarks.servers import STEPS_OF_5_MS, Forebay, Server, Setting

STREAMS = 64
TOKENS = 1400
"""Tokens of each stream: 7 seconds."""
BURSTS = 5
EVERY_SECONDS = 1.0
REQUESTS = 96
POSITIONS = 1250
HIDDEN = 576
"""SmolLM2's hidden size: a request has 1.44 MB in bfloat16."""
PIECE = 1 << 18
PATIENCE_SECONDS = 60.0
CLIENT_NICENESS = 10
"""The niceness of the senders and of the process that discards: real clients are on other machines."""
SETTING = Setting(model="smollm2", streams=STREAMS + REQUESTS, context=2048)
WORKLOAD = Workload(f"{STREAMS} streams", SETTING, 10, TOKENS, requests=STREAMS, warmup=0)
MORE_KEPT = ("median_itl_ms", "max_itl_ms")
"""The keys that are kept beside those of `load.KEPT`."""


class Bursts(Enum):
    """The target of the large requests."""

    NOWHERE = "not sent"
    ELSEWHERE = "to a process that throws them away"
    HERE = "to the server"


@dataclass(frozen=True)
class Case(Forebay):
    """Forebay, and the load beside its streams."""

    bursts: Bursts = Bursts.HERE


CASES = [
    Case("no burst", "forebay-chat", profile=STEPS_OF_5_MS, bursts=Bursts.NOWHERE),
    Case("burst, thrown away elsewhere", "forebay-chat", profile=STEPS_OF_5_MS, bursts=Bursts.ELSEWHERE),
    Case("burst", "forebay-chat", profile=STEPS_OF_5_MS),
    Case("burst, --inline-intake", "forebay-chat", flags=("--inline-intake",), profile=STEPS_OF_5_MS),
]


def request(positions: int = POSITIONS, hidden: int = HIDDEN) -> bytes:
    """One request of the burst: head and body."""
    rows = torch.zeros(positions, hidden, dtype=torch.bfloat16)
    embeds = base64.b64encode(save({"embeds": rows})).decode()
    body = json.dumps({"prompt_embeds": embeds, "max_tokens": 1}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@dataclass
class _Sender:
    """One connection of a burst."""

    connection: socket.socket
    left: memoryview
    answer: bytearray = field(default_factory=bytearray)


def burst(port: int, content: bytes, count: int) -> list[float]:
    """Sends `count` equal requests at once from one thread; returns the seconds of each until its answer.

    Raises ServerError if one was refused.
    """
    return send_all(port, [content] * count)


def send_all(port: int, contents: Sequence[bytes]) -> list[float]:
    """Like `burst`, with requests that may differ."""
    seconds = []
    with ExitStack() as open_ones, selectors.DefaultSelector() as selector:
        for content in contents:
            connection = open_ones.enter_context(socket.create_connection(("127.0.0.1", port)))
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_WRITE, _Sender(connection, memoryview(content)))
        began = time.monotonic()
        while selector.get_map():
            ready = selector.select(PATIENCE_SECONDS)
            if not ready:
                raise ServerError(f"nothing happened to a burst for {PATIENCE_SECONDS:.0f} s")
            for key, _ in ready:
                if _move(selector, key.data):
                    seconds.append(time.monotonic() - began)
    return seconds


def _move(selector: selectors.BaseSelector, sender: _Sender) -> bool:
    """Sends or receives as much as is possible now; returns True once the answer is complete."""
    connection = sender.connection
    if sender.left:
        sender.left = sender.left[connection.send(sender.left[:PIECE]) :]
        if not sender.left:
            selector.modify(connection, selectors.EVENT_READ, sender)
        return False
    if piece := connection.recv(PIECE):
        sender.answer += piece
        return False
    selector.unregister(connection)
    connection.close()
    if not sender.answer.startswith(b"HTTP/1.1 200 "):
        raise ServerError(f"a request of the burst was answered {bytes(sender.answer[:500])!r}")
    return True


class _ThrowAway(socketserver.BaseRequestHandler):
    """A server that reads one request and answers 200."""

    def handle(self) -> None:
        """Handles one connection."""
        piece = self.request.recv(PIECE)
        head, _, body = piece.partition(b"\r\n\r\n")
        left = int(re.findall(rb"Content-Length: (\d+)", head)[0]) - len(body)
        while left > 0 and (piece := self.request.recv(PIECE)):
            left -= len(piece)
        self.request.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")


class _Elsewhere(socketserver.ThreadingTCPServer):
    request_queue_size = REQUESTS
    daemon_threads = True


def _throw_away(told: Connection) -> None:
    os.nice(CLIENT_NICENESS)
    with _Elsewhere(("127.0.0.1", 0), _ThrowAway) as server:
        told.send(server.server_address[1])
        server.serve_forever()


@contextmanager
def elsewhere() -> Iterator[int]:
    """The port of a process that reads requests and discards them."""
    spawn = get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_throw_away, args=(theirs,), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        process.kill()
        process.join()


def running_requests(port: int) -> float:
    """The number of running requests, as the server reports it."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
    try:
        connection.request("GET", "/metrics")
        found = re.search(r"^vllm:num_requests_running\S* (\S+)$", connection.getresponse().read().decode(), re.M)
    finally:
        connection.close()
    return float(found[1]) if found else 0.0


def bursts(
    running: Running, port: int, streams: Future[str], content: object, send: Callable[..., list[float]] = burst
) -> float:
    """Waits until all streams run, then sends the bursts to `port`; returns the slowest request's milliseconds.

    Raises ServerError if the streams end before the bursts do.
    """
    while running_requests(running.port) < STREAMS:
        if streams.done():
            raise ServerError(f"the streams ended before all of them ran: {streams.result()[-500:]}")
        time.sleep(0.05)
    slowest, began = 0.0, time.monotonic()
    for index in range(BURSTS):
        time.sleep(max(0.0, began + index * EVERY_SECONDS - time.monotonic()))
        slowest = max(slowest, *send(port, content, REQUESTS))
        if streams.done():
            raise ServerError(f"the streams ended in burst {index + 1} of {BURSTS}: they are too short")
    return 1e3 * slowest


def stand_back() -> None:
    """Lowers the priority of a thread that simulates clients."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), CLIENT_NICENESS)


def measure(server: Server, workload: Workload) -> dict[str, Any]:
    """Runs the streams and bursts beside them. Returns the kept keys. Raises ServerError."""
    content = request()
    where = server.bursts if isinstance(server, Case) else Bursts.HERE
    with (
        start(server, workload.setting) as running,
        elsewhere() as other_port,
        tempfile.TemporaryDirectory(prefix="forebay-bench-") as folder,
        ThreadPoolExecutor(1) as threads,
        ThreadPoolExecutor(1, initializer=stand_back) as sender,
    ):
        output = Path(folder) / "run.jsonl"
        streams = threads.submit(run_client, client_command(server, workload, running.url, running.pid, output))
        slowest = None
        if where is not Bursts.NOWHERE:
            port = running.port if where is Bursts.HERE else other_port
            slowest = sender.submit(bursts, running, port, streams, content).result()
        streams.result()
        run = json.loads(output.read_text(encoding="utf-8").splitlines()[-1])
    if run["failed"]:
        raise ServerError(f"{server.name}: {run['failed']} streams failed: {run['errors']}")
    return kept(run) | {key: run[key] for key in MORE_KEPT} | {"slowest_of_burst_ms": slowest}


@table_of("intake")
def table(found: Results) -> str:
    """Gaps between tokens with and without a burst; ratios are of each p99 to the first row's."""
    head = ["streams", "beside them", "ITL p50 ms", "p99 ms", "max ms", "p99 / no burst", "slowest of the burst ms"]
    keys = ("median_itl_ms", "p99_itl_ms", "max_itl_ms")
    rows = []
    for workload in found.workloads():
        first = found.servers(workload)[0]
        for server in found.servers(workload):
            cells = [number(found.median(workload, server, key)) for key in keys]
            cells.append(spread(found.ratio(workload, server, first, "p99_itl_ms")))
            cells.append(number(found.median(workload, server, "slowest_of_burst_ms")))
            rows.append([workload, server, *cells])
    return markdown(head, rows)


def main() -> None:
    """Runs the command line."""
    flags = compare.parser("Gaps between the tokens of streams while large requests come in.", rounds=3)
    chosen = flags.parse_args()
    found = records.new("intake", chosen.rounds)
    models.build(force=False)
    compare.measure_in_turn(found, WORKLOAD, CASES, chosen.rounds, measure)
    compare.finish(found, chosen.output)


if __name__ == "__main__":
    main()
