"""Processes: starts one with all its children, waits until it answers, and ends the whole tree."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TERM_SECONDS = 20.0
KILL_SECONDS = 10.0
POLL_SECONDS = 0.1
LOG_TAIL = 3000


class ServerError(RuntimeError):
    """A server did not start, did not answer, or did not end."""


@dataclass(frozen=True)
class Stat:
    """The fields of /proc/PID/stat about a process."""

    pid: int
    name: str
    state: str
    parent: int
    started: int
    """Start time in clock ticks since boot: together with the id it identifies a process uniquely."""

    @property
    def alive(self) -> bool:
        """True if the process still runs and is no zombie."""
        return self.state not in "ZX"


def parse_stat(text: str) -> Stat:
    """Reads /proc/PID/stat; the name may hold spaces and parentheses. Raises ValueError."""
    head, opened, rest = text.partition(" (")
    name, closed, tail = rest.rpartition(") ")
    fields = tail.split()
    if not opened or not closed or len(fields) < 20:
        raise ValueError(f"not a line of /proc/PID/stat: {text[:80]!r}")
    return Stat(pid=int(head), name=name, state=fields[0], parent=int(fields[1]), started=int(fields[19]))


def below(root: int, table: Mapping[int, Stat]) -> list[Stat]:
    """`root` and all processes below it, parents before children; empty if there is no such process."""
    if root not in table:
        return []
    found = [table[root]]
    for stat in found:
        found += [child for child in table.values() if child.parent == stat.pid]
    return found


def processes() -> dict[int, Stat]:
    """All visible processes by id."""
    found = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            try:
                stat = parse_stat((entry / "stat").read_text())
            except (OSError, ValueError):
                # The process ended while the folder was being read.
                continue
            found[stat.pid] = stat
    return found


def free_port() -> int:
    """A free TCP port of the loopback interface."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class Running:
    """A server and all processes below it; leaving the context ends them all."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        port: int,
        log: Path,
        grace_seconds: float = TERM_SECONDS,
    ) -> None:
        """Starts the server. It has `grace_seconds` to end when asked to."""
        self.port = port
        self.log = log
        self._grace_seconds = grace_seconds
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                list(command),
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @classmethod
    def ready(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        port: int,
        log: Path,
        seconds: float,
        path: str = "/health",
    ) -> Running:
        """Waits until GET `path` answers 200, for `seconds` at most. Else ends the server and raises ServerError."""
        running = cls(command, environment, port, log)
        try:
            running.wait_until_ready(path, seconds)
        except BaseException:
            running.stop()
            raise
        return running

    @property
    def pid(self) -> int:
        """The id of the process that was started; all others are its descendants."""
        return self._process.pid

    @property
    def url(self) -> str:
        """The address of the server."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_until_ready(self, path: str, seconds: float, poll_seconds: float = POLL_SECONDS) -> None:
        """Waits until GET `path` is answered 200. Raises ServerError with the end of the log."""
        deadline = time.monotonic() + seconds
        while not self._answers(path):
            if self._process.poll() is not None:
                raise ServerError(f"ended with status {self._process.returncode}:\n{self._tail()}")
            if time.monotonic() > deadline:
                raise ServerError(f"did not answer within {seconds:.0f} s:\n{self._tail()}")
            time.sleep(poll_seconds)

    def wait(self, seconds: float) -> int | None:
        """The status of the first process once it has ended, negative for a signal; None if it runs longer."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        """Ends the tree: asks the first process to end, and kills the remaining ones."""
        table = processes()
        tree = below(self.pid, table)
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(self._grace_seconds)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(KILL_SECONDS)
        deadline = time.monotonic() + KILL_SECONDS
        while left := survivors(tree, processes()):
            for stat in left:
                try:
                    os.kill(stat.pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            if time.monotonic() > deadline:
                raise ServerError(f"{', '.join(stat.name for stat in left)} cannot be ended")
            time.sleep(POLL_SECONDS)

    def _answers(self, path: str) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _tail(self) -> str:
        return self.log.read_bytes()[-LOG_TAIL:].decode(errors="replace")


def survivors(tree: Sequence[Stat], table: Mapping[int, Stat]) -> list[Stat]:
    """The processes of `tree` that still run, and those that they have started since."""
    roots = [stat for stat in tree if stat.pid in table and table[stat.pid].started == stat.started]
    found = {child.pid: child for stat in roots for child in below(stat.pid, table) if child.alive}
    return list(found.values())
