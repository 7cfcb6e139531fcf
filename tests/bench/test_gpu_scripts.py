"""scripts/gpu.py and its benchmarks without a GPU: they report that none is there, and measure on a CPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks import tables
from benchmarks.gpu import ceilings, made_up, operators, peers, report, server
from benchmarks.gpu.__main__ import PARTS
from benchmarks.gpu.__main__ import main as gpu_main
from benchmarks.gpu.goals import COPIES, GOALS, LARGE, SMALL, Goal
from benchmarks.gpu.shapes import SHAPES
from benchmarks.gpu.steps import CASES, Measured
from benchmarks.records import RESULTS, Results, Run, from_json, read
from forebay.gpu.choose import VARIABLE
from tests.binary import binary
from tests.gpu_device.conftest import ORDER
from tests.structure.repository import ROOT

SCRIPT = ROOT / "scripts/gpu.py"
CPU = torch.device("cpu")
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*arguments: str, **variables: str) -> str:
    """Runs the script as on a host without the project's environment: no variable points to the sources."""
    command = [sys.executable, str(SCRIPT), *arguments]
    environment = {**os.environ, "FOREBAY_GPU_KERNELS": "reference", **variables}
    done = subprocess.run(command, cwd="/", env=environment, check=True, capture_output=True, text=True, timeout=300)
    return done.stdout


@WITHOUT_GPU
def test_every_test_is_skipped_with_the_reason() -> None:
    output = run("test", "-rs")
    assert " passed" not in output
    assert " failed" not in output
    assert "serve with --device cpu" in output


def test_the_most_telling_tests_come_first() -> None:
    files = {path.stem.removeprefix("test_") for path in (ROOT / "tests/gpu_device").glob("test_*.py")}
    assert files == set(ORDER)
    output = run("test", "--collect-only", "-q", "-q")
    listed = [line.split("::")[0].split(":")[0] for line in output.splitlines() if line.startswith("tests/gpu_device/")]
    assert list(dict.fromkeys(listed)) == [f"tests/gpu_device/test_{name}.py" for name in ORDER]


@WITHOUT_GPU
@pytest.mark.parametrize("what", ["bench", "peers", "visit first", "visit second"])
def test_what_measures_is_skipped_with_the_reason(what: str) -> None:
    assert run(*what.split()).startswith("skipped: ")


def test_the_benchmark_measures(tmp_path: Path) -> None:
    out, profiles = tmp_path / "out.json", tmp_path / "profiles"
    flags = ("--device", "cpu", "--shapes", "tiny", "--out", str(out), "--profiles", str(profiles))
    output = run("bench", *flags, FOREBAY_TEST_BINARY=str(binary()), FOREBAY_COMMIT="abc")
    found = from_json(out.read_text())
    assert not found.skipped
    assert found.machine["commit"] == "abc"
    by_part = {part: [case for case, _ in report.runs_of(found, part)] for part in PARTS}
    assert by_part["steps"] == ["decode 1 x 20", "decode 4 x 20", "prefill 16", "start"]
    assert by_part["server"] == ["2 streams, 16/8", "4 streams, 16/8", "recorded steps"]
    assert "attention, 4 rows of 20" in by_part["operators"]
    assert "draw, 4 rows" in by_part["operators"]
    steps = [run.values for case, run in report.runs_of(found, "steps") if case != "start"]
    assert all(step["host_p50"] > 0 and step["step_p50"] > 0 for step in steps)
    loads = [run.values for case, run in report.runs_of(found, "server")]
    assert [load["completed"] for load in loads[:-1]] == [4, 8]
    assert loads[-1]["steps"] > 16
    assert loads[-1]["gaps_1"] is not None
    profile = (profiles / "tiny.toml").read_text()
    assert "kv_tokens = " in profile
    assert 'device = "cpu"' in profile
    for case in [*by_part["operators"], "decode 4 x 20", "4 streams, 16/8"]:
        assert f"| {case} |" in output


def test_steps_beside_the_host_are_measured() -> None:
    """The deferred device has two steps in flight."""
    assert "| decode 4 x 20 |" in run("bench", "--device", "deferred", "--shapes", "tiny", "--parts", "steps")


