"""The server process: it uses a private folder, and exits with the interpreter at the latest."""

from __future__ import annotations

import os
import queue
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO

from forebay._bin import find_binary
from forebay.llm.errors import EngineDeadError, StartError

__all__ = ["Server"]

PREFIX = "forebay-llm-"
LONGEST_PATH = 100
"""A length that every system allows for the path of a Unix socket, with a few bytes to spare."""
STOP_SECONDS = 10.0
"""Seconds that the server may take to exit after SIGTERM, before it is killed."""
STALE_SECONDS = 3600.0
"""The age in seconds from which an empty folder with our prefix must be left over from a killed process."""
TAIL = 8192
"""Bytes at the end of the log that are searched for an error."""
KEYS = ("FOREBAY_API_KEY", "FOREBAY_ADMIN_API_KEY", "FOREBAY_ROUTER_KEY")
"""Environment variables with the keys of public servers. They are not passed to the library's private server."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LOG_LINE = re.compile(r"^\S+\s+(ERROR|WARN)\s+(.*)")


class Server:
    """A `forebay serve` process that this process starts. It exits with its parent, even if the parent is killed."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """Starts the server with these arguments, without waiting until it is ready."""
        _remove_stale_folders()
        folder = tempfile.mkdtemp(prefix=PREFIX)
        if len(os.fsencode(folder)) > LONGEST_PATH - len("/socket"):
            os.rmdir(folder)
            folder = tempfile.mkdtemp(prefix=PREFIX, dir="/tmp")
        self.socket = os.path.join(folder, "socket")
        # An unnamed file, so that nothing is left on the disk.
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        environment = {key: value for key, value in os.environ.items() if key not in KEYS}
        # A hand in Python must use the environment in which its packages are installed.
        environment.setdefault("FOREBAY_PYTHON", sys.executable)
        environment["NO_COLOR"] = "1"
        command = [
            *(os.fspath(find_binary()), "serve", "--uds", self.socket, "--parent", str(os.getpid())),
            *("--no-webui", "--log-level", "warn", "--log-interval", "0", "--drain-timeout", "0"),
            *arguments,
        ]

        def start() -> subprocess.Popen[bytes]:
            # In a separate session, so that Ctrl-C reaches only the caller.
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=environment,
                start_new_session=True,
            )

        try:
            self.process = _Keeper.current().call(start)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._stop = weakref.finalize(self, _stop, self.process, folder, self._log, os.getpid())

    def is_alive(self) -> bool:
        """True if the server is running."""
        return self._stop.alive and self.process.poll() is None

    def stop(self) -> None:
        """Stops the server. A second call does nothing."""
        self._stop()

    def start_error(self) -> StartError:
        """Returns the error of a server that exited before it was ready."""
        lines = self._lines()
        at = max((number for number, line in enumerate(lines) if line.startswith("error: ")), default=None)
        if at is None:
            return StartError(f"the server ended with status {self.process.returncode}: {_last(lines)}")
        return StartError(lines[at].removeprefix("error: "))

    def death(self) -> EngineDeadError:
        """Returns the error for requests to a server that has exited or is exiting."""
        if not self._stop.alive:
            return EngineDeadError("the server was closed")
        try:
            status = self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            return EngineDeadError("the server closed a connection in the middle of an answer")
        by = f"by signal {-status}" if status < 0 else f"with status {status}"
        return EngineDeadError(f"the server ended {by}: {_last(self._lines())}")

    def _lines(self) -> list[str]:
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), TAIL, max(0, size - TAIL)).decode(errors="replace")
        return [line for line in _COLOUR.sub("", tail).splitlines() if line.strip()]


def _last(lines: Sequence[str]) -> str:
    """Returns the last line of the log, without its timestamp."""
    line = lines[-1] if lines else "it said nothing"
    found = _LOG_LINE.match(line)
    return found[2] if found else line.removeprefix("error: ")


def _stop(process: subprocess.Popen[bytes], folder: str, log: IO[bytes], owner: int) -> None:
    if os.getpid() != owner:
        # This process is a fork of the owner: the server belongs to the parent.
        return
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    log.close()
    shutil.rmtree(folder, ignore_errors=True)


def _remove_stale_folders() -> None:
    """Removes empty folders that killed processes left behind. A server removes its socket, but not the folder."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_mtime < time.time() - STALE_SECONDS:
                folder.rmdir()
        except OSError:
            # The folder belongs to another user, or is not empty.
            continue


class _Keeper:
    """A thread that starts processes and runs as long as the interpreter.

    The kernel kills a server when the thread that started it ends, and callers' threads may end before the interpreter.
    """

    _lock = threading.Lock()
    _instance: _Keeper | None = None

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._calls: queue.SimpleQueue[tuple[Callable[[], subprocess.Popen[bytes]], Future[subprocess.Popen[bytes]]]]
        self._calls = queue.SimpleQueue()
        threading.Thread(target=self._run, name="forebay-keeper", daemon=True).start()

    @classmethod
    def current(cls) -> _Keeper:
        """Returns the keeper of this process. After a fork, the child creates a new one."""
        with cls._lock:
            if cls._instance is None or cls._instance._owner != os.getpid():
                cls._instance = cls()
            return cls._instance

    def call(self, start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        """Starts a process."""
        started: Future[subprocess.Popen[bytes]] = Future()
        self._calls.put((start, started))
        return started.result()

    def _run(self) -> None:
        while True:
            start, started = self._calls.get()
            try:
                started.set_result(start())
            except BaseException as error:
                started.set_exception(error)
            # Keep no reference to a server while waiting for the next call.
            del start, started


def _renew_lock() -> None:
    _Keeper._lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
