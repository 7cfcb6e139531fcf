"""Several models behind one address: seconds to wake one, memory of all, and streams beside a load.

    python -m benchmarks.fleet  # 5 minutes

One server has SmolLM2-135M-Instruct, Qwen2.5-Coder-0.5B-Instruct and all-MiniLM-L6-v2, the first two as the GGUF files
that their authors made. llama-server in its router mode has the first two: the same files, a process for each.

- *Wake*: a model sleeps, or is unloaded where a server has no sleep mode. The clock runs from the request that names
  the model to the first token.
- *Memory*: the sum of PSS of all processes, when every model has answered.
- *Beside a load*: eight streams of SmolLM2 run while a request has the other model loaded.
"""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import coder, compare, models, records
from benchmarks.cells import markdown, number, spread, table_of
from benchmarks.load import LOGS
from benchmarks.processes import Running, ServerError, below, free_port, processes
from benchmarks.records import Results, Run
from benchmarks.servers import FOREBAY, Llama

SMALL, LARGE, EMBEDDER = "smollm2", "coder", "minilm"
FOLDER = models.MODELS / "fleet"
CONTEXT = 2048
STREAMS = 8
THREADS = 2
TOKENS = 192
PATIENCE_SECONDS = 120.0
POLL_SECONDS = 0.02
BOUND_GB = 4.0
"""The memory that Forebay may use for weights and KV pages."""


@dataclass(frozen=True)
class Fleet:
    """A server of several models."""

    name: str
    names: tuple[str, ...]
    """The models that the server lists."""

    def command(self, port: int) -> list[str]:
        """The program and its arguments."""
        flags = ["--host", "127.0.0.1", "--port", str(port)]
        if self.name == "forebay":
            return [
                *(str(FOREBAY), "serve", "--models-config", str(FOLDER / "models.toml"), *flags),
                *("--max-running-requests", str(STREAMS), "--models-memory", str(BOUND_GB)),
                *("--threads", str(THREADS)),
                *("--log-level", "warn", "--log-interval", "0"),
            ]
        return [
            *(str(Llama("llama.cpp", "openai").binary), "--models-dir", str(FOLDER / "gguf"), *flags),
            *("--ctx-size", str(STREAMS * CONTEXT), "--parallel", str(STREAMS), "--models-max", str(len(self.names))),
            *("--threads", str(THREADS), "--threads-batch", str(THREADS), "--no-webui"),
        ]

    def rest(self, port: int, model: str) -> None:
        """Puts a model to sleep, or unloads it where the server has no sleep mode. Returns when that is done."""
        if self.name == "forebay":
            ask(port, "POST", f"/sleep?level=1&model={model}", {})
            return
        ask(port, "POST", "/models/unload", {"model": model})
        deadline = time.monotonic() + PATIENCE_SECONDS
        while state(port, model) != "unloaded":
            if time.monotonic() > deadline:
                raise ServerError(f"{self.name} does not unload {model}")
            time.sleep(POLL_SECONDS)


def state(port: int, model: str) -> str:
    """The state of a model in llama-server's list."""
    listed = ask(port, "GET", "/models", None)["data"]
    return str(next(one["status"]["value"] for one in listed if one["id"] == model))


