"""A server with a hand on a GPU under load, and what the hand recorded: gaps, and a profile for simulations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import made_up
from benchmarks.gpu.shapes import SHAPES
from benchmarks.processes import Running, free_port

START_SECONDS = 90.0
PAUSE_US = 50_000
"""A longer gap before a step counts as a pause of the clients."""
KEPT = (
    "completed",
    "failed",
    "duration",
    "request_throughput",
    "output_throughput",
    "median_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "p99_itl_ms",
    "client_cpu_us_per_token",
    "server_cpu_us_per_token",
)


@dataclass(frozen=True)
class Load:
    """Requests of `prompt` tokens with answers of `answer` tokens, `streams` at a time."""

    streams: int
    requests: int
    prompt: int = 512
    answer: int = 128

    @property
    def name(self) -> str:
        """The name in tables."""
        lengths = f"{self.prompt}/{self.answer}"
        if self.streams >= self.requests:
            return f"all {self.requests} at once, {lengths}"
        return f"{self.streams} stream{'s' * (self.streams > 1)}, {lengths}"


LOADS: dict[str, tuple[Load, ...]] = {
    "Qwen3-0.6B": (Load(1, 12), Load(64, 256), Load(256, 768), Load(500, 500)),
    "Qwen3-8B": (Load(1, 4), Load(64, 192)),
    "Qwen3-30B-A3B": (Load(1, 4), Load(64, 192)),
    "tiny": (Load(2, 4, 16, 8), Load(4, 8, 16, 8)),
}


@dataclass(frozen=True)
class Place:
    """Where a server runs."""

    binary: Path
    device: str
    folder: Path
    """The folder for the model, logs and recordings."""
    name: str = ""
    """The device's name, for profiles."""

    def flags(self) -> list[str]:
        """The server's flags for this device."""
        return ["--device", self.device, *(["--max-total-tokens", "16384"] if self.device != "cuda" else [])]


def binary() -> Path | None:
    """The server to measure; None if there is none. `scripts/gpu.py` names the binary that it unpacked."""
    found = Path(os.environ.get("FOREBAY_TEST_BINARY", Path(__file__).resolve().parents[2] / ".venv/bin/forebay"))
    return found if found.is_file() else None


def measure(
    place: Place, shape: str, late: Callable[[], bool], profiles: Path | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measures every load of a shape one by one, and its recording. Stops once `late()` is true.

    `profiles` gets the profile for `forebay sim`. Raises `ServerError`, `OSError` or `SubprocessError`.
    """
    loads = LOADS[shape]
    folder = made_up.write(place.folder / shape, SHAPES[shape])
    steps = place.folder / f"{shape}.jsonl"
    command = serve(place, folder, loads, ["--record-steps", str(steps)])
    port = int(command[command.index("--port") + 1])
    log = place.folder / f"{shape}.log"
    with Running.ready(command, {}, port, log, START_SECONDS) as running:
        for load in loads:
            if late():
                break
            yield load.name, ask(place, "openai", folder, load, running)
        tokens = kv_tokens(running)
    records = [json.loads(line) for line in steps.read_text().splitlines()]
    yield "recorded steps", {"steps": len(records), **gaps(records)}
    if profiles is not None and records:
        fit(place, shape, steps, tokens, profiles / f"{shape.lower()}.toml")


def serve(place: Place, folder: Path, loads: Sequence[Load], flags: Sequence[str]) -> list[str]:
    """The command of a server with room for these loads."""
    rows = min(512, max(load.streams for load in loads))
    context = max(load.prompt + load.answer for load in loads) + 64
    return [
        *(str(place.binary), "serve", str(folder), "--served-model-name", "model", "--load-format", "dummy"),
        *("--port", str(free_port()), "--python", sys.executable, "--dtype", "bfloat16", *place.flags()),
        *("--context-length", str(context), "--max-running-requests", str(rows), "--max-queued-requests", "4096"),
        *("--disable-radix-cache", "--log-level", "warn", "--log-interval", "0"),
        # The server ends with the benchmark in any case, and frees the GPU's memory.
        *("--parent", str(os.getpid())),
        *flags,
    ]


def ask(place: Place, backend: str, folder: Path, load: Load, running: Running) -> dict[str, Any]:
    """Runs a load against a running server, with Forebay's load generator."""
    output = place.folder / "run.jsonl"
    output.unlink(missing_ok=True)
    command = [
        *(str(place.binary), "bench", "serve", "--backend", backend, "--base-url", running.url, "--model", "model"),
        *("--tokenizer", str(folder / "tokenizer.json"), "--dataset-name", "random-ids", "--random-range-ratio", "1"),
        *("--random-input-len", str(load.prompt), "--random-output-len", str(load.answer)),
        *("--num-prompts", str(load.requests), "--max-concurrency", str(load.streams), "--warmup-requests", "4"),
        *("--server-pid", str(running.pid), "--output-file", str(output), "--no-progress"),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    run = json.loads(output.read_text().splitlines()[-1])
    return {key: run[key] for key in KEPT}


def gaps(records: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Gaps as a percentage of the time of decode steps and their gaps, by rows; None without such steps."""

    def percent(least: int, most: int) -> float | None:
        steps = [
            step
            for step in records
            if not step["prefill_tokens"] and least <= step["rows"] <= most and step["gap_us"] < PAUSE_US
        ]
        between, times = (sum(step[key] for step in steps) for key in ("gap_us", "device_us"))
        return 100 * between / (between + times) if between + times else None

    return {"gaps_1": percent(1, 1), "gaps_64": percent(33, 64), "gaps_256": percent(129, 256)}


def kv_tokens(running: Running) -> int:
    """The positions of a server's KV pool."""
    with urllib.request.urlopen(f"{running.url}/server_info", timeout=10) as answer:
        facts = json.load(answer)["facts"]
    return int(facts["page_size"] * facts["page_count"])


def fit(place: Place, shape: str, steps: Path, tokens: int, to: Path) -> None:
    """Fits a profile to a recording of a server with this many KV tokens."""
    to.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [
            *(str(place.binary), "sim", "fit", str(steps), "--output", str(to)),
            *("--device-name", place.name or place.device, "--model", f"{shape}, bfloat16", "--kv-tokens", str(tokens)),
        ],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
