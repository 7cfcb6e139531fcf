"""A server under test: its process, its log, and short ways to send requests."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from tests.binary import binary
from tests.e2e.metrics import Metrics
from tests.e2e.processes import alive, children, descendants, is_hand
from tests.e2e.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
BINARY = binary()
CACHE = ROOT / ".pytest_cache/forebay"
"""The servers' cache of models, kept between runs and separate from the developer's own."""
START_SECONDS = 120
STOP_SECONDS = 30
LOG_TAIL = 8000

RUNNING: list[Server] = []
"""Servers whose logs are shown when a test fails."""


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class Server:
    """A running `forebay serve`, or `forebay route`. Always `kill` it."""

    def __init__(
        self,
        *arguments: str | Path,
        log: Path,
        environment: Mapping[str, str] | None = None,
        command: str = "serve",
        port: int | None = None,
        through: Sequence[str] = (),
    ) -> None:
        """`through` is a command that runs the server's command."""
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [*through, BINARY, command, *arguments, "--port", str(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, "NO_COLOR": "1", "FOREBAY_CACHE": str(CACHE), **(environment or {})},
            )
        self.http = httpx2.Client(base_url=self.url, timeout=60, trust_env=False)
        RUNNING.append(self)

    @property
    def pid(self) -> int:
        return self.process.pid

    def log(self) -> str:
        """The end of the output on stdout and stderr."""
        return self._log.read_text(errors="replace")[-LOG_TAIL:]

    def wait_for_health(self, status: int = 200) -> httpx2.Response:
        """Waits until /health responds with `status`. Status 200 means that all replicas are ready."""

        def answer() -> httpx2.Response | None:
            assert self.process.poll() is None, f"ended with status {self.process.returncode}:\n{self.log()}"
            try:
                response = self.http.get("/health")
            except httpx2.TransportError:
                return None
            if response.status_code != status:
                return None
            replicas = response.json().get("replicas", []) if status == 200 else []
            return response if all(line == "ready" for line in replicas) else None

        found = eventually(answer, f"/health says {status}", START_SECONDS)
        assert found
        return found

    def post(self, path: str, body: Any, **options: Any) -> httpx2.Response:
        """Posts a JSON body."""
        return self.http.post(path, json=body, **options)

    def ask(self, path: str, body: Any, **options: Any) -> Any:
        """Posts a JSON body; returns the JSON of the answer, which must have status 200."""
        response = self.post(path, body, **options)
        assert response.status_code == 200, response.text
        return response.json()

    def metrics(self) -> Metrics:
        """The current metrics."""
        response = self.http.get("/metrics")
        assert response.status_code == 200
        return Metrics(response.text)

    def metric(self, name: str, **labels: str) -> float:
        """One value of the current metrics."""
        return self.metrics().value(name, **labels)

    def wait_for_metric(self, name: str, fine: Callable[[float], bool], seconds: float = 30) -> float:
        """Waits until `fine` holds for a metric; returns its value."""
        last = [0.0]

        def look() -> bool:
            last[0] = self.metric(name)
            return fine(last[0])

        eventually(look, f"{name} has the expected value", seconds)
        return last[0]

    def wait_until_idle(self) -> None:
        """Waits until no request runs or waits."""
        for name in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
            self.wait_for_metric(name, lambda value: value == 0)

    def hands(self) -> list[int]:
        """The process ids of the hands."""
        return [pid for pid in children(self.pid) if is_hand(pid)]

    def kill_hands(self) -> None:
        """Kills all hands, and waits until the server has noticed: a request that loses two hands would be given up."""
        hands = self.hands()
        before = self.metric("forebay:hand_deaths_total")
        for hand in hands:
            os.kill(hand, signal.SIGKILL)
        self.wait_for_metric("forebay:hand_deaths_total", lambda deaths: deaths == before + len(hands))

    def hand(self) -> int | None:
        """The process id of the only hand, if there is one."""
        hands = self.hands()
        assert len(hands) <= 1
        return hands[0] if hands else None

    @contextmanager
    def held(self, count: int) -> Iterator[None]:
        """Pauses the hands until `count` requests have arrived. The block sends requests, and awaits no answer."""
        hands = self.hands()
        assert hands
        for hand in hands:
            os.kill(hand, signal.SIGSTOP)
        try:
            yield
            self.wait_for_metric("forebay:replica_requests", lambda requests: requests == count, START_SECONDS)
        finally:
            for hand in hands:
                os.kill(hand, signal.SIGCONT)

    def replicas(self) -> list[dict[str, Any]]:
        """The state of each replica, from /server_info."""
        states: list[dict[str, Any]] = self.http.get("/server_info").json()["internal_states"]
        return states

    def terminate(self) -> int:
        """Stops the server as an operator would; returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_SECONDS)

    def kill(self) -> None:
        """Kills the server in any state, and all processes below it."""
        below = descendants(self.pid) if self.process.poll() is None else []
        self.process.kill()
        self.process.wait()
        for pid in below:
            if alive(pid) and is_hand(pid):
                os.kill(pid, signal.SIGKILL)
        self.http.close()
        if self in RUNNING:
            RUNNING.remove(self)
