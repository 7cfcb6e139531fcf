"""The time that an outpost adds to a step: the round trip to a hand that computes nothing, here and behind an outpost.

    python -m benchmarks.outposts --rounds 5

Both hands are the same Python program. The outpost is on the loopback interface, so only its relay adds time: TLS and
the threads that copy, without a real network.
"""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks import compare, records
from benchmarks.cells import markdown, number, table_of
from benchmarks.records import Results, Run
from benchmarks.servers import ROOT

ROWS = [1, 64, 256]
STEPS = 3000
PROGRAM = ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "release/examples/round_trip"
HAND = ROOT / "crates/hand/tests/fake_hand.py"


def once(rows: int) -> dict[str, dict[str, float]]:
    """Microseconds of a round trip, by where the hand is."""
    command = [PROGRAM, sys.executable, HAND, str(rows), str(STEPS)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    found = {}
    for line in lines:
        where, middle, late = line.split()
        found[where] = {"p50_us": float(middle), "p99_us": float(late)}
    for values in found.values():
        for key in ("p50_us", "p99_us"):
            values[f"more_{key}"] = values[key] - found["here"][key]
    return found


@table_of("outposts")
def table(found: Results) -> str:
    """Microseconds of a round trip, and the part that the relay adds."""
    head = ["plan", "hand", "p50 us", "p99 us", "more p50 us", "more p99 us"]
    keys = ("p50_us", "p99_us", "more_p50_us", "more_p99_us")
    rows = [
        [workload, where, *(number(found.median(workload, where, key)) for key in keys)]
        for workload in found.workloads()
        for where in found.servers(workload)
    ]
    return markdown(head, rows)


def main() -> None:
    """Runs the command line."""
    chosen = compare.parser("Time round trips to a hand here and behind an outpost.", rounds=5).parse_args()
    found = records.new("outposts", chosen.rounds)
    for round_ in range(1, chosen.rounds + 1):
        for rows in ROWS:
            for where, values in once(rows).items():
                compare.say(f"round {round_}, {rows} rows, {where}: {values['p50_us']:.0f} us")
                found.runs.append(Run(f"{rows} rows", where, round_, values))
    compare.finish(found, chosen.output)


if __name__ == "__main__":
    main()