def ask(port: int, method: str, path: str, body: dict[str, Any] | None) -> Any:
    """The JSON answer to a request. Raises ServerError."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
    try:
        sent = None if body is None else json.dumps(body)
        connection.request(method, path, sent, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise ServerError(f"{method} {path} was answered {response.status}: {text[:300]!r}")
    return json.loads(text) if text else None


def stream(port: int, model: str, tokens: int, times: list[float]) -> None:
    """Records when the tokens of a streamed answer arrive."""
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": tokens, "stream": True}
    body |= {"temperature": 0, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise ServerError(f"{model} was answered {response.status}: {response.read()[:300]!r}")
        while line := response.readline():
            if line.startswith(b"data: {"):
                times.append(time.monotonic())
    finally:
        connection.close()


def first_token(port: int, model: str) -> float:
    """Seconds from a request to its first token."""
    began, times = time.monotonic(), list[float]()
    stream(port, model, 1, times)
    return times[0] - began


def resident_gb(pid: int) -> float:
    """The sum of PSS of a process and its descendants, in GB."""
    total = 0
    for stat in below(pid, processes()):
        lines = Path(f"/proc/{stat.pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total * 1024 / 1e9


def largest_gap(port: int, *, load: bool) -> float:
    """The largest gap in milliseconds between tokens of eight streams, while a request loads the other model."""
    times: list[list[float]] = [[] for _ in range(STREAMS)]
    threads = [threading.Thread(target=stream, args=(port, SMALL, TOKENS, found)) for found in times]
    for thread in threads:
        thread.start()
    while min(map(len, times)) < TOKENS // 8:
        time.sleep(POLL_SECONDS)
    began = time.monotonic()
    if load:
        first_token(port, LARGE)
    for thread in threads:
        thread.join()
    return 1e3 * max(after - before for found in times for before, after in pairwise(found) if before >= began)


def once(fleet: Fleet) -> dict[str, Any]:
    """Runs one measurement in fresh processes. Raises ServerError."""
    port = free_port()
    log = LOGS / f"fleet-{fleet.name}.log"
    with Running.ready(fleet.command(port), {}, port, log, PATIENCE_SECONDS) as running:
        for model in fleet.names:
            if model == EMBEDDER:
                ask(port, "POST", "/v1/embeddings", {"model": model, "input": "A sentence."})
            else:
                first_token(port, model)
        found = {"resident_gb": resident_gb(running.pid)}
        for model in (SMALL, LARGE):
            fleet.rest(port, model)
            found[f"wake_{model}_s"] = first_token(port, model)
        found["gap_alone_ms"] = largest_gap(port, load=False)
        fleet.rest(port, LARGE)
        found["gap_beside_ms"] = largest_gap(port, load=True)
        return found


def prepare() -> None:
    """Writes the list of models, and the folder of GGUF files for llama-server."""
    models.build(force=False)
    coder.build()
    models.build_embedder(force=False)
    (FOLDER / "gguf").mkdir(parents=True, exist_ok=True)
    sources = {SMALL: models.default_model(), LARGE: coder.original(), EMBEDDER: models.directory(EMBEDDER)}
    context = f'flags = ["--context-length", "{CONTEXT}"]\n'
    lines = [
        f'[[models]]\nname = "{name}"\nsource = "{source}"\n{"" if name == EMBEDDER else context}'
        for name, source in sources.items()
    ]
    (FOLDER / "models.toml").write_text("\n".join(lines), encoding="utf-8")
    for name in (SMALL, LARGE):
        link = FOLDER / "gguf" / f"{name}.gguf"
        link.unlink(missing_ok=True)
        os.symlink(sources[name], link)


@table_of("fleet")
def table(found: Results) -> str:
    """Seconds to the first token of a sleeping model, memory, and gaps of streams beside a load."""
    head = ["server", f"wake {SMALL}, s", f"wake {LARGE}, s", "models", "memory, GB"]
    head += ["largest gap, ms", "beside a load, ms", "ratio"]
    rows = []
    for name in found.servers("fleet"):
        runs = [run for run in found.runs if run.server == name]
        alone, beside = ({run.round: run.values[key] for run in runs} for key in ("gap_alone_ms", "gap_beside_ms"))
        keys = (f"wake_{SMALL}_s", f"wake_{LARGE}_s")
        row = [name, *(number(found.median("fleet", name, key)) for key in keys)]
        row += [str(runs[0].values["models"]), number(found.median("fleet", name, "resident_gb"))]
        row += [number(found.median("fleet", name, key)) for key in ("gap_alone_ms", "gap_beside_ms")]
        rows.append([*row, spread(records.paired_ratio(beside, alone))])
    return markdown(head, rows)


def main() -> None:
    """Runs the command line."""
    chosen = compare.parser("Several models behind one address.", rounds=5).parse_args()
    if reason := coder.missing():
        raise SystemExit(reason)
    prepare()
    found = records.new("fleet", chosen.rounds)
    found.notes = {"Setting": f"context {CONTEXT}, {STREAMS} streams, {THREADS} threads"}
    fleets = [Fleet("forebay", (SMALL, LARGE, EMBEDDER))]
    if reason := Llama("llama.cpp", "openai").missing():
        compare.say(f"llama.cpp is left out: {reason}")
    else:
        fleets.append(Fleet("llama.cpp", (SMALL, LARGE)))
    by_name = {fleet.name: fleet for fleet in fleets}
    for turn, name in records.in_turn(chosen.rounds, list(by_name)):
        try:
            values = once(by_name[name])
        except ServerError as error:
            compare.leave_out(found, name, error)
            continue
        values["models"] = len(by_name[name].names)
        found.runs.append(Run("fleet", name, turn, values))
        compare.say(f"  round {turn} {name}: {values}")
    compare.finish(found, chosen.output)


if __name__ == "__main__":
    main()
