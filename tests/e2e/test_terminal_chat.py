"""`forebay chat`: a message through a pipe, conversations in a terminal, and a server that it starts."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Serve
from tests.e2e.models import Model
from tests.e2e.processes import alive, descendants
from tests.e2e.server import BINARY, CACHE, Server, free_port
from tests.e2e.simulated import SIM, paced
from tests.e2e.waiting import eventually

SECONDS = 60
ENVIRONMENT = {"NO_COLOR": "1", "FOREBAY_CACHE": str(CACHE), "TERM": "xterm"}
CTRL_C, CTRL_D = b"\x03", b"\x04"
SLOW_STEP_US = 20_000


def chat(*arguments: str | Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a chat that ends by itself."""
    return subprocess.run(
        [BINARY, "chat", *arguments],
        input=text,
        stdin=subprocess.DEVNULL if text is None else None,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, **ENVIRONMENT},
    )


class Typed:
    """A chat in a terminal of its own."""

    def __init__(self, *arguments: str | Path) -> None:
        self.end, inner = pty.openpty()
        self.process = subprocess.Popen(
            [BINARY, "chat", *arguments],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(inner)
        self.seen = ""

    def until(self, pattern: str) -> str:
        """Waits for a pattern and returns the output up to it; the next call searches the output after it."""
        deadline = time.monotonic() + SECONDS
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.seen!r}"
            if select.select([self.end], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.end, 65536).decode(errors="replace")
                except OSError as ended:
                    raise AssertionError(f"the chat ended: {self.seen!r}") from ended
        before, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return before

    def type(self, text: str | bytes) -> None:
        """Types a text and Enter, or raw bytes."""
        os.write(self.end, text if isinstance(text, bytes) else f"{text}\r".encode())


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextmanager
def typing(*arguments: str | Path) -> Iterator[Typed]:
    """A chat in a terminal, which is killed when the block ends."""
    typed = Typed(*arguments)
    try:
        yield typed
    finally:
        typed.process.kill()
        typed.process.wait()
        os.close(typed.end)


@pytest.fixture(scope="module")
def server(serve_for_module: Serve, tiny: Model) -> Server:
    return serve_for_module(tiny, "--device", "sim", "--sim-output-tokens", "12")


@pytest.fixture(scope="module")
def slow(serve_for_module: Serve, tiny: Model, tmp_path_factory: pytest.TempPathFactory) -> Server:
    slow = paced(tmp_path_factory.mktemp("profile"), SLOW_STEP_US)
    return serve_for_module(tiny, *SIM, *slow, "--sim-output-tokens", "1000")


def answer(server: Server, *messages: str) -> str:
    """The server's answer over the API."""
    roles = ("user", "assistant")
    said = [{"role": roles[at % 2], "content": text} for at, text in enumerate(messages)]
    model = server.http.get("/v1/models").json()["data"][0]["id"]
    whole: Any = server.ask("/v1/chat/completions", {"model": model, "messages": said})
    return str(whole["choices"][0]["message"]["content"])


def test_a_piped_message_is_answered_and_nothing_else_is_printed(server: Server) -> None:
    done = chat(server.url, text="Say something.")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == answer(server, "Say something.") + "\n"
    assert chat(f"{server.url}/v1/", "--prompt", "Say something.").stdout == done.stdout


def test_a_conversation_is_sent_whole_and_can_begin_anew(server: Server) -> None:
    first = answer(server, "One")
    with typing(server.url) as typed:
        typed.until("/help says what can be typed")
        typed.type("One")
        assert first.strip() in typed.until("first after").replace("\r\n", "\n")
        typed.type("Two")
        assert answer(server, "One", first, "Two").strip() in typed.until("first after")
        typed.type("/again")
        assert answer(server, "One", first, "Two").strip() in typed.until("first after")
        typed.type("/new")
        typed.until("A new conversation")
        typed.type("/again")
        typed.until("no answer yet")
        typed.type("One")
        assert first.strip() in typed.until("first after")
        typed.type("/nonsense")
        typed.until("/nonsense is not known")
        typed.type("/exit")
        assert typed.process.wait(SECONDS) == 0


def test_ctrl_c_stops_an_answer_and_the_server_computes_it_no_more(slow: Server) -> None:
    with typing(slow.url) as typed:
        typed.until("/help")
        typed.type("Say much.")
        slow.wait_for_metric("vllm:num_requests_running", lambda value: value == 1)
        typed.until(r"[a-z]+ [a-z]+ [a-z]+")
        typed.type(CTRL_C)
        typed.until("stopped")
        slow.wait_until_idle()
        assert typed.process.poll() is None
        typed.type(CTRL_D)
        assert typed.process.wait(SECONDS) == 0


def test_a_server_is_started_for_a_model_and_stopped(tiny: Model) -> None:
    done = chat(tiny.path, "--prompt", "Hello", "--", "--device", "sim", "--sim-output-tokens", "5")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"( [a-z]+)+\n", done.stdout)


def test_the_server_ends_with_a_chat_that_is_killed(tiny: Model) -> None:
    with typing(tiny.path, "--", "--device", "sim") as typed:
        typed.until("/help")
        below = descendants(typed.process.pid)
        assert below
        typed.process.send_signal(signal.SIGKILL)
        typed.process.wait()
        eventually(lambda: not any(alive(pid) for pid in below), "the server has ended")


def test_what_goes_wrong_is_said(serve: Serve, tiny: Model, tmp_path: Path) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    for arguments, message in (
        ((nobody,), f"cannot ask {nobody}"),
        ((nobody, "--", "--device", "sim"), "runs already"),
        ((tmp_path / "nothing",), "nothing"),
        ((tiny.path, "--", "--no-such-flag"), "--no-such-flag"),
        ((tiny.path, "--", "--device", "sim", "--sim-profile", "none"), "the server did not start"),
    ):
        done = chat(*arguments, "--prompt", "Hello") if "--" not in arguments else chat("--prompt", "Hello", *arguments)
        assert done.returncode != 0, arguments
        assert message in done.stderr, done.stderr
        assert done.stdout == ""
    closed = serve(tiny, "--device", "sim", "--api-key", "secret")
    refused = chat(closed.url, "--prompt", "Hello")
    assert "API key" in refused.stderr
    assert chat(closed.url, "--prompt", "Hello", "--api-key", "secret").returncode == 0
    assert "nothing is said" in chat(closed.url, text=" \n").stderr


def test_a_server_that_dies_ends_the_answer_and_not_the_chat(serve: Serve, tiny: Model, tmp_path: Path) -> None:
    server = serve(tiny, *SIM, *paced(tmp_path, SLOW_STEP_US), "--sim-output-tokens", "1000")
    with typing(server.url) as typed:
        typed.until("/help")
        typed.type("Say much.")
        server.wait_for_metric("vllm:generation_tokens_total", lambda value: value > 5)
        server.kill()
        typed.until("error: the server broke off")
        typed.type("Again?")
        typed.until("error: cannot ask")
        typed.type("/exit")
        assert typed.process.wait(SECONDS) == 0
