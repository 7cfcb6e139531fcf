"""The library's own server: the folders that it leaves behind, its progress line, and errors without a server."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from forebay._bin import VARIABLE, find_binary
from forebay.llm import progress, server
from forebay.llm.progress import Stages


def test_only_old_and_empty_folders_of_ours_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders = {name: tmp_path / name for name in ("forebay-llm-old", "forebay-llm-new", "forebay-llm-full", "other")}
    for folder in folders.values():
        folder.mkdir()
    (folders["forebay-llm-full"] / "socket").touch()
    for name in ("forebay-llm-old", "forebay-llm-full", "other"):
        os.utime(folders[name], (0, 0))
    server._remove_stale_folders()
    assert {path.name for path in tmp_path.iterdir()} == {"forebay-llm-new", "forebay-llm-full", "other"}


def test_stages_are_one_line_of_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stages = Stages("model")
    stages.show("loading")
    stages.clear()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "_is_terminal", lambda: True)
    stages.show("loading")
    stages.show("loading")
    stages.show("ready" + "x" * 200)
    stages.clear()
    written = capsys.readouterr().err
    assert "\n" not in written
    lines = written.split("\r\x1b[K")
    assert [lines[1], len(lines[2]), lines[3]] == ["forebay: model: loading", 100, ""]


def test_there_may_be_no_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    Stages("model").show("loading")


def test_a_variable_names_the_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "mine"))
    assert find_binary() == tmp_path / "mine"
