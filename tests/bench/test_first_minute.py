from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from benchmarks import first_minute, startup, tables
from benchmarks.records import Results, Run
from benchmarks.servers import ROOT

NETWORKS = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs
    lo: 1000000    1    0    0    0     0          0         0  1000000    1    0    0    0     0       0          0
  eth0: 700    7    0    0    0     0          0         0     90    1    0    0    0     0       0          0
 wlan0:30 1 0 0 0 0 0 0 5 1 0 0 0 0 0 0
"""


def test_what_the_machine_sends_itself_is_no_download() -> None:
    assert first_minute.received(NETWORKS) == 730


def test_a_program_runs_from_the_folder_it_was_installed_in(tmp_path: Path) -> None:
    of = first_minute.INSTALLATIONS["vllm"]
    installed = first_minute.Installed(of.server, of.before, tmp_path)
    command = installed.command(startup.SETTING, 8000)
    assert command[0] == str(tmp_path / "bin/vllm")
    assert command[1:] == of.server.command(startup.SETTING, 8000)[1:]
    assert str(ROOT) not in "".join(installed.environment(startup.SETTING).values())


def test_an_archive_is_unpacked_where_a_wheel_would_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "forebay").write_text("program")
    monkeypatch.setattr(first_minute, "DIST", tmp_path)
    with pytest.raises(SystemExit, match="make wheel tarball"):
        first_minute.archive(tmp_path / "env")
    with tarfile.open(tmp_path / "forebay-1.tar.gz", "w:gz") as packed:
        packed.add(tmp_path / "forebay", "forebay-1/forebay")
    size = first_minute.archive(tmp_path / "env")
    assert size == (tmp_path / "forebay-1.tar.gz").stat().st_size
    assert (tmp_path / "env/bin/forebay").read_text() == "program"
    assert first_minute.size(tmp_path / "env") == len("program")


def test_the_table_adds_installing_and_starting() -> None:
    machine = {"cpu": "c", "cores": 2, "memory_gib": 1, "kernel": "6", "python": "3", "torch": "2", "forebay": "0"}
    found = Results(benchmark="first_minute", machine={**machine, "commit": "abc"}, rounds=1)
    for server, factor in (("a", 1.0), ("b", 4.0)):
        seconds = {"install_seconds": 2.0 * factor, "ready_seconds": 0.5, "first_token_seconds": 1.0 * factor}
        values = {**seconds, "downloaded_bytes": 20e6, "disk_bytes": 50e6}
        found.runs.append(Run(first_minute.WORKLOAD, server, 1, values))
    table = tables.render(found)
    assert "| a | 20.0 | 50.0 | 2.00 | 0.50 | 1.00 | 3.00 | 1.00 |" in table
    assert "| b | 20.0 | 50.0 | 8.00 | 0.50 | 4.00 | 12.0 | 4.00 |" in table
