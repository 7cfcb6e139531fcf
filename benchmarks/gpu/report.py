"""The tables of GPU measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks import tables
from benchmarks.cells import markdown, number, table_of
from benchmarks.gpu.ceilings import COPY
from benchmarks.gpu.goals import GOALS
from benchmarks.records import Results, Run


def text(found: Results) -> str:
    """The tables, and the machine below them."""
    # This lookup finds the table below; a GPU's host lacks the imports of other tables.
    return tables.render(found)


@table_of("gpu")
def table(found: Results) -> str:
    """Goals, then every part that was measured."""
    parts = [
        ("", goals(found)),
        ("The card, and the host's way to it", of_ceilings(found)),
        ("Steps of a hand alone", of_steps(found)),
        ("A server with random prompts of one length", of_server(found)),
        ("Operators alone", of_operators(found)),
    ]
    return "\n\n".join(f"{title}:\n\n{text}" if title else text for title, text in parts if text)


def goals(found: Results) -> str:
    """A row for each goal, measured or not."""
    rows = []
    for goal in GOALS:
        slower = goal.slower(found)
        value = goal.measured(found)
        reached = "-" if value is None else goal.reached(value, slower)
        scaled = [None if bound is None else bound * slower for bound in (goal.floor, goal.must, goal.aim)]
        rows.append([f"{goal.name}, {goal.unit}", *map(number, scaled), number(value), reached, goal.others or "-"])
    card = found.machine.get("gpu", "an H200")
    return markdown([f"{card}, bfloat16", "floor", "must", "aim", "measured", "reached", "others, as published"], rows)


def runs_of(found: Results, part: str) -> list[tuple[str, Run]]:
    """The runs of a part, with their cases."""
    split = [(run.workload.partition(": "), run) for run in found.runs]
    return [(case, run) for (name, _, case), run in split if name == part]


def rows_of(runs: Sequence[tuple[str, Run]], keys: Sequence[str]) -> list[list[str]]:
    """A row for each run: its case and these values."""
    return [[case, *(number(run.values.get(key)) for key in keys)] for case, run in runs]


def of_ceilings(found: Results) -> str:
    """The table of the card's limits."""
    keys = {
        "gbps": "GB/s",
        "tflops": "TFLOP/s",
        "launch_us": "launch, us of the host",
        "replay_us": "replay",
        "event_us": "event",
        "copy_us": "copy in",
    }
    rows = rows_of(runs_of(found, "ceilings"), list(keys))
    return markdown(["", *keys.values()], rows) if rows else ""


def of_steps(found: Results) -> str:
    """The table of steps, by shape."""
    keys = {
        "step_p50": "us",
        "tokens_a_second": "tokens/s",
        "host_p50": "host, us p50",
        "host_p99": "p99",
        "gap_p50": "gap, us p50",
        "gap_percent": "gaps, %",
        "kernels_us": "kernels, us",
        "idle_percent": "idle, %",
    }
    tables = []
    for shape, runs in by_shape(runs_of(found, "steps")).items():
        start = next((run.values for case, run in runs if case == "start"), None)
        rows = rows_of([(case, run) for case, run in runs if case != "start"], list(keys))
        tables.append(markdown([shape, *keys.values()], rows))
        if start is not None:
            tables.append(
                f"{shape}: weights and memory after {start['load_seconds']:.1f} s, {start['graphs']} graphs after "
                f"{start['warm_up_seconds']:.1f} s more and {max(0, start['warm_up_bytes']) >> 20} MiB, "
                f"{start['pages']} pages."
            )
    return "\n\n".join(tables)


def of_server(found: Results) -> str:
    """The table of loads by shape, and of the hand's recordings."""
    keys = {
        "request_throughput": "req/s",
        "output_throughput": "tokens/s",
        "median_ttft_ms": "TTFT, ms p50",
        "p99_ttft_ms": "p99",
        "mean_tpot_ms": "TPOT, ms",
        "p99_itl_ms": "ITL, ms p99",
        "server_cpu_us_per_token": "CPU us/token",
    }
    tables = []
    for shape, runs in by_shape(runs_of(found, "server")).items():
        loads = [(case, run) for case, run in runs if "recorded" not in case]
        tables.append(markdown([shape, *keys.values()], rows_of(loads, list(keys))))
        tables += [told(run.values) for case, run in runs if "recorded" in case]
    return "\n\n".join(tables)


def told(values: dict[str, Any]) -> str:
    """The shares of gaps in a recording, in words."""
    shares = [
        f"{number(values[key])} % with {rows}"
        for key, rows in (("gaps_1", "one row"), ("gaps_64", "33 to 64"), ("gaps_256", "129 to 256"))
        if values.get(key) is not None
    ]
    return f"Gaps before those of {values['steps']} recorded steps that only decode: {', '.join(shares) or '-'}."


def of_operators(found: Results) -> str:
    """The table of operators by shape, with the share of a copy's bandwidth."""
    copy = found.median(f"ceilings: {COPY}", "device", "gbps")
    tables = []
    for shape, runs in by_shape(runs_of(found, "operators")).items():
        rows = []
        for case, run in runs:
            share = number(100 * run.values["gbps"] / copy) if copy else "-"
            values = [number(run.values.get(key)) for key in ("us", "gbps", "tflops")]
            rows.append([case, *values[:2], share, values[2]])
        tables.append(markdown([shape, "us", "GB/s", "of a copy's, %", "TFLOP/s"], rows))
    return "\n\n".join(tables)


def by_shape(runs: Sequence[tuple[str, Run]]) -> dict[str, list[tuple[str, Run]]]:
    """The workloads by shape, in the order of measurement."""
    found: dict[str, list[tuple[str, Run]]] = {}
    for case, run in runs:
        found.setdefault(run.server, []).append((case, run))
    return found
