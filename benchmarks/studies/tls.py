"""The cost of TLS to the server: CPU time of a streamed token, plain and encrypted.

    python -m benchmarks.studies.tls --rounds 7

Encrypted connections are written by the tasks of the HTTP server (`--egress tasks`), so plain connections are measured
that way too. The difference of the two is the encryption; the rest is the gain of the direct egress. The device is
simulated and takes no time. The clients are Python's, because the load generator speaks plain HTTP only; what counts is
the CPU time of the server, as the kernel counts it.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from benchmarks import compare, models, records
from benchmarks.cells import markdown, number, spread
from benchmarks.load import LOGS, Workload
from benchmarks.processes import PROC, Running, ServerError, free_port
from benchmarks.records import Results
from benchmarks.servers import FOREBAY_SIM, ROOT, SERVED_NAME, Forebay, Setting

DATA = ROOT / "crates/http/tests/data"
DIRECT, TASKS, TLS = "direct", "tasks", "tls"
STREAMS = 16
TOKENS = 512
REQUESTS = 256
START_SECONDS = 60.0
KEY = "server_cpu_us_per_token"

SIDES = [
    replace(FOREBAY_SIM, name=DIRECT),
    replace(FOREBAY_SIM, name=TASKS, flags=("--egress", "tasks")),
    replace(
        FOREBAY_SIM,
        name=TLS,
        flags=("--ssl-certfile", str(DATA / "certificate.pem"), "--ssl-keyfile", str(DATA / "key.pem")),
    ),
]


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used."""
    fields = (PROC / str(pid) / "stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def connector(side: Forebay, port: int) -> Callable[[], http.client.HTTPConnection]:
    """A function that connects to a server, plain or with TLS."""
    if side.name != TLS:
        return lambda: http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    context = ssl.create_default_context(cafile=str(DATA / "certificate.pem"))
    return lambda: http.client.HTTPSConnection("localhost", port, timeout=60, context=context)


def client(connect: Callable[[], http.client.HTTPConnection], requests: int) -> int:
    """Streams answers one after another over one connection; returns the number of tokens. Raises ServerError."""
    body = {"model": SERVED_NAME, "prompt": "a", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    options = {"stream_options": {"include_usage": True}}
    connection, tokens = connect(), 0
    try:
        for _ in range(requests):
            connection.request(
                "POST", "/v1/completions", json.dumps(body | options), {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            text = answer.read()
            last = text.strip().split(b"\n\n")[-2:]
            if answer.status != 200 or last[-1] != b"data: [DONE]":
                raise ServerError(f"status {answer.status}: {text[-200:]!r}")
            tokens += json.loads(last[0].removeprefix(b"data: "))["usage"]["completion_tokens"]
    finally:
        connection.close()
    return tokens


def measure(side: Forebay, workload: Workload) -> dict[str, Any]:
    """Sends the load to a fresh server. Raises ServerError."""
    port, health = free_port(), free_port()
    command = [*side.command(workload.setting, port), "--health-port", str(health)]
    with Running(command, side.environment(workload.setting), health, LOGS / f"tls-{side.name}.log") as running:
        running.wait_until_ready("/health", START_SECONDS)
        connect = connector(side, port)
        each = workload.requests // STREAMS
        with ThreadPoolExecutor(STREAMS) as clients:
            list(clients.map(lambda _: client(connect, 1), range(STREAMS)))
            before, began = cpu_seconds(running.pid), time.monotonic()
            tokens = sum(clients.map(lambda _: client(connect, each), range(STREAMS)))
            used, seconds = cpu_seconds(running.pid) - before, time.monotonic() - began
    return {KEY: 1e6 * used / tokens, "output_throughput": tokens / seconds}


def table(found: Results) -> str:
    """CPU microseconds per token, with ratios to plain connections of the same tasks."""
    name = str(STREAMS)
    rows = [
        [side.name, number(found.median(name, side.name, KEY)), spread(found.ratio(name, side.name, TASKS, KEY))]
        for side in SIDES
    ]
    return markdown(["connections", "CPU us a token", "by plain tasks (least-most)"], rows)


def main() -> None:
    """Runs the command line."""
    flags = compare.parser("What TLS costs.", rounds=7)
    asked = flags.parse_args()
    found = records.new("tls", asked.rounds)
    models.build(force=False)
    setting = Setting(model="tiny", streams=STREAMS, context=1024, threads=1)
    workload = Workload(str(STREAMS), setting, 1, TOKENS, requests=REQUESTS)
    compare.measure_in_turn(found, workload, SIDES, asked.rounds, measure)
    records.save(found, asked.output)
    print(table(found))


if __name__ == "__main__":
    main()
