"""Made-up measurements, for tests of the code that reads measurements."""

from __future__ import annotations

from typing import Any

from benchmarks.records import Results, Run

MACHINE = {
    "cpu": "A CPU",
    "cores": 2,
    "memory_gib": 8.0,
    "kernel": "6.1",
    "python": "3.11.7",
    "torch": "2.15.0",
    "forebay": "0.1.0",
    "commit": "abc",
}


def values(throughput: float, **more: Any) -> dict[str, Any]:
    return {
        "output_throughput": throughput,
        "input_throughput": throughput,
        "mean_ttft_ms": 10.0,
        "mean_tpot_ms": 2.0,
        "mean_itl_ms": 2.0,
        "chunks_per_token": 0.5,
        "client_cpu_us_per_token": 1.0,
        "server_cpu_us_per_token": 10.0,
        "processes_us_per_token": {"brain": 2.0, "python": 8.0},
        **more,
    }


def measured(benchmark: str, runs: list[tuple[str, str, int, dict[str, Any]]]) -> Results:
    found = Results(benchmark=benchmark, date="2026-11-21", machine=MACHINE, rounds=2)
    found.runs = [Run(*run) for run in runs]
    return found
