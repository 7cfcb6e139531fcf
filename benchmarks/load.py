"""One measurement: starts a fresh server, runs `forebay bench serve` against it, and returns the results."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import models
from benchmarks.processes import Running, ServerError, free_port
from benchmarks.servers import FOREBAY, ROOT, SERVED_NAME, Server, Setting, Target

LOGS = ROOT / "benchmarks/.logs"
RUN_SECONDS = 3600.0
SEED = 42

KEPT = (
    "completed",
    "failed",
    "duration",
    "total_output_tokens",
    "output_throughput",
    "input_throughput",
    "mean_ttft_ms",
    "median_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "mean_itl_ms",
    "p99_itl_ms",
    "chunks_per_token",
    "client_cpu_us_per_token",
    "server_cpu_us_per_token",
)
"""The keys of `forebay bench serve --output-file` that the committed results keep."""


@dataclass(frozen=True)
class Workload:
    """The requests that are sent. Prompts are random words, and answers run to their full length."""

    name: str
    setting: Setting
    input_tokens: int
    """Tokens of a prompt's text; a chat template comes on top."""
    output_tokens: int
    requests: int
    warmup: int = 16
    arguments: tuple[str, ...] = ()
    """Further flags of `forebay bench serve`."""


def client_command(server: Target, workload: Workload, url: str, pid: int, output: Path) -> list[str]:
    """The load generator and its arguments."""
    dataset = (
        ()
        if "--dataset-name" in workload.arguments
        else (
            *("--dataset-name", "random", "--random-range-ratio", "1"),
            *("--random-input-len", str(workload.input_tokens), "--random-output-len", str(workload.output_tokens)),
        )
    )
    return [
        *(str(FOREBAY), "bench", "serve", "--backend", server.backend, "--base-url", url),
        *("--model", SERVED_NAME, "--tokenizer", str(models.tokenizer_file(workload.setting.model))),
        *dataset,
        *("--num-prompts", str(workload.requests), "--max-concurrency", str(workload.setting.streams)),
        *("--warmup-requests", str(workload.warmup), "--seed", str(SEED), "--no-progress"),
        *("--server-pid", str(pid), "--output-file", str(output)),
        *workload.arguments,
    ]


def measure(server: Server, workload: Workload) -> dict[str, Any]:
    """Starts the server, runs the workload against it, and stops it. Returns the kept keys. Raises ServerError."""
    with start(server, workload.setting) as running:
        return load(server, workload, running)


def start(server: Server, setting: Setting) -> Running:
    """Starts a server and waits until it is ready. Raises ServerError."""
    port = free_port()
    log = LOGS / f"{server.name.replace(' ', '-').replace(',', '')}.log"
    command, environment = server.command(setting, port), server.environment(setting)
    try:
        return Running.ready(command, environment, port, log, server.start_seconds, server.health)
    except ServerError as error:
        raise ServerError(f"{server.name} {error}") from error


def load(server: Target, workload: Workload, running: Running) -> dict[str, Any]:
    """Runs the workload once against a running server."""
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as folder:
        output = Path(folder) / "run.jsonl"
        run_client(client_command(server, workload, running.url, running.pid, output))
        run = json.loads(output.read_text(encoding="utf-8").splitlines()[-1])
    if run["failed"] or run["completed"] != workload.requests:
        raise ServerError(f"{server.name}: {run['failed']} of {workload.requests} requests failed: {run['errors']}")
    return kept(run)


def run_client(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Runs a load generator; returns its output. Raises ServerError."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS)
    if done.returncode:
        raise ServerError(f"{' '.join(command[:3])} failed with status {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def kept(run: Mapping[str, Any]) -> dict[str, Any]:
    """The kept keys of a run, and the CPU microseconds of each kind of process for each output token."""
    tokens = max(run["total_output_tokens"], 1)
    return {key: run[key] for key in KEPT} | {
        "requests": run["num_prompts"],
        "server_user_us_per_token": sum(one["user_seconds"] for one in run["server_cpu"] or []) * 1e6 / tokens,
        "server_kernel_us_per_token": sum(one["system_seconds"] for one in run["server_cpu"] or []) * 1e6 / tokens,
        "processes_us_per_token": by_name(run["server_cpu"] or [], tokens),
    }


def by_name(server_cpu: Sequence[Mapping[str, Any]], tokens: int) -> dict[str, float]:
    """CPU microseconds per token by process name, largest first; values below 0.05 are left out."""
    sums: dict[str, float] = {}
    for process in server_cpu:
        seconds = process["user_seconds"] + process["system_seconds"]
        sums[process["name"]] = sums.get(process["name"], 0.0) + seconds * 1e6 / tokens
    ordered = sorted(sums.items(), key=lambda item: -item[1])
    return {name: round(value, 2) for name, value in ordered if value >= 0.05}
