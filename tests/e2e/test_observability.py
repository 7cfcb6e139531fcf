"""Output for operators: spans, log lines, the banner."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx2

from tests.e2e.conftest import Serve
from tests.e2e.models import Model
from tests.e2e.server import BINARY, START_SECONDS, free_port
from tests.e2e.waiting import eventually

PROMPT = {"prompt": "Rivers run", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


class Collector:
    """Collects what an OTLP exporter posts."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
                """Logs nothing."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def test_spans_reach_an_otlp_collector(serve: Serve, tiny: Model) -> None:
    """The span of a request is exported, at the latest when the server stops."""
    collector = Collector()
    server = serve(tiny, "--otlp-traces-endpoint", collector.url)
    answer = server.ask("/v1/completions", PROMPT)
    assert server.terminate() == 0
    collector.server.shutdown()
    sent = b"".join(collector.bodies)
    for part in (b"forebay", b"request", b"prompt_tokens", b"completion_tokens", answer["id"].encode()):
        assert part in sent


def test_json_log_lines_are_json(serve: Serve, tiny: Model) -> None:
    """Every line is an object, also the lines about steps."""
    server = serve(tiny, "--log-format", "json", "--log-interval", "0.2")
    server.ask("/v1/completions", {**PROMPT, "max_tokens": 64})

    def step_line() -> bool:
        return "Running: " in server.log()

    eventually(step_line, "a line about steps is written")
    assert server.terminate() == 0
    lines = [line for line in server.log().splitlines() if line.startswith("{")]
    messages = [json.loads(line)["message"] for line in lines]
    steps = [message for message in messages if "Avg generation throughput" in message]
    assert steps
    assert all("Gaps between steps" in message for message in steps)


def test_the_banner_shows_a_command_that_works(serve: Serve, tiny: Model) -> None:
    """The curl command works when it is pasted unchanged."""
    server = serve(tiny)

    def banner() -> bool:
        return "Stop: Ctrl-C" in server.log()

    eventually(banner, "the banner is written")
    log = server.log()
    command = log[log.index("curl -N") : log.index("Metrics:")].replace("\\\n", " ")
    output = subprocess.run(shlex.split(command), capture_output=True, text=True, check=True, timeout=120).stdout
    assert output.rstrip().endswith("data: [DONE]")
    assert '"content"' in output


def test_nobody_has_to_read_the_log(tiny: Model) -> None:
    """A pipe that is not read fills after some hundred lines; the server still answers, and ends normally."""
    port = free_port()
    command = [str(BINARY), "serve", str(tiny.path), "--device", "sim", "--log-level", "debug", "--port", str(port)]
    with (
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as process,
        httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as client,
    ):
        try:

            def is_healthy() -> bool:
                try:
                    return client.get("/health").status_code == 200
                except httpx2.TransportError:
                    return False

            eventually(is_healthy, "/health answers with 200", START_SECONDS)
            for _ in range(2000):
                # Each refused request writes a line.
                assert client.get("/nothing").status_code == 404
            assert is_healthy()
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_answers_are_counted_by_route_and_status(serve: Serve, tiny: Model) -> None:
    server = serve(tiny, "--device", "sim")
    for body in ({"prompt": "a", "max_tokens": 1}, {"prompt": 1.5}):
        server.http.post("/v1/completions", json=body)
    server.http.get("/nowhere/at/all")
    server.http.request("BREW", "/v1/models")
    route = {"handler": "/v1/completions", "method": "POST"}
    assert server.metric("http_requests_total", **route, status="2xx") == 1
    assert server.metric("http_requests_total", **route, status="4xx") == 1
    assert server.metric("http_requests_total", handler="none", method="GET", status="4xx") == 1
    assert server.metric("http_requests_total", handler="/v1/models", method="other", status="4xx") == 1
    assert server.metric("http_request_duration_seconds_count", **route) == 2
    assert server.metric("process_resident_memory_bytes") > 1 << 20
