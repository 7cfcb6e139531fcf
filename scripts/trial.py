"""Shared by trials of packages: starts a server as a user would, asks it one question, and stops it."""

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

START_SECONDS = 300
STOP_SECONDS = 60


def free_port() -> int:
    """Returns a TCP port of the loopback interface that no process listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def wait_until_healthy(url: str, server: "subprocess.Popen[bytes]") -> None:
    """Returns when the server responds at `url`. Exits this process if it has exited, or does not respond in time."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            sys.exit(f"error: the server ended with status {server.returncode}")
        try:
            urllib.request.urlopen(url, timeout=10).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.25)
    sys.exit(f"error: no answer from {url} in {START_SECONDS} s")


def chat(url: str) -> str:
    """Returns the model's answer to a short question."""
    body = {
        "model": "smollm2",
        "max_tokens": 16,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        answer: str = json.load(response)["choices"][0]["message"]["content"]
    return answer


def serve_one_request(
    command: Sequence[str | Path], folder: Path, environment: Mapping[str, str] | None = None
) -> None:
    """Starts `command` in `folder`, asks it one question, and stops it as an operator would.

    A port and a served model name are added to the command. This process exits if anything fails.
    """
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    flags = ["--port", str(port), "--served-model-name", "smollm2"]
    server = subprocess.Popen([*command, *flags], cwd=folder, env=environment)
    try:
        wait_until_healthy(f"{base}/health", server)
        answer = chat(f"{base}/v1/chat/completions")
        server.send_signal(signal.SIGTERM)
        status = server.wait(STOP_SECONDS)
    finally:
        server.kill()
    print(f"the server said {answer!r} and ended with status {status}", flush=True)
    if not answer.strip() or status != 0:
        sys.exit("error: an answer and status 0 were expected")
