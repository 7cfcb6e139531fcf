"""API keys, host names, TLS, sockets, and limits on connections."""

from __future__ import annotations

import os
import resource
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest

from tests.e2e.conftest import Serve
from tests.e2e.models import Model
from tests.e2e.processes import descendants
from tests.e2e.server import BINARY, ROOT, Server, free_port
from tests.e2e.simulated import SIM, paced
from tests.e2e.waiting import eventually

DATA = ROOT / "crates/http/tests/data"
COMPLETION = {"prompt": "a", "max_tokens": 2, "ignore_eos": True}
FILES = 300


def code(response: httpx2.Response) -> tuple[int, str]:
    """The status and the code of an error."""
    return response.status_code, response.json()["error"]["code"]


@pytest.fixture
def few_files() -> Iterator[None]:
    """Processes that start during the test may open only a few files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES // 2, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_limit_of_open_files_is_raised(serve: Serve, tiny: Model, few_files: None) -> None:
    server = serve(tiny, *SIM)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE) == (hard, hard)


def test_health_is_told_whoever_sits_there(tmp_path: Path, tiny: Model) -> None:
    """With more idle connections than open files allowed, the server closes idle ones, and no client waits."""
    limit = ["prlimit", f"--nofile={FILES}:{FILES}"]
    port = free_port()
    arguments = [str(tiny.path), *SIM, "--log-interval", "0", "--port", str(port)]
    with ExitStack() as stack:
        log = stack.enter_context((tmp_path / "log").open("wb"))
        process = subprocess.Popen([*limit, str(BINARY), "serve", *arguments], stdout=log, stderr=log)
        stack.callback(process.wait)
        stack.callback(process.kill)
        url = f"http://127.0.0.1:{port}"

        def healthy() -> bool:
            try:
                return httpx2.get(f"{url}/health", timeout=20, trust_env=False).status_code == 200
            except httpx2.TransportError:
                return False

        eventually(healthy, "the server is ready", 60)
        for _ in range(2 * FILES):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
        for path in ("/health", "/livez", "/v1/models"):
            assert httpx2.get(url + path, timeout=20, trust_env=False).status_code == 200
        assert len(list(Path(f"/proc/{process.pid}/fd").iterdir())) < FILES


def test_a_health_port_answers_when_all_places_are_taken(serve: Serve, tiny: Model) -> None:
    port = free_port()
    server = serve(tiny, *SIM, "--health-port", str(port), "--max-connections", "1")
    url = f"http://127.0.0.1:{port}"
    for path in ("/livez", "/health", "/metrics"):
        assert httpx2.get(url + path, trust_env=False).status_code == 200
    assert httpx2.get(f"{url}/v1/models", trust_env=False).status_code == 404
    assert server.http.get("/v1/models").status_code == 200


def test_too_many_connections_for_the_files_is_said_at_start(tiny: Model, tmp_path: Path) -> None:
    server = Server(tiny.path, *SIM, "--max-connections", str(1 << 31), log=tmp_path / "log")
    assert server.process.wait(60) == 1
    assert "ulimit -n" in server.log()
    server.kill()


def test_a_web_page_cannot_ask(serve: Serve, tiny: Model) -> None:
    """The default server: bound to this machine, without a key."""
    server = serve(tiny, *SIM)
    rebound = server.post("/v1/completions", COMPLETION, headers={"Host": "evil.example"})
    assert code(rebound) == (403, "host_not_allowed")
    assert "--allowed-hosts" in rebound.json()["error"]["message"]
    page = {"Origin": "https://evil.example", "Content-Type": "text/plain"}
    for path in ("/v1/completions", "/flush_cache", "/replicas/0/drain"):
        refused = server.http.post(path, content=b'{"prompt": "a"}', headers=page)
        assert code(refused) == (403, "origin_not_allowed")
        assert "--allowed-origins" in refused.json()["error"]["message"]
    assert server.http.get("/flush_cache").status_code == 405
    assert server.ask("/v1/completions", COMPLETION)["usage"]["completion_tokens"] == 2


def test_hosts_and_pages_that_are_named_may_ask(serve: Serve, tiny: Model) -> None:
    origin = "https://chat.example"
    server = serve(tiny, *SIM, "--allowed-hosts", "llm.example,127.0.0.1", "--allowed-origins", origin)
    answer = server.post("/v1/completions", COMPLETION, headers={"Host": "llm.example", "Origin": origin})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == origin
    assert server.http.get("/health", headers={"Host": "localhost"}).status_code == 403


def test_keys_from_files_and_the_environment(tiny: Model, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice\n\nbob\n")
    flags = ("--api-key-file", keys, "--threads", "1", "--dtype", "float32")
    environment = {"FOREBAY_API_KEY": "carol", "FOREBAY_ADMIN_API_KEY": "root"}
    server = Server(tiny.path, *flags, log=tmp_path / "log", environment=environment)
    try:
        server.wait_for_health()
        for key, generates, administers in (("alice", 200, 401), ("bob", 200, 401), ("carol", 200, 401)):
            bearer = {"Authorization": f"Bearer {key}"}
            assert server.post("/v1/completions", COMPLETION, headers=bearer).status_code == generates
            assert server.http.get("/server_info", headers=bearer).status_code == administers
        root = {"X-Api-Key": "root"}
        info = server.http.get("/server_info", headers=root)
        assert info.status_code == 200
        shown = info.text + server.log()
        assert not any(key in shown for key in ("alice", "bob", "carol"))
        assert server.post("/flush_cache", {}, headers=root).status_code == 200
        assert server.http.get("/health_generate").status_code == 401
        # No hand has a key in its environment.
        below = descendants(server.pid)
        assert below
        for pid in below:
            assert b"_KEY=" not in Path(f"/proc/{pid}/environ").read_bytes()
    finally:
        server.kill()


def test_a_key_on_the_command_line_is_warned_of(serve: Serve, tiny: Model) -> None:
    server = serve(tiny, *SIM, "--api-key", "secret", "--api-key", "other")
    assert "list of processes" in server.log()
    assert "secret" not in server.log()
    for key in ("secret", "other"):
        assert server.http.get("/v1/models", headers={"X-Api-Key": key}).status_code == 200


def test_several_keys_without_one_of_administrators_are_warned_of(serve: Serve, tiny: Model) -> None:
    keys = ("--api-key", "a", "--api-key", "b")
    assert "without --admin-api-key" in serve(tiny, *SIM, *keys).log()
    assert "without --admin-api-key" not in serve(tiny, *SIM, *keys, "--admin-api-key", "c").log()


def test_a_root_path(serve: Serve, tiny: Model) -> None:
    server = serve(tiny, *SIM, "--root-path", "/llm")
    for path in ("/llm/v1/models", "/v1/models"):
        assert server.http.get(path).status_code == 200
    assert server.http.get("/openapi.json").json()["servers"] == [{"url": "/llm"}]


def healthy(client: httpx2.Client) -> bool:
    """Whether a server is ready; false if it does not listen yet."""
    try:
        return client.get("/health").status_code == 200
    except httpx2.TransportError:
        return False


def test_tls(tiny: Model, tmp_path: Path) -> None:
    certificate, key = DATA / "certificate.pem", DATA / "key.pem"
    encrypted = ("--ssl-certfile", certificate, "--ssl-keyfile", DATA / "encrypted_key.pem")
    refused = Server(tiny.path, *SIM, *encrypted, log=tmp_path / "refused")
    assert refused.process.wait(60) == 1
    assert "the key is encrypted" in refused.log()
    refused.kill()

    server = Server(tiny.path, *SIM, "--ssl-certfile", certificate, "--ssl-keyfile", key, log=tmp_path / "log")
    context = ssl.create_default_context(cafile=str(certificate))
    url = f"https://localhost:{server.port}"
    try:
        with httpx2.Client(base_url=url, verify=context, timeout=60, trust_env=False) as client:
            eventually(lambda: healthy(client), "the server is ready", 60)
            body = {**COMPLETION, "max_tokens": 40}
            whole = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
            streamed = client.post("/v1/completions", json={**body, "stream": True}).text
            assert streamed.count("data: ") >= 2
            assert streamed.endswith("data: [DONE]\n\n")
            assert whole
        banner = url.replace("localhost", "127.0.0.1")
        eventually(lambda: banner in server.log(), "the log names the address", 60)
    finally:
        server.kill()


def test_a_unix_socket(tiny: Model, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    # A killed process leaves its socket file behind.
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    server = Server(tiny.path, *SIM, "--uds", path, log=tmp_path / "log")
    try:
        transport = httpx2.HTTPTransport(uds=str(path))
        with httpx2.Client(base_url="http://any", transport=transport, timeout=60) as client:
            eventually(lambda: healthy(client), "the server is ready", 60)
            answer = client.post("/v1/completions", json={**COMPLETION, "stream": True})
            assert answer.text.endswith("data: [DONE]\n\n")
        second = Server(tiny.path, *SIM, "--uds", path, log=tmp_path / "second")
        assert second.process.wait(60) == 1
        assert "another process listens there" in second.log()
        second.kill()
        assert server.terminate() == 0
        assert not os.path.lexists(path)
    finally:
        server.kill()


def test_a_client_that_sends_more_and_leaves_frees_its_request(serve: Serve, tiny: Model, tmp_path: Path) -> None:
    server = serve(tiny, *SIM, *paced(tmp_path, step_us=100_000))
    body = b'{"prompt": "a", "max_tokens": 400, "ignore_eos": true}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(head + body + b"G")
        server.wait_for_metric("vllm:num_requests_running", lambda running: running == 1)
    # The request would run for another 40 seconds.
    server.wait_for_metric("vllm:num_requests_running", lambda running: running == 0, seconds=20)
    assert server.metric("vllm:generation_tokens_total") < 400
