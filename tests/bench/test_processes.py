from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.processes import Running, ServerError, Stat, below, free_port, parse_stat, processes, survivors
from benchmarks.servers import ROOT


def stat(pid: int, parent: int, started: int = 1, state: str = "S") -> Stat:
    return Stat(pid=pid, name=f"p{pid}", state=state, parent=parent, started=started)


def test_a_stat_line_is_read_whatever_the_name() -> None:
    line = "42 (a (b) c) S 7 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 98765 1 2"
    assert parse_stat(line) == Stat(pid=42, name="a (b) c", state="S", parent=7, started=98765)


@pytest.mark.parametrize("line", ["", "42 name S 7", "42 (name) S 7", "x (name) " + "1 " * 30])
def test_no_stat_line_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"stat|int"):
        parse_stat(line)


def test_a_tree_is_what_is_below_its_root() -> None:
    table = {pid: stat(pid, parent) for pid, parent in [(1, 0), (2, 1), (3, 1), (4, 2), (5, 9)]}
    assert [found.pid for found in below(1, table)] == [1, 2, 3, 4]
    assert [found.pid for found in below(2, table)] == [2, 4]
    assert below(8, table) == []


def test_survivors_are_the_same_processes_and_what_they_started() -> None:
    tree = [stat(1, 0), stat(2, 1), stat(3, 1), stat(4, 1)]
    now = {
        # The process id was reused by another process.
        2: stat(2, 0, started=9),
        # Its parent has ended, so it has a new parent.
        3: stat(3, 0),
        4: stat(4, 0, state="Z"),
        5: stat(5, 3, started=5),
    }
    assert sorted(found.pid for found in survivors(tree, now)) == [3, 5]


def running(tmp_path: Path, code: str, port: int) -> Running:
    return Running([sys.executable, "-c", code], {"PORT": str(port)}, port, tmp_path / "log")


def test_a_server_that_ends_is_not_waited_for_and_its_log_is_told(tmp_path: Path) -> None:
    code = "import os; print('port', os.environ['PORT']); raise SystemExit(3)"
    with (
        running(tmp_path, code, free_port()) as server,
        pytest.raises(ServerError, match=rf"(?s)status 3.*port {server.port}"),
    ):
        server.wait_until_ready("/health", 60)


def test_a_server_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    code = "import signal; signal.pause()"
    with running(tmp_path, code, free_port()) as server, pytest.raises(ServerError, match="did not answer"):
        server.wait_until_ready("/health", 0)


def test_the_whole_tree_is_ended_even_if_it_will_not(tmp_path: Path) -> None:
    child = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
    code = f"""
import http.server, os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {child!r}], start_new_session=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""
    with running(tmp_path, code, free_port()) as server:
        server.wait_until_ready("/health", 60)
        tree = below(server.pid, processes())
        assert len(tree) == 2
    assert survivors(tree, processes()) == []


def test_a_run_that_is_asked_to_end_ends_its_servers(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from benchmarks.compare import parser
from benchmarks.processes import Running
parser("a run", rounds=1)
server = [sys.executable, "-c", "import signal; signal.pause()"]
with Running(server, {{}}, 1, Path({str(tmp_path / "log")!r})) as running:
    print(running.pid, flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        server = int(run.stdout.readline())
        assert server in processes()
        run.terminate()
        assert run.wait(60) == 128 + signal.SIGTERM
    assert server not in processes()
