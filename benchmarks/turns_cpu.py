"""Short prompts beside long ones on the CPU: Forebay with shares of a step, without, and without a bound of gaps.

    python -m benchmarks.turns_cpu --rounds 2

The part of `benchmarks.turns` that is computed, not simulated. SmolLM2 gets 109 prompts of 100 tokens, 2 a second, and
4 of 7000.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks import compare, models, records
from benchmarks.cells import markdown, number, spread, table_of
from benchmarks.load import Workload, client_command, run_client, start
from benchmarks.processes import ServerError
from benchmarks.records import Results
from benchmarks.servers import ROOT, Forebay, Server, Setting

WORKLOAD = Workload(
    "109 prompts of 100 tokens, 2 a second, beside 4 of 7000, SmolLM2",
    Setting(model="smollm2", streams=64, context=8192, step_tokens=1024, pool=65536),
    100,
    16,
    requests=113,
    arguments=(
        *("--dataset-name", "trace", "--dataset-path", str(ROOT / "benchmarks/traces/short_beside_long.jsonl")),
        *("--use-trace-timestamps", "--output-details"),
    ),
)
STATES = {
    "both": (),
    "no step shares": ("--disable-step-shares",),
    "no bound of gaps": ("--decode-gap-ms", "off"),
    "neither": ("--disable-step-shares", "--decode-gap-ms", "off"),
}
HEAD = {
    "short_p50_ms": "short TTFT p50 ms",
    "short_p90_ms": "p90 ms",
    "long_p50_ms": "long TTFT p50 ms",
    "long_max_ms": "most ms",
    "p99_itl_ms": "gap p99 ms",
    "output_throughput": "tokens/s",
}


def measure(server: Server, workload: Workload) -> dict[str, Any]:
    """The TTFT of short prompts and of long ones, from a fresh server. Raises ServerError."""
    with start(server, workload.setting) as running, tempfile.TemporaryDirectory(prefix="forebay-bench-") as folder:
        output = Path(folder) / "run.jsonl"
        run_client(client_command(server, workload, running.url, running.pid, output))
        run = json.loads(output.read_text(encoding="utf-8").splitlines()[-1])
    if run["failed"] or run["completed"] != workload.requests:
        raise ServerError(f"{server.name}: {run['failed']} of {workload.requests} requests failed: {run['errors']}")
    return values(run, workload.input_tokens)


def values(run: dict[str, Any], short_tokens: int) -> dict[str, Any]:
    """The values of a run that are kept. A prompt of more than twice `short_tokens` is long."""
    short: list[float] = []
    long: list[float] = []
    for ttft, tokens in zip(run["ttfts"], run["input_lens"], strict=True):
        (long if tokens > 2 * short_tokens else short).append(1000 * ttft)
    return {
        "short_p50_ms": median(short),
        "short_p90_ms": quantiles(short, n=10, method="inclusive")[-1],
        "long_p50_ms": median(long),
        "long_max_ms": max(long),
        "p99_itl_ms": run["p99_itl_ms"],
        "output_throughput": run["output_throughput"],
    }


@table_of("turns_cpu")
def table(found: Results) -> str:
    """A row for each state, and the ratio of the short prompts' p90 to the state without both."""
    rows = []
    for name in found.workloads():
        for state in found.servers(name):
            cells = [number(found.median(name, state, key)) for key in HEAD]
            rows.append([state, *cells, spread(found.ratio(name, state, "neither", "short_p90_ms"))])
    return markdown(["Forebay with", *HEAD.values(), "short p90 / neither"], rows)


def main() -> None:
    """Runs the command line."""
    flags = compare.parser("Short prompts beside long ones on the CPU.", rounds=2)
    flags.add_argument("--requests", type=int, default=WORKLOAD.requests, help="the first so many of the trace")
    flags.add_argument("--only", choices=list(STATES), nargs="+", default=list(STATES), help="states to measure")
    chosen = flags.parse_args()
    found = records.new("turns_cpu", chosen.rounds)
    models.build(force=False)
    servers = [Forebay(state, "forebay-chat", flags=STATES[state], prefix_cache=True) for state in chosen.only]
    workload = WORKLOAD
    if chosen.requests != workload.requests:
        workload = replace(workload, name=f"the first {chosen.requests} of {workload.name}", requests=chosen.requests)
    compare.measure_in_turn(found, workload, servers, chosen.rounds, measure)
    compare.finish(found, chosen.output)


if __name__ == "__main__":
    main()
