"""A run of all parts on a GPU continues after any failure, and its results include all parts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import records
from benchmarks.gpu import steps, sweep, trace
from benchmarks.gpu.steps import Kernel
from benchmarks.gpu.visit import MOST_LOG, VISITS, Outcome, Part, join, visit
from benchmarks.processes import processes
from benchmarks.records import Results, Run
from forebay.gpu.choose import VARIABLE
from tests.structure.repository import ROOT

CHILD = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)"
HANGS = "import time; time.sleep(600)  # forebay-visit-test"


def part(name: str, code: str, seconds: float = 60, **more: object) -> Part:
    return Part(name, seconds, ["-c", code], **more)  # type: ignore[arg-type]


def visited(folder: Path, *parts: Part, seconds: float = 100) -> dict[str, Outcome]:
    said: list[str] = []
    outcomes = visit(parts, folder, seconds, said.append)
    assert said == [str(outcome) for outcome in outcomes if outcome.how != "not begun"]
    return {outcome.name: outcome for outcome in outcomes}


def test_a_part_that_fails_costs_no_other_one(tmp_path: Path) -> None:
    found = visited(
        tmp_path,
        part("crashes", "import os; print('the cause', flush=True); os.abort()"),
        part("raises", "raise SystemExit(3)"),
        part("prints", "print('x' * (3 << 20)); print('the end')"),
        part("explains", "print('the twins are right')", after_failure_of="crashes"),
        part("spares", "raise SystemExit(1)", after_failure_of="prints"),
        part("works", "print('12 passed')"),
    )
    assert [(outcome.name, outcome.how) for outcome in found.values()] == [
        ("crashes", "signal 6"),
        ("raises", "status 3"),
        ("prints", "ok"),
        ("explains", "ok"),
        ("works", "ok"),
    ]
    assert found["crashes"].last == "the cause"
    assert found["raises"].last == "printed nothing"
    assert found["prints"].last == "the end"
    assert found["works"].last == "12 passed"
    assert (tmp_path / "prints.log").stat().st_size < MOST_LOG + 100


def test_a_part_that_hangs_ends_at_its_limit_with_all_that_it_started(tmp_path: Path) -> None:
    code = f"{CHILD.format(child=HANGS)}\nprint('begun', flush=True)\n{HANGS}"
    found = visited(tmp_path, part("hangs", code, seconds=3), part("works", "print('fine')"))
    assert [outcome.how for outcome in found.values()] == ["out of time", "ok"]
    assert found["hangs"].last == "begun"
    lines = [Path(f"/proc/{pid}/cmdline") for pid in processes() if pid != os.getpid()]
    assert not [line for line in lines if line.is_file() and b"forebay-visit-test" in line.read_bytes()]


def test_nothing_is_begun_without_time(tmp_path: Path) -> None:
    assert visited(tmp_path, part("late", "print(1)"), seconds=1)["late"].how == "not begun"


def test_results_are_those_of_all_parts(tmp_path: Path) -> None:
    parts = [part(name, "") for name in ("one", "two", "none")]
    assert join(tmp_path, parts) is None
    for name, values in (("one", ["ceilings: a", "steps: b"]), ("two", ["ceilings: a", "server: c"])):
        runs = [Run(workload, "device", 1, {"part": name}) for workload in values]
        records.save(Results("gpu", rounds=1, skipped={f"rest of {name}": "why"}, runs=runs), tmp_path / f"{name}.json")
    found = join(tmp_path, parts)
    assert found is not None
    assert [(run.workload, run.values["part"]) for run in found.runs] == [
        ("ceilings: a", "one"),
        ("steps: b", "one"),
        ("server: c", "two"),
    ]
    assert list(found.skipped) == ["rest of one", "rest of two"]


@pytest.mark.parametrize("which", VISITS)
def test_a_visit_fits_a_device_run(which: str) -> None:
    seconds, parts = VISITS[which]
    # The start of the device machine takes the first minutes of its time.
    assert seconds <= {"first": 300, "second": 360}[which]
    # A part that runs only after a failure uses the time of later parts.
    assert sum(part.seconds for part in parts if part.after_failure_of is None) <= seconds
    assert len({part.name for part in parts}) == len(parts)
    assert {part.after_failure_of for part in parts} <= {None, *(part.name for part in parts)}


FAILS = """
def test_first():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def test_second():
    pass
"""


@pytest.mark.parametrize("workers", [False, True])
def test_a_gpu_that_has_failed_fails_no_later_test(tmp_path: Path, workers: bool) -> None:
    """After a CUDA error, all CUDA calls in the process fail. So the process ends, and xdist starts a new one."""
    (tmp_path / "test_fails.py").write_text(FAILS)
    flags = ["-p", "tests.gpu_device.conftest", "-p", "no:cacheprovider", *(["-n", "1"] if workers else [])]
    # The tested run must not become a worker of the xdist that runs this test.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    command = [sys.executable, "-m", "pytest", "-q", *flags, "--rootdir", str(tmp_path), str(tmp_path)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=100)
    assert found.returncode == 1, found.stdout
    assert "illegal memory access" in found.stdout + found.stderr
    if workers:
        assert "1 failed, 1 passed" in found.stdout
    else:
        assert "the GPU has failed in test_fails.py::test_first" in found.stdout
        assert "passed" not in found.stdout


def test_changes_behind_switches_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, with the reference operators and one layer, the compared variants compute the same."""
    monkeypatch.setenv(VARIABLE, "reference")
    monkeypatch.setattr(sweep, "LAYERS", 1)
    place, found = torch.device("cpu"), []
    for own, _, fused in {(own, False, fused) for own, _, fused in sweep.CHAINS}:
        torch.manual_seed(0)
        with torch.inference_mode():
            found.append(sweep.chain(place, own, fused)())
    assert len(found) == 3
    for one in found:
        torch.testing.assert_close(one, found[0], rtol=0.1, atol=0.1)
    assert [name.split()[-1] for name, _ in sweep.crossings(place)] == ["copied", "mapped"]
    for reduced in (True, False):
        with sweep.sums_reduced(reduced):
            assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction == reduced


def test_a_trace_tells_kernels_and_the_gaps_between_them() -> None:
    events = [("matmul", 0.0, 30.0), ("Memcpy HtoD", 31.0, 90.0), ("norm", 32.0, 40.0), ("matmul", 44.0, 74.0)]
    kernels = steps.kernels_among(events)
    assert [kernel.name for kernel in kernels] == ["matmul", "norm", "matmul"]
    assert trace.gaps(kernels) == [2.0, 4.0]
    assert trace.gaps([Kernel("a", 0, 10), Kernel("b", 5, 10)]) == [0.0]
    assert trace.largest(kernels, 1) == [("matmul", 60.0, 2.0), ("norm", 8.0, 1.0)]
    assert steps.idle_percent(68.0, 80.0) == pytest.approx(15.0)
    text = trace.text(trace.CASES[0], 80.0, kernels, 1)
    assert "80 us a step, 68 of them in 3 kernels; idle 15 %; between two kernels 3.00 us" in text


def test_kernels_that_overlap_count_once() -> None:
    kernels = [Kernel("waits", 5.0, 20.0), Kernel("first", 0.0, 10.0), Kernel("within", 6.0, 2.0), Kernel("x", 40.0, 1)]
    assert steps.busy_us(kernels) == 26.0
