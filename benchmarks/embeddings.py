"""Latency of embeddings at rising rates: Poisson arrivals of 500-token texts, all-MiniLM-L6-v2.

    python -m benchmarks.embeddings --servers forebay-sim,forebay,vllm --rates 1,2,4

The simulated device takes no time, so it leaves only the host's work: parsing, tokenising, scheduling, and writing the
vectors. The rates of a server rise from the lowest to the first that it cannot sustain: its median latency is above a
second, or a request fails. A rate counts only if the load generator kept its schedule.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import compare, models, records
from benchmarks.cells import markdown, number, table_of
from benchmarks.load import SEED, run_client, start
from benchmarks.processes import Running, ServerError
from benchmarks.records import Results, Run
from benchmarks.servers import FOREBAY, SERVED_NAME, Forebay, Server, Setting
from benchmarks.servers import chosen as choose

SERVERS = ["forebay-sim", "forebay-sim-inline", "forebay", "vllm"]
RATES = [1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32]
SIM_RATES = [100, 300, 600, 800, 1000, 1200, 1400, 1600, 2000]
"""Rates for the simulated device, far beyond those of real arithmetic."""
INPUT = 500
SECONDS = 10
"""Seconds for which each rate lasts."""
TOO_SLOW_MS = 1000.0
SETTING = Setting(model=models.EMBEDDER, streams=256, context=512, step_tokens=2048, dtype="float32", pooling=True)

KEPT = (
    "completed",
    "failed",
    "duration",
    "input_throughput",
    "request_throughput",
    "median_e2e_latency_ms",
    "p90_e2e_latency_ms",
    "p99_e2e_latency_ms",
    "late_sends",
    "max_lateness_ms",
)
"""The keys of `forebay bench serve --output-file` that the results keep."""


def client_command(server: Server, rate: float, seconds: float, url: str, pid: int, output: Path) -> list[str]:
    """The load generator and its arguments."""
    return [
        *(str(FOREBAY), "bench", "serve", "--backend", "openai-embeddings", "--base-url", url),
        *("--model", SERVED_NAME, "--tokenizer", str(models.tokenizer_file(SETTING.model))),
        *("--dataset-name", "random", "--random-range-ratio", "1"),
        *("--random-input-len", str(INPUT), "--random-output-len", "1"),
        *("--num-prompts", str(max(10, round(rate * seconds))), "--request-rate", str(rate)),
        *("--warmup-requests", "4", "--seed", str(SEED), "--no-progress"),
        *("--server-pid", str(pid), "--output-file", str(output)),
    ]


def measure(server: Server, rate: float, seconds: float, running: Running) -> dict[str, Any]:
    """Sends requests to a running server at one rate. Returns the kept keys. Raises ServerError."""
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as folder:
        output = Path(folder) / "run.jsonl"
        run_client(client_command(server, rate, seconds, running.url, running.pid, output))
        run = json.loads(output.read_text(encoding="utf-8").splitlines()[-1])
    if run["failed"]:
        raise ServerError(f"{server.name}: {run['failed']} requests failed: {run['errors']}")
    return {key: run[key] for key in KEPT}


def climb(found: Results, server: Server, rates: Sequence[float], seconds: float, turn: int) -> None:
    """Adds a measurement of each rate that the server sustains to `found`."""
    with start(server, SETTING) as running:
        for rate in rates:
            values = measure(server, rate, seconds, running)
            found.runs.append(Run(f"{rate}/s", server.name, turn, values))
            shown = " ".join(f"{key.split('_')[0]} {values[key]:.1f}" for key in KEPT[5:8])
            compare.say(f"  round {turn} {rate}/s: {server.name}: {shown} ms, {values['late_sends']} sent late")
            if values["median_e2e_latency_ms"] > TOO_SLOW_MS:
                return


@table_of("embeddings")
def table(found: Results) -> str:
    """Latency by rate; a rate at which the load generator was late does not count."""
    head = ["rate", "server", "inputs/s", "P50 ms", "P90 ms", "P99 ms", "sent late"]
    keys = ("request_throughput", "median_e2e_latency_ms", "p90_e2e_latency_ms", "p99_e2e_latency_ms", "late_sends")
    rows = [
        [workload, server, *(number(found.median(workload, server, key)) for key in keys)]
        for workload in found.workloads()
        for server in found.servers(workload)
    ]
    return markdown(head, rows)


def main() -> None:
    """Runs the command line."""
    flags = compare.parser("Embeddings at rising rates.", rounds=1)
    compare.add_servers(flags, SERVERS)
    flags.add_argument("--rates", type=compare.numbers, metavar="N,N", help="requests a second, of every server")
    flags.add_argument("--seconds", type=float, default=SECONDS, help="how long each rate is kept up [%(default)s]")
    chosen = flags.parse_args()
    found = records.new("embeddings", chosen.rounds)
    models.build_embedder(force=False)
    installed, found.skipped = choose(chosen.servers)
    found.notes = {server.name: server.note for server in installed if server.note}
    for name, reason in found.skipped.items():
        compare.say(f"{name} is left out: {reason}")
    servers = {server.name: server for server in installed}
    for turn, name in records.in_turn(chosen.rounds, list(servers)):
        server = servers[name]
        simulated = isinstance(server, Forebay) and server.profile is not None
        rates = chosen.rates or (SIM_RATES if simulated else RATES)
        try:
            climb(found, server, rates, chosen.seconds, turn)
        except ServerError as error:
            compare.leave_out(found, f"{name}, round {turn}", error)
    compare.finish(found, chosen.output)


if __name__ == "__main__":
    main()
