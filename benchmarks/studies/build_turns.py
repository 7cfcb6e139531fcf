"""Compares two builds of Forebay in turns: the cost of a change on the host.

    python -m benchmarks.studies.build_turns --old /elsewhere/.venv/bin/forebay --rounds 7
    python -m benchmarks.studies.build_turns --old /elsewhere/.venv/bin/forebay --model smollm2

Each build lies in the virtual environment of its checkout. The device is simulated and takes no time, so what is
measured is the brain, or the router in front of one. With `--model` it is the CPU, in a real model's steps. Each side
runs in fresh processes, old and new in turns; ratios are of two runs that followed each other. The load generator is
this checkout's for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import compare, models, records
from benchmarks.cells import markdown, number, spread
from benchmarks.cpu_model import generation, prefill
from benchmarks.host_ceiling import ANSWER, CONTEXT, PROMPT
from benchmarks.load import LOGS, Workload, load, start
from benchmarks.processes import Running, free_port
from benchmarks.records import Results
from benchmarks.servers import FOREBAY, FOREBAY_CPU, FOREBAY_SIM, Forebay, Setting

OLD, NEW = "old", "new"
ROUTER = "router"
START_SECONDS = 60.0
REQUESTS = 8192
"""Enough work for some seconds, since CPU time is counted in hundredths of a second."""
KEY = "server_cpu_us_per_token"


def workloads(streams: Sequence[int], router: int) -> list[Workload]:
    """The server at each number of streams, and the router at one."""
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


def model_workloads(model: str) -> list[Workload]:
    """A real model's decode steps with one row and with eight, and its prompts."""
    return [generation(1, model), generation(8, model), prefill(1, model)]


def sides(server: Forebay, old: Path, new: Path) -> list[Forebay]:
    """The old and the new build as servers of this kind."""
    return [replace(server, name=OLD, build=old), replace(server, name=NEW, build=new)]


def measure(side: Forebay, workload: Workload) -> dict[str, Any]:
    """Sends the load to one build, or to a router of this build in front of it. Raises ServerError."""
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
    """CPU microseconds per token, or a model's tokens per second, of both builds."""
    rows = []
    for name in found.workloads():
        streams = name.isdigit()
        key = KEY if streams or name == ROUTER else "input_throughput" if "prefill" in name else "output_throughput"
        old, new = (number(found.median(name, side, key)) for side in (OLD, NEW))
        what = f"{name} streams" if streams else name
        unit = "CPU us a token" if key == KEY else "tokens a second"
        rows.append([what, unit, old, new, spread(found.ratio(name, NEW, OLD, key))])
    return markdown(["", "unit", "old", "new", "new / old (least-most)"], rows)


def main() -> None:
    """Runs the command line."""
    flags = compare.parser("Two builds in turns.", rounds=7)
    flags.add_argument("--old", type=Path, required=True, help="the other build's binary")
    flags.add_argument("--new", type=Path, default=FOREBAY, help="[%(default)s]")
    flags.add_argument("--streams", type=compare.numbers, default=[64, 1024], metavar="N,N")
    flags.add_argument("--router", type=int, default=64, help="streams through the router; 0: none [%(default)s]")
    flags.add_argument("--model", choices=["smollm2"], help="steps of a real model in place of a simulated device")
    asked = flags.parse_args()
    found = records.new("build_turns", asked.rounds)
    models.build(force=False)
    server = FOREBAY_CPU if asked.model else FOREBAY_SIM
    builds = sides(server, asked.old.resolve(), asked.new.resolve())
    for build in builds:
        if reason := build.missing():
            raise SystemExit(reason)
    for workload in model_workloads(asked.model) if asked.model else workloads(asked.streams, asked.router):
        compare.measure_in_turn(found, workload, builds, asked.rounds, measure)
    if asked.output:
        records.save(found, asked.output)
    print(table(found))


if __name__ == "__main__":
    main()
