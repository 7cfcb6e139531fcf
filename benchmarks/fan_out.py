"""The engine thread's cost of a step with several ranks: sending the plan to all, and receiving and comparing results.

    python -m benchmarks.fan_out --rounds 5

The hands compute nothing. The measure is the processor time of the one thread that feeds the hands, and not the time of
the hands. So there may be more hands than processors.
"""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks import compare, records
from benchmarks.cells import markdown, number, table_of
from benchmarks.records import Results, Run
from benchmarks.servers import ROOT

ROWS = 256
STEPS = 1000
RANKS = [1, 2, 4, 8]
PROGRAM = ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "release/examples/fan_out"
HAND = ROOT / "crates/hand/tests/fake_hand.py"


def once() -> dict[int, dict[str, float]]:
    """Microseconds per step, by the number of ranks."""
    command = [PROGRAM, sys.executable, HAND, str(ROWS), str(STEPS), *map(str, RANKS)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    found = {}
    for line in lines:
        ranks, sending, taking = line.split()
        found[int(ranks)] = {"submit_us": float(sending), "collect_us": float(taking)}
    alone = sum(found[1].values())
    for ranks, values in found.items():
        both = values["submit_us"] + values["collect_us"]
        values["more_us_a_rank"] = (both - alone) / (ranks - 1) if ranks > 1 else 0.0
    return found


@table_of("fan_out")
def table(found: Results) -> str:
    """The engine thread's microseconds per step, by the number of ranks."""
    head = ["ranks", "plan to all us", "results of all us", "us a further rank"]
    keys = ("submit_us", "collect_us", "more_us_a_rank")
    rows = [
        [ranks, *(number(found.median(workload, ranks, key)) for key in keys)]
        for workload in found.workloads()
        for ranks in found.servers(workload)
    ]
    return markdown(head, rows)


def main() -> None:
    """Runs the command line."""
    chosen = compare.parser("Time how plans go to ranks.", rounds=5).parse_args()
    found = records.new("fan_out", chosen.rounds)
    for round_ in range(1, chosen.rounds + 1):
        for ranks, values in once().items():
            compare.say(f"round {round_}, {ranks} ranks: {values['more_us_a_rank']:.1f} us a further rank")
            found.runs.append(Run(f"{ROWS} rows", f"{ranks}", round_, values))
    compare.finish(found, chosen.output)


if __name__ == "__main__":
    main()
