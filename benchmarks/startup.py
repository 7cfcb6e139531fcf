"""From the command to the first token: SmolLM2-135M-Instruct on the CPU.

    python -m benchmarks.startup --rounds 3

Each server is started twice a round. Before the first start, the files that it reads (its packages, its program, the
weights) are evicted from the kernel's page cache. The second start finds the files that the first one has cached. The
clock runs from the start of the process. Forebay caches weights in the form that it computes with; its first start,
without that cache, is a separate entry here. *GGUF* is Forebay with the default model's own file (Q4_1), whose
weights have to be dequantized.
"""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks import compare, models, records
from benchmarks.cells import markdown, number, spread, table_of
from benchmarks.load import LOGS
from benchmarks.processes import Running, ServerError, free_port
from benchmarks.records import Results, Run
from benchmarks.servers import FOREBAY, FOREBAY_CPU, ROOT, SERVED_NAME, VENVS, Forebay, Server, Setting, chosen

SERVERS = ["forebay", "forebay-uncached", "vllm", "llama"]
SETTING = Setting(model="smollm2", streams=8)
COLD, WARM = "files on disk", "files in memory"
POLL_SECONDS = 0.02
PATIENCE_SECONDS = 600.0
FILL_SECONDS = 60.0


class Startable(Protocol):
    """The methods of a server that `measure` calls."""

    @property
    def name(self) -> str:
        """The server's name in the table."""

    @property
    def health(self) -> str:
        """The path that is answered 200 once the model is loaded."""

    def command(self, setting: Setting, port: int) -> list[str]:
        """The program and its arguments."""

    def environment(self, setting: Setting) -> dict[str, str]:
        """Environment variables to set in addition to ours."""


@dataclass(frozen=True)
class OfGguf(Forebay):
    """Forebay with the default model's GGUF file."""

    def command(self, setting: Setting, port: int) -> list[str]:
        directory = str(models.directory(setting.model))
        return ["smollm2" if word == directory else word for word in super().command(setting, port)]


GGUF: list[Server] = [
    OfGguf("forebay, GGUF", "forebay-chat"),
    OfGguf("forebay, GGUF, no weight cache", "forebay-chat", flags=("--weight-cache-gib", "0")),
]


def files(server: Server) -> Iterator[Path]:
    """The files that a server may read: its program's environment, our kernels, and the weights."""
    program = Path(server.command(SETTING, 0)[0])
    environment = next((folder for folder in program.parents if folder.parent in (ROOT, VENVS)), program.parent)
    for folder in (environment, ROOT / "python", models.MODELS):
        yield from (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def evict(paths: Iterator[Path]) -> None:
    """Asks the kernel to drop files from its page cache. Mapped pages of running processes stay."""
    os.sync()
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def fill(server: Server) -> None:
    """Starts Forebay and waits until it has cached the weights. Raises ServerError."""
    kept = models.CACHE / "packed"
    port = free_port()
    command, log = server.command(SETTING, port), LOGS / "startup-fill.log"
    began = time.time()
    with Running(command, server.environment(SETTING), port, log) as running:
        running.wait_until_ready(server.health, PATIENCE_SECONDS)
        ready = time.monotonic()
        # The name of an incomplete file begins with a dot. Reading a complete file updates its time.
        while not any(path.stat().st_mtime >= began for path in kept.glob("[!.]*")):
            if time.monotonic() > ready + FILL_SECONDS:
                raise ServerError(f"nothing is kept in {kept}: {log.read_text(encoding='utf-8')[-500:]}")
            time.sleep(POLL_SECONDS)


def measure(server: Startable) -> dict[str, Any]:
    """Seconds until the server is ready, and until its first token. Raises ServerError."""
    port = free_port()
    log = LOGS / f"startup-{server.name.replace(' ', '-').replace(',', '')}.log"
    began = time.monotonic()
    with Running(server.command(SETTING, port), server.environment(SETTING), port, log) as running:
        running.wait_until_ready(server.health, PATIENCE_SECONDS, poll_seconds=POLL_SECONDS)
        ready = time.monotonic() - began
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
        try:
            body = {"model": SERVED_NAME, "prompt": "Once upon a time", "max_tokens": 1}
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise ServerError(f"{server.name} answered {response.status}: {answer[:500]!r}")
        return {"ready_seconds": ready, "first_token_seconds": time.monotonic() - began}


@table_of("startup")
def table(found: Results) -> str:
    """Seconds from the command; ratios are of each server to the first."""
    head = ["files", "server", "ready s", "first token s", "first token / first server's"]
    keys = ("ready_seconds", "first_token_seconds")
    rows = []
    for state in found.workloads():
        first = found.servers(state)[0]
        for server in found.servers(state):
            cells = [number(found.median(state, server, key)) for key in keys]
            rows.append(
                [state.removeprefix("files "), server, *cells, spread(found.ratio(state, server, first, keys[1]))]
            )
    return markdown(head, rows)


def main() -> None:
    """Runs the command line."""
    flags = compare.parser("From the command to the first token.", rounds=3)
    compare.add_servers(flags, SERVERS)
    asked = flags.parse_args()
    if not FOREBAY.is_file():
        raise SystemExit("make build")
    servers, skipped = chosen(asked.servers)
    servers += GGUF
    found = records.new("startup", asked.rounds)
    found.skipped = dict(skipped)
    models.build(force=False)
    by_name = {server.name: server for server in servers}
    for kept in (FOREBAY_CPU, GGUF[0]):
        if kept.name in by_name:
            fill(kept)
    for round_, name in records.in_turn(asked.rounds, list(by_name)):
        for state in (COLD, WARM):
            if state == COLD:
                evict(files(by_name[name]))
            values = measure(by_name[name])
            found.runs.append(Run(workload=state, server=name, round=round_, values=values))
            compare.say(f"  round {round_} {name}, {state}: {values['first_token_seconds']:.1f} s")
    compare.finish(found, asked.output)


if __name__ == "__main__":
    main()
