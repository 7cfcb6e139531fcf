"""scripts/gpu.py and its benchmark where there is no GPU: they say why, and what they measure can be measured here."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.gpu_device.conftest import ORDER
from tests.structure.repository import ROOT

SCRIPT = ROOT / "scripts/gpu.py"
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*arguments: str) -> str:
    """As on a host without this project's environment: nothing says where the sources are."""
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, cwd="/", check=True, capture_output=True, text=True, timeout=300).stdout


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
def test_the_benchmark_is_skipped_with_the_reason() -> None:
    assert run("bench").startswith("skipped: ")


@pytest.mark.parametrize("device", ["cpu", "deferred"])
def test_the_benchmark_measures(tmp_path: Path, device: str) -> None:
    out = tmp_path / "out.json"
    output = run("bench", "--device", device, "--shapes", "tiny", "--out", str(out))
    found = json.loads(out.read_text())["shapes"]["tiny"]
    assert [step["case"] for step in found["steps"]] == ["decode 1 x 20", "decode 4 x 20", "prefill 16"]
    assert all(step["host_p50"] > 0 and step["step_p50"] > 0 for step in found["steps"])
    assert "decode 4 x 20" in output


def test_the_benchmark_ends_at_its_deadline(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    run("bench", "--device", "cpu", "--shapes", "tiny", "--seconds", "0", "--out", str(out))
    assert json.loads(out.read_text())["shapes"]["tiny"]["left_out"] == ["all of it: no time"]


def test_the_lock_has_pins_of_what_is_packed(gpu: ModuleType) -> None:
    pins = gpu.locked((ROOT / "requirements/dev.txt").read_text())
    names = {pin.split("==")[0] for pin in pins}
    assert names == set(gpu.PACKAGES)
    assert all("--hash=sha256:" in pin for pin in pins)


def test_what_is_packed_is_found_again(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FOREBAY_TEST_BINARY", raising=False)
    monkeypatch.setattr(gpu, "BINARY", tmp_path / "forebay.xz")
    monkeypatch.setattr(gpu, "SITE", tmp_path / "none")
    gpu.pack_binary(Path("/bin/true"))
    variables = gpu.environment(tmp_path)
    assert subprocess.run([variables["FOREBAY_TEST_BINARY"]], check=False).returncode == 0
    assert variables["PYTHONPATH"].split(":") == [str(ROOT / "python"), str(ROOT)]
