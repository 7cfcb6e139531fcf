"""The processes that Ray runs on a node, and their shares of it, tested without Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.place.outpost import Order, command, environment, run
from forebay.place.shares import bundle, shares

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 20


def program(folder: Path, script: str) -> Path:
    file = folder / "forebay"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return file


def order(path: Path) -> Order:
    return Order(program=str(path), join="10.0.0.1:7", token="fbw1.secret", name="ray-0", hands=2)


@given(st.integers(1, 20), st.integers(1, 40), st.integers(0, 16), st.booleans())
def test_bundles_hold_all_hands_and_fit_on_nodes(replicas: int, ranks: int, largest: int, apart: bool) -> None:
    found = shares(replicas, ranks, largest, apart)
    assert sum(found) == replicas * ranks
    assert all(hands > 0 for hands in found)
    if apart and 0 < largest < ranks:
        assert max(found) <= largest
        assert len(found) == replicas * -(-ranks // largest), "there are as few bundles as possible"
    else:
        assert found == [ranks] * replicas


def test_a_gpu_a_hand_or_a_processor_a_hand() -> None:
    assert bundle(4, cuda=True) == {"GPU": 4.0, "CPU": 1.0}
    assert bundle(4, cuda=False) == {"CPU": 4.0}


def test_an_outpost_gets_its_token_by_a_pipe_and_sees_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.delenv("FOREBAY_PYTHON", raising=False)
    told = tmp_path / "told"
    path = program(tmp_path, f'echo "$*|$CUDA_VISIBLE_DEVICES|$(cat /dev/stdin)" > {told}; exit 3')
    assert run(order(path), ["2", "3"]) == 3
    line, gpus, token = told.read_text().strip().split("|")
    assert line == (
        "worker --join 10.0.0.1:7 --token-file /dev/stdin --hands 2 --name ray-0 "
        f"--parent {os.getpid()} --python {sys.executable}"
    )
    assert (gpus, token) == ("2,3", "fbw1.secret")
    assert environment({"CUDA_VISIBLE_DEVICES": "7"}, []) == {"CUDA_VISIBLE_DEVICES": "7"}
    monkeypatch.setenv("FOREBAY_PYTHON", "/else/python")
    assert "--python" not in command(order(path))


def test_another_forebay_is_found_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = program(tmp_path, "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command(order(tmp_path / "none"))[0] == str(there)
    there.unlink()
    with pytest.raises(FileNotFoundError, match="the wheel of Forebay brings one"):
        command(order(tmp_path / "none"))


def test_an_outpost_does_not_outlive_an_actor_that_is_told_to_end(tmp_path: Path) -> None:
    path = program(tmp_path, f"cat > /dev/null; echo $$ > {tmp_path}/pid; exec sleep 1000")
    script = (
        "import signal; signal.signal(signal.SIGTERM, lambda *_: exit(5))\n"
        "from forebay.place.outpost import Order, run\n"
        f"run({order(path)!r}, [])"
    )
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    with subprocess.Popen([sys.executable, "-c", script], env=variables) as actor:
        file = tmp_path / "pid"
        try:
            while not file.is_file() or not file.read_text().strip():
                assert actor.poll() is None
            actor.send_signal(signal.SIGTERM)
            assert actor.wait(SECONDS) == 5
        finally:
            actor.kill()
    assert not Path(f"/proc/{int(file.read_text())}").exists()
