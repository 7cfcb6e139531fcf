"""The sanitizer's tests without a GPU: their program runs, and the output of the tool is parsed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from forebay.gpu.choose import VARIABLE
from tests.gpu_device import sanitized, sanitizer


def test_the_program_computes_its_steps(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(VARIABLE, "reference")
    monkeypatch.setattr(sys, "argv", ["sanitized", "--device", "deferred"])
    sanitized.main()
    words, steps = capsys.readouterr().out.strip().rsplit(" ", 1)
    assert words == sanitized.LAST_WORDS
    assert int(steps) >= 20


def tool_of(folder: Path, text: str) -> Path:
    """A stand-in for the tool: the shell script `text`.

    There `$@` are the arguments, and `run` runs the program in them.
    """
    path = folder / sanitizer.NAME
    path.write_text(f'#!/bin/sh\nrun() {{ while [ "${{1#*python}}" = "$1" ]; do shift; done; "$@"; }}\n{text}\n')
    path.chmod(0o755)
    return path


def check(folder: Path, text: str, kernels: tuple[str, ...] = ()) -> None:
    """Checks a run of the module `platform`, which prints one line."""
    sanitizer.check(tool_of(folder, text), "racecheck", ["platform"], "Linux", 60, kernels)


def test_a_clean_run_is_fine(tmp_path: Path) -> None:
    check(tmp_path, 'run "$@" && echo "========= ERROR SUMMARY: 0 errors"')
    check(tmp_path, 'run "$@" && echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"')


def test_options_are_given(tmp_path: Path) -> None:
    wanted = "--tool racecheck --error-exitcode 86 --kernel-name kns=a --kernel-name kns=b"
    check(tmp_path, f'case "$*" in "{wanted} "*) run "$@"; echo "========= ERROR SUMMARY: 0 errors";; esac', ("a", "b"))


FAILURES = {
    "faults": ('run "$@"; echo "========= Invalid __global__ read of size 4"; exit 86', "Invalid __global__ read"),
    "a race": (
        'run "$@"; echo "========= RACECHECK SUMMARY: 1 hazard displayed"',
        "does not say that there is nothing",
    ),
    "nothing was run": ('echo "========= ERROR SUMMARY: 0 errors"', "that did not end"),
    "a program that fails": (
        'echo Traceback; echo "========= Error: process terminated before"; exit 1',
        "ended with status 1",
    ),
}


@pytest.mark.parametrize(("text", "said"), FAILURES.values(), ids=FAILURES)
def test_what_is_wrong_is_told(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=said):
        check(tmp_path, text)


def test_a_tool_that_can_not_look_says_why(tmp_path: Path) -> None:
    with pytest.raises(sanitizer.UnusableError, match=r"^Error: Target application terminated before first"):
        check(
            tmp_path,
            'echo "========= Error: Target application terminated before first instrumented API call"; exit 255',
        )


def test_a_tool_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    tool = tool_of(tmp_path, "exec sleep 60")
    with pytest.raises(subprocess.TimeoutExpired):
        sanitizer.check(tool, "memcheck", ["platform"], "Linux", 0.2)


def test_the_tool_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    (tmp_path / "bin").mkdir()
    tool = tool_of(tmp_path / "bin", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert sanitizer.find() == tool
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CUDA_HOME")
    assert sanitizer.find() == tool
