"""The time to compute masks of 151 936 tokens: the first mask of a schema, and those of a random walk after it.

    python -m benchmarks.mask_times --rounds 5

One core, no server. Each of 60 made-up schemas over all keywords is used once; the time to its first mask includes the
compilation. Then 200 tokens are drawn at random from those that masks allow. Such texts are stranger than a model's.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

from benchmarks import compare, masks, models, records
from benchmarks.cells import markdown, number, table_of
from benchmarks.records import Results, Run
from benchmarks.servers import ROOT
from tests.e2e.schemas import made_up

SCHEMAS = 60
PROGRAM = ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "release/examples/masks"


def percentile(values: list[float], percent: int) -> float:
    """The percentile by the nearest rank."""
    ascending = sorted(values)
    return ascending[max(-(-len(ascending) * percent // 100), 1) - 1]


def once(sources: Path, seed: int) -> dict[str, float]:
    """Microseconds of one run over all schemas."""
    tokenizer = models.directory(masks.MODEL) / "tokenizer.json"
    command = [PROGRAM, tokenizer, str(masks.VOCABULARY), sources, str(seed)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    walks = [[float(time) for time in line.split()] for line in lines]
    first = [walk[0] for walk in walks]
    later = list(itertools.chain.from_iterable(walk[1:] for walk in walks))
    return {
        "masks": len(later),
        "first_p50_us": statistics.median(first),
        "first_p99_us": percentile(first, 99),
        "p50_us": statistics.median(later),
        "p99_us": percentile(later, 99),
        "max_us": max(later),
    }


@table_of("mask_times")
def table(found: Results) -> str:
    """Microseconds; the first mask includes the compilation of its schema."""
    head = ["first mask p50 us", "p99 us", "masks", "p50 us", "p99 us", "max us"]
    keys = ("first_p50_us", "first_p99_us", "masks", "p50_us", "p99_us", "max_us")
    rows = [
        [number(found.median(workload, server, key)) for key in keys]
        for workload in found.workloads()
        for server in found.servers(workload)
    ]
    return markdown(head, rows)


def main() -> None:
    """Runs the command line."""
    chosen = compare.parser("Time masks.", rounds=5).parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    masks.build()
    found = records.new("mask_times", chosen.rounds)
    found.machine["cores"] = os.cpu_count()
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder) / "schemas.json"
        sources.write_text(json.dumps(list(itertools.islice(made_up(SCHEMAS, 7), SCHEMAS))))
        for number in range(1, chosen.rounds + 1):
            values = once(sources, number)
            compare.say(f"round {number}: p50 {values['p50_us']:.1f} us, p99 {values['p99_us']:.0f} us")
            found.runs.append(Run(f"{SCHEMAS} schemas", "forebay", number, values))
    compare.finish(found, chosen.output)


if __name__ == "__main__":
    main()
