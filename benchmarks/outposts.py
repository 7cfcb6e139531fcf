"""The time that an outpost adds to a step: the round trip to a hand that computes nothing, here and behind an outpost.

    python -m benchmarks.outposts --rounds 5

Both hands are the same Python program. The outpost is on the loopback interface, so what is added is its relay: TLS and
the threads that copy, without a network's own time.
"""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks import compare, records
from benchmarks.records import Run
from benchmarks.servers import ROOT

ROWS = [1, 64, 256]
STEPS = 3000
PROGRAM = ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "release/examples/round_trip"
HAND = ROOT / "crates/hand/tests/fake_hand.py"


def once(rows: int) -> dict[str, dict[str, float]]:
    """Microseconds a round trip, by where the hand is."""
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


def main() -> None:
    """The command."""
    chosen = compare.parser("Time round trips to a hand here and behind an outpost.", rounds=5).parse_args()
    found = records.new("outposts", chosen.rounds)
    for number in range(1, chosen.rounds + 1):
        for rows in ROWS:
            for where, values in once(rows).items():
                compare.say(f"round {number}, {rows} rows, {where}: {values['p50_us']:.0f} us")
                found.runs.append(Run(f"{rows} rows", where, number, values))
    compare.finish(found, chosen.output)


if __name__ == "__main__":
    main()
