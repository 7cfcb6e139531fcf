"""Streams beside a burst of large requests, with their hand behind an outpost and with a hand here.

    python -m benchmarks.outpost_bursts --rounds 3

The streams and the bursts are those of `benchmarks.intake`. The hand is a process that takes 5 ms a step and computes
nothing (`benchmarks.timed_hand`), the same here and behind an outpost. The outpost is on the loopback interface and
shares the machine's cores: encrypting, decrypting and copying 138 MB a burst is done here twice.
"""

from __future__ import annotations

import subprocess
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import compare, intake, models, records, timed_hand
from benchmarks.cells import markdown, number, spread, table_of
from benchmarks.intake import Bursts
from benchmarks.load import LOGS, Workload
from benchmarks.processes import free_port
from benchmarks.records import Results
from benchmarks.servers import FOREBAY


@dataclass(frozen=True)
class Case(intake.Case):
    """Forebay with a timed hand, and the load beside its streams."""

    outpost: bool = False
    """Whether the hand is behind an outpost."""


HERE = Case("here, no burst", "forebay-chat", bursts=Bursts.NOWHERE)
CASES = [
    HERE,
    replace(HERE, name="here, burst", bursts=Bursts.HERE),
    replace(HERE, name="outpost, no burst", outpost=True),
    replace(HERE, name="outpost, burst", outpost=True, bursts=Bursts.HERE),
]


def measure(case: Case, workload: Workload) -> dict[str, Any]:
    """Like `intake.measure`, with the hand where the case puts it."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="forebay-bench-")))
        python = timed_hand.program(folder)
        flags: tuple[str, ...] = ("--hand", "torch", "--python", str(python))
        if case.outpost:
            token, address = folder / "token", f"127.0.0.1:{free_port()}"
            subprocess.run([FOREBAY, "worker", "--make-token", token], check=True)
            flags += ("--listen-hands", address, "--join-token-file", str(token))
            join = [FOREBAY, "worker", "--join", address, "--token-file", token, "--python", python]
            log = stack.enter_context((LOGS / "outpost.log").open("wb"))
            worker = subprocess.Popen(join, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            stack.callback(worker.wait)
            stack.callback(worker.terminate)
        return intake.measure(replace(case, flags=flags), workload)


@table_of("outpost_bursts")
def table(found: Results) -> str:
    """Gaps beside bursts with the hand here and behind an outpost; the last ratio compares their p99."""
    head = ["hand", "ITL p50 ms", "p99 ms", "max ms", "p99 / no burst", "p99 / here", "slowest of the burst ms"]
    keys = ("median_itl_ms", "p99_itl_ms", "max_itl_ms")
    rows = []
    for workload in found.workloads():
        for server in found.servers(workload):
            where, _, burst = server.partition(", ")
            cells = [number(found.median(workload, server, key)) for key in keys]
            bases = (f"{where}, no burst", f"here, {burst}")
            cells += [spread(found.ratio(workload, server, base, "p99_itl_ms")) for base in bases]
            rows.append([server, *cells, number(found.median(workload, server, "slowest_of_burst_ms"))])
    return markdown(head, rows)


def main() -> None:
    """Runs the command line."""
    chosen = compare.parser(
        "Gaps between the tokens of streams beside large requests, with the hand here and behind an outpost.", rounds=3
    ).parse_args()
    found = records.new("outpost_bursts", chosen.rounds)
    models.build(force=False)
    LOGS.mkdir(parents=True, exist_ok=True)
    compare.measure_in_turn(found, intake.WORKLOAD, CASES, chosen.rounds, measure)
    compare.finish(found, chosen.output)


if __name__ == "__main__":
    main()
