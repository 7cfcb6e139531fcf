"""Prefill apart from decode in virtual time: the best split of 8, 64 and 256 replicas for a recorded traffic.

    python -m benchmarks.pd_plan --trace FILE

The trace is in Mooncake's format. Schedulers, roles, loans and pressure are real; devices, copies and the bus take the
time that the profile states. Nothing is measured here, so one run is enough.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import records
from benchmarks.cells import markdown, number, table_of
from benchmarks.records import Results, Run
from benchmarks.servers import FOREBAY

PROFILE = "h100-llama-3.1-8b"
SPEEDS = {8: 2.0, 64: 16.0, 256: 64.0}
"""For each number of replicas, the speed-up of the trace that loads them."""
PAGE_SIZE = 64
"""Tokens of a page: smaller ones take longer to simulate, because each copy is of one."""
PROMPTS = {8: 4000}
"""How many requests of the trace are simulated, where that is enough to load the replicas."""
GOAL = ("--slo", "ttft:2000", "--slo", "tpot:40")
BOTH = "both"
QUARTERS = (1, 2, 3)
"""The table shows the best split, and those in which so many quarters of the replicas prefill."""


def simulate(trace: Path, replicas: int, speed: float, arguments: list[str]) -> dict[str, Any]:
    """Runs `forebay plan`; returns the content of its output file."""
    with tempfile.TemporaryDirectory(prefix="forebay-plan-") as folder:
        output = Path(folder) / "plan.json"
        command = [str(FOREBAY), "plan", "--trace", str(trace), "--sim-profile", PROFILE, *GOAL, "--pd", "auto"]
        command += ["--router", "prefix-aware", "--max-replicas", str(replicas), "--speed", str(speed)]
        command += ["--page-size", str(PAGE_SIZE)]
        if replicas in PROMPTS:
            command += ["--num-prompts", str(PROMPTS[replicas])]
        ended = subprocess.run([*command, "--output-file", str(output), *arguments], check=False, text=True)
        if ended.returncode or not output.is_file():
            raise SystemExit(f"forebay plan ended with status {ended.returncode}")
        found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return found


def values(outcome: dict[str, Any]) -> dict[str, float | None]:
    """The values of an outcome that are kept."""
    kept = {
        "goodput": 100 * outcome["goodput"],
        "ttft_p50_ms": outcome["ttft_ms"]["p50"],
        "ttft_p90_ms": outcome["ttft_ms"]["p90"],
        "tpot_p90_ms": outcome["tpot_ms"]["p90"],
        "itl_p99_ms": outcome["itl_ms"]["p99"],
        "prefix_hits": 100 * outcome["prefix_hit_rate"],
        "busy": 100 * outcome["utilisation"],
    }
    if pd := outcome.get("pd"):
        kept |= {
            "second_p99_ms": pd["second_ms"]["p99"],
            "busy_prefill": 100 * pd["prefill_utilisation"],
            "busy_decode": 100 * pd["decode_utilisation"],
            "lent_tokens": pd["lent_tokens"] / outcome["completed"],
            "prefill": pd["split"]["prefill"],
        }
    return kept


def split_of(outcome: dict[str, Any]) -> str:
    """The name of an outcome's split."""
    pd = outcome.get("pd")
    return f"{pd['split']['prefill']}:{pd['split']['decode']}" if pd else BOTH


@table_of("pd_plan")
def table(found: Results) -> str:
    """For each number of replicas: the result without a split, the best split, and some others."""
    head = ["replicas, speed", "split", "goodput %", "TTFT p50 ms", "p90", "TPOT p90 ms", "ITL p99 ms"]
    head += ["2nd token p99 ms", "prefix hits %", "busy %", "lent tokens a request"]
    rows = []
    for workload in found.workloads():
        best = found.notes[workload]
        for split in found.servers(workload):
            value = {key: found.median(workload, split, key) for key in ALL}
            total = int(workload.split()[0])
            shown = {BOTH, best, *(f"{total * part // 4}:{total - total * part // 4}" for part in QUARTERS)}
            if split not in shown:
                continue
            keys = ("goodput", "ttft_p50_ms", "ttft_p90_ms", "tpot_p90_ms", "itl_p99_ms", "second_p99_ms")
            cells = [number(value[key]) for key in (*keys, "prefix_hits")]
            busy = f"{number(value['busy_prefill'])}, {number(value['busy_decode'])}"
            cells += [number(value["busy"]) if split == BOTH else busy, number(value["lent_tokens"])]
            rows.append([workload, f"**{split}**" if split == best else split, *cells])
    return markdown(head, rows)


ALL = (
    *("goodput", "ttft_p50_ms", "ttft_p90_ms", "tpot_p90_ms", "itl_p99_ms", "prefix_hits", "busy"),
    *("second_p99_ms", "busy_prefill", "busy_decode", "lent_tokens"),
)


def main() -> None:
    """Runs the command line."""
    flags = argparse.ArgumentParser(description="The best split of replicas for a recorded traffic, in virtual time.")
    flags.add_argument("--trace", type=Path, required=True, help="a traffic in Mooncake's format")
    flags.add_argument("--replicas", type=int, nargs="+", choices=list(SPEEDS), default=list(SPEEDS))
    flags.add_argument("--output", type=Path, help="the file of the results")
    flags.add_argument("arguments", nargs="*", help="further flags of `forebay plan`, after --")
    chosen = flags.parse_args()
    found = records.new("pd_plan", 0)
    for replicas in chosen.replicas:
        plan = simulate(chosen.trace, replicas, SPEEDS[replicas], chosen.arguments)
        workload = f"{replicas} at {SPEEDS[replicas]:g} times the speed"
        found.notes[workload] = "{prefill}:{decode}".format(**plan["split"])
        for outcome in plan["tried"]:
            found.runs.append(Run(workload, split_of(outcome), 1, values(outcome)))
    print(table(found))
    print(records.save(found, chosen.output))


if __name__ == "__main__":
    main()
