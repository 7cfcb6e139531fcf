"""Results: the committed files, the machine they are from, medians and ratios."""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.servers import FOREBAY, ROOT

RESULTS = ROOT / "benchmarks/results"


@dataclass
class Run:
    """One measurement."""

    workload: str
    server: str
    round: int
    values: dict[str, Any]


@dataclass
class Results:
    """All measurements of one benchmark."""

    benchmark: str
    date: str = ""
    machine: dict[str, Any] = field(default_factory=dict)
    rounds: int = 0
    """The number of rounds; 0 if nothing was timed."""
    notes: dict[str, str] = field(default_factory=dict)
    """The notes about each server."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Servers, or a workload on a server, that were left out, and why."""
    elsewhere: dict[str, str] = field(default_factory=dict)
    """The published gain of the same idea, by switch."""
    runs: list[Run] = field(default_factory=list)

    def workloads(self) -> list[str]:
        """The workloads in the order of measurement."""
        return list(dict.fromkeys(run.workload for run in self.runs))

    def servers(self, workload: str) -> list[str]:
        """The servers in the order of measurement."""
        return list(dict.fromkeys(run.server for run in self.runs if run.workload == workload))

    def by_round(self, workload: str, server: str, key: str) -> dict[int, float]:
        """The values of all rounds that have one."""
        return {
            run.round: float(run.values[key])
            for run in self.runs
            if run.workload == workload and run.server == server and run.values.get(key) is not None
        }

    def median(self, workload: str, server: str, key: str) -> float | None:
        """The median over the rounds."""
        values = self.by_round(workload, server, key)
        return statistics.median(values.values()) if values else None

    def ratio(self, workload: str, ours: str, theirs: str, key: str) -> Ratio | None:
        """The ratio of our value to theirs, over rounds that have both."""
        return paired_ratio(self.by_round(workload, ours, key), self.by_round(workload, theirs, key))


@dataclass(frozen=True)
class Ratio:
    """A ratio of two things measured in the same rounds."""

    median: float
    least: float
    most: float


def paired_ratio(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Ratio | None:
    """The ratios over rounds that have both values; within a round, both had the same conditions."""
    ratios = [ours[number] / theirs[number] for number in ours if theirs.get(number)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios)) if ratios else None


def median_of(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The median of each key over the rows that have it."""
    collected: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            collected.setdefault(key, []).append(value)
    return {key: statistics.median(values) for key, values in collected.items()}


def machine(cpuinfo: str, meminfo: str, packages: Mapping[str, str]) -> dict[str, Any]:
    """Facts about the machine for readers, which do not identify it."""
    model = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    present = set(flags[1].split()) if flags else set()
    memory = re.search(r"^MemTotal:\s*(\d+) kB$", meminfo, re.MULTILINE)
    return {
        "cpu": model[1].strip() if model else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "features": [name for name in ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16") if name in present],
        "memory_gib": round(int(memory[1]) / (1 << 20), 1) if memory else None,
        "kernel": re.split(r"[^\d.]", platform.release())[0],
        "python": platform.python_version(),
        **packages,
    }


def this_machine() -> dict[str, Any]:
    """The facts about the present machine."""
    forebay = subprocess.run([str(FOREBAY), "--version"], capture_output=True, text=True).stdout.strip()
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    packages = {"torch": version("torch"), "forebay": forebay.removeprefix("forebay "), "commit": commit}
    return machine(Path("/proc/cpuinfo").read_text(), Path("/proc/meminfo").read_text(), packages)


def new(benchmark: str, rounds: int) -> Results:
    """Empty results."""
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    return Results(benchmark=benchmark, date=now, machine=this_machine(), rounds=rounds)


def path_of(benchmark: str) -> Path:
    """The path of a benchmark's committed file."""
    return RESULTS / f"{benchmark}.json"


def save(results: Results, path: Path | None = None) -> Path:
    """Writes the file with one line per measurement, so that a rerun gives a readable diff."""
    path = path or path_of(results.benchmark)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_json(results), encoding="utf-8")
    return path


def to_json(results: Results) -> str:
    """The text of a file."""
    fields = asdict(results)
    runs = ",\n".join(f"  {json.dumps(run, ensure_ascii=False)}" for run in fields.pop("runs"))
    head = json.dumps(fields, indent=1, ensure_ascii=False).removesuffix("\n}")
    return f'{head},\n "runs": [\n{runs}\n ]\n}}\n'


def from_json(text: str) -> Results:
    """The results in the text of a file."""
    fields = json.loads(text)
    return Results(**{**fields, "runs": [Run(**run) for run in fields["runs"]]})


def read(path: Path) -> Results:
    """Reads the results in a file."""
    return from_json(path.read_text(encoding="utf-8"))


def in_turn(rounds: int, names: Sequence[str]) -> list[tuple[int, str]]:
    """All `names` once a round: A B, A B."""
    return [(number, name) for number in range(1, rounds + 1) for name in names]