def measured(monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> Results:
    """Runs the benchmark in this process, which has already imported everything."""
    flags = ["--device", "cpu", "--shapes", "tiny", "--out", str(out), *arguments]
    monkeypatch.setattr(sys, "argv", ["gpu", *flags])
    assert gpu_main() == 0
    return from_json(out.read_text())


def test_the_benchmark_ends_at_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(monkeypatch, tmp_path / "out.json", "--seconds", "0", "--parts", "steps")
    assert found.skipped == {"steps of tiny": "no time"}


def test_a_failing_operator_costs_the_rest_of_its_part_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory\nfor this")

    monkeypatch.setenv(VARIABLE, "reference")
    monkeypatch.setattr(operators, "_greedy", fail)
    found = measured(monkeypatch, tmp_path / "out.json", "--parts", "operators", "steps")
    assert found.skipped == {"rest of operators": "no memory for this"}
    assert "gate, 4 tokens" in [case for case, _ in report.runs_of(found, "operators")]
    assert len(report.runs_of(found, "steps")) == 4


FAILS = """
import benchmarks.gpu.__main__ as gpu

def fail(*_):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

gpu.PARTS.update(operators=fail, ceilings=fail)
gpu.main()
"""


def test_a_gpu_that_has_failed_costs_no_other_part(tmp_path: Path) -> None:
    """After a failure its process computes nothing more, and a new process runs the other parts."""
    out = tmp_path / "out.json"
    flags = ["--device", "cpu", "--shapes", "tiny", "--out", str(out), "--parts", "operators", "ceilings"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    subprocess.run([sys.executable, "-c", FAILS, *flags], check=True, env=environment, capture_output=True, timeout=300)
    found = from_json(out.read_text())
    assert found.skipped == {"rest of operators": "CUDA error: an illegal memory access was encountered"}
    assert [run.workload for run in found.runs] == [f"ceilings: {name}" for name in ceilings.measure(CPU, 1 / 64)]


def test_a_server_ends_with_its_benchmark(tmp_path: Path) -> None:
    """A server that outlived the benchmark would keep the GPU's memory."""
    command = server.serve(server.Place(binary(), "cpu", tmp_path), tmp_path, server.LOADS["tiny"], [])
    assert command[command.index("--parent") + 1] == str(os.getpid())


def test_loads_before_a_failure_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise subprocess.CalledProcessError(1, "fit")

    monkeypatch.setenv("FOREBAY_TEST_BINARY", str(binary()))
    monkeypatch.setattr(server, "fit", fail)
    found = measured(monkeypatch, tmp_path / "out.json", "--parts", "server", "--profiles", str(tmp_path))
    assert [case for case, _ in report.runs_of(found, "server")][-1] == "recorded steps"
    assert list(found.skipped) == ["rest of the server of tiny"]


def test_a_missing_binary_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FOREBAY_TEST_BINARY", "/none")
    measured(monkeypatch, tmp_path / "out.json", "--parts", "server")
    assert "Left out: server (there is no binary" in capsys.readouterr().out


@pytest.mark.slow
def test_peers_are_measured_in_turns(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    flags = ("--device", "cpu", "--shapes", "tiny", "--rounds", "1", "--out", str(out))
    output = run("peers", *flags, FOREBAY_TEST_BINARY=str(binary()))
    found = from_json(out.read_text())
    assert [name for name in found.servers("tiny: 4 streams, 16/8") if name != "vllm"] == [
        peer.name for peer in peers.PEERS if peer.name != "vllm"
    ]
    assert all(run.values["output_throughput"] > 0 for run in found.runs)
    assert "transformers, continuous" in output


@pytest.mark.parametrize("size", [512, 151936])
def test_made_up_tokenizers_have_each_token_and_lose_no_text(size: int) -> None:
    made = made_up.tokenizer(size)
    assert made.get_vocab_size() == size
    text = "hello there, w\u00f6rld: 42"
    assert made.decode(made.encode(text).ids) == text
    assert len(made.encode("hello there").ids) < len("hello there")


def test_goals_are_of_what_is_measured() -> None:
    """A goal whose case is never measured would be skipped silently."""
    sizes, names = operators.Sizes(), {f"steps: {case.name}" for case in CASES}
    names |= {f"operators: {kind}, {rows} rows" for kind in ("draw", "largest logit") for rows in sizes.rows}
    names |= {f"server: {load.name}" for shape in (SMALL, LARGE) for load in server.LOADS[shape]}
    assert {goal.case[0] for goal in GOALS} <= names
    steps = {field.name for field in fields(Measured)}
    assert {goal.case[2] for goal in GOALS if goal.case[0].startswith("steps")} <= steps
    assert {goal.case[1] for goal in GOALS} <= SHAPES.keys()


@pytest.mark.parametrize(
    ("value", "more", "reached"),
    [(1.0, False, "aim"), (1.5, False, "must"), (2.1, False, "missed"), (2.5, True, "aim"), (0.9, True, "missed")],
)
def test_goals_say_what_is_reached(value: float, more: bool, reached: str) -> None:
    must, aim = (1.0, 2.0) if more else (2.0, 1.0)
    goal = Goal("name", ("steps: a", "shape", "key"), "ms", must, aim, more=more)
    found = Results("gpu", rounds=1, runs=[Run("steps: a", "shape", 1, {"key": value})])
    assert goal.measured(found) == value
    assert goal.reached(value) == reached


@pytest.mark.parametrize(("gbps", "reached"), [(4300.0, "missed"), (None, "missed"), (3000.0, "must")])
def test_goals_of_what_reads_memory_are_those_of_the_card(gbps: float | None, reached: str) -> None:
    goal = Goal("name", ("steps: a", "shape", "key"), "ms", 5.0, 4.0, bound=COPIES)
    found = Results("gpu", rounds=1, runs=[Run("steps: a", "shape", 1, {"key": 6.5})])
    if gbps is not None:
        found.runs.append(Run("ceilings: copy on the device", "device", 1, {"gbps": gbps}))
    assert goal.reached(6.5, goal.slower(found)) == reached


def test_gaps_are_those_of_decode_steps_without_pauses() -> None:
    def step(rows: int, prefill: int, gap: int) -> dict[str, int]:
        return {"rows": rows, "prefill_tokens": prefill, "device_us": 900, "gap_us": gap}

    found = server.gaps([step(1, 0, 100), step(1, 0, 10**6), step(1, 16, 900), step(64, 0, 0)])
    assert found == {"gaps_1": 10.0, "gaps_64": 0.0, "gaps_256": None}


def test_the_page_says_whether_a_gpu_was_measured() -> None:
    page = (ROOT / "docs/performance/gpu.md").read_text()
    results = RESULTS / "gpu.json"
    if results.is_file():
        assert read(results).machine["commit"] in page
    else:
        assert "no run on a GPU exists" in page.splitlines()[0]
        # The page has the benchmark's table of goals, without measured values.
        assert report.goals(Results("gpu")) in page
    assert "<!-- bench:gpu -->" in page
    assert "<!-- bench:gpu_peers -->" in page
    assert {"gpu", "gpu_peers", "hand_host"} <= set(tables.registered())


def test_the_lock_has_pins_of_what_is_packed(gpu: ModuleType) -> None:
    pins = gpu.locked((ROOT / "requirements/dev.txt").read_text())
    names = {pin.split("==")[0] for pin in pins}
    assert names == set(gpu.PACKAGES)
    assert all("--hash=sha256:" in pin for pin in pins)


def test_what_is_packed_is_found_again(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FOREBAY_TEST_BINARY", raising=False)
    monkeypatch.setattr(gpu, "BINARY", tmp_path / "forebay.xz")
    monkeypatch.setattr(gpu, "DESCRIBE", tmp_path / "describe.xz")
    monkeypatch.setattr(gpu, "SITE", tmp_path / "none")
    gpu.pack_binary(Path("/bin/true"), gpu.BINARY)
    gpu.pack_binary(Path("/bin/true"), gpu.DESCRIBE)
    variables = gpu.environment(tmp_path)
    server = Path(variables["FOREBAY_TEST_BINARY"])
    for program in (server, server.with_name("examples") / "describe"):
        assert subprocess.run([program], check=False).returncode == 0
    assert variables["PYTHONPATH"].split(":") == [str(ROOT / "python"), str(ROOT)]
