"""Two builds of Forebay in turns: what a change costs on the host.

    python -m benchmarks.studies.build_turns --old /elsewhere/.venv/bin/forebay --rounds 7

Each build lies in the virtual environment of its checkout. The device is simulated and takes no time, so what is
measured is the brain, or the router in front of one. Each side runs in fresh processes, old and new in turns; ratios
are of two runs that followed each other. The load generator is this checkout's for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import compare, models, records
from benchmarks.cells import markdown, number, spread
from benchmarks.host_ceiling import ANSWER, CONTEXT, PROMPT
from benchmarks.load import LOGS, Workload, load, start
from benchmarks.processes import Running, free_port
from benchmarks.records import Results
from benchmarks.servers import FOREBAY, FOREBAY_SIM, Forebay, Setting

OLD, NEW = "old", "new"
ROUTER = "router"
START_SECONDS = 60.0
REQUESTS = 8192
"""Work for seconds: CPU time is counted in hundredths of them."""
KEY = "server_cpu_us_per_token"


def workloads(streams: Sequence[int], router: int) -> list[Workload]:
    """The brain at each number of streams, and the router at one."""
    named = [(str(count), count) for count in streams] + [(ROUTER, router)] * bool(router)
    return [
        Workload(
            name,
            Setting(model="tiny", streams=count, context=CONTEXT, threads=1),
            PROMPT,
            ANSWER,
            requests=max(REQUESTS, 2 * count),
        )
        for name, count in named
    ]


def sides(old: Path, new: Path) -> list[Forebay]:
    """The builds, each as a server with a simulated device."""
    return [replace(FOREBAY_SIM, name=OLD, build=old), replace(FOREBAY_SIM, name=NEW, build=new)]


def measure(side: Forebay, workload: Workload) -> dict[str, Any]:
    """Loads one build, through a router of the same build where that is what is asked. Raises ServerError."""
    with start(side, workload.setting) as backend:
        if workload.name != ROUTER:
            return load(side, workload, backend)
        with _router(side.binary, backend) as router:
            return load(side, workload, router)


def _router(binary: Path, backend: Running) -> Running:
    port = free_port()
    command = [str(binary), "route", "--backends", backend.url, "--log-level", "warn", "--port", str(port)]
    return Running.ready(command, {}, port, LOGS / "build-turns-router.log", START_SECONDS)


def table(found: Results) -> str:
    """CPU microseconds of a token, old and new."""
    rows = [
        [
            f"{name} streams" if name != ROUTER else name,
            number(found.median(name, OLD, KEY)),
            number(found.median(name, NEW, KEY)),
            spread(found.ratio(name, NEW, OLD, KEY)),
        ]
        for name in found.workloads()
    ]
    return markdown(["CPU us a token", "old", "new", "new / old (least-most)"], rows)


def main() -> None:
    """The command."""
    flags = compare.parser("Two builds in turns.", rounds=7)
    flags.add_argument("--old", type=Path, required=True, help="the other build's binary")
    flags.add_argument("--new", type=Path, default=FOREBAY, help="[%(default)s]")
    flags.add_argument("--streams", type=compare.numbers, default=[64, 1024], metavar="N,N")
    flags.add_argument("--router", type=int, default=64, help="streams through the router; 0: none [%(default)s]")
    asked = flags.parse_args()
    found = records.new("build_turns", asked.rounds)
    models.build(force=False)
    builds = sides(asked.old.resolve(), asked.new.resolve())
    for build in builds:
        if reason := build.missing():
            raise SystemExit(reason)
    for workload in workloads(asked.streams, asked.router):
        compare.measure_in_turn(found, workload, builds, asked.rounds, measure)
    if asked.output:
        records.save(found, asked.output)
    print(table(found))


if __name__ == "__main__":
    main()
