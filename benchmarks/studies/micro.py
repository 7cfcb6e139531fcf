"""The criterion microbenchmarks of the scheduler and the pages, as one table.

    make bench-micro        # runs them, then this

Criterion leaves an estimate of every benchmark below target/criterion. The table has a row for each operation and a
column for each number of running or cached items, so that growth is visible.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from benchmarks import compare, records
from benchmarks.cells import markdown, number, table_of
from benchmarks.records import Results, Run
from benchmarks.servers import ROOT


def estimates(folder: Path) -> list[Run]:
    """The newest estimate of each benchmark, in nanoseconds per element."""
    runs = []
    for file in sorted(folder.glob("**/new/benchmark.json")):
        about: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        estimate = json.loads(file.with_name("estimates.json").read_text(encoding="utf-8"))
        elements = (about["throughput"] or {}).get("Elements", 1)
        values = {"ns_per_element": estimate["median"]["point_estimate"] / elements}
        name = about["group_id"] if about["function_id"] is None else f"{about['group_id']}: {about['function_id']}"
        runs.append(Run(name, about["value_str"] or "-", 1, values))
    return runs


@table_of("micro")
def table(found: Results) -> str:
    """A row for each operation, a column for each size, and the ratio of the largest to the smallest."""
    sizes = sorted({run.server for run in found.runs if run.server.isdigit()}, key=int)
    rows = []
    for operation in found.workloads():
        costs = [found.median(operation, size, "ns_per_element") for size in sizes]
        measured = [cost for cost in costs if cost is not None]
        if measured:
            rows.append([operation, *(number(cost) for cost in costs), f"{measured[-1] / measured[0]:.2f}"])
    return markdown(["nanoseconds", *sizes, "largest / smallest"], rows)


def main() -> None:
    """Runs the command line."""
    flags = compare.parser("Collect criterion's estimates.", rounds=1)
    chosen = flags.parse_args()
    found = records.new("micro", chosen.rounds)
    found.runs = estimates(Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "criterion")
    compare.finish(found, chosen.output)


if __name__ == "__main__":
    main()
