"""Errors that wrong, malicious or too many clients receive, while other clients are served as usual."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from openai import BadRequestError, NotFoundError, RateLimitError

from tests.e2e.client import openai_client
from tests.e2e.conftest import Serve
from tests.e2e.models import TINY_CONTEXT, Model
from tests.e2e.processes import peak_memory
from tests.e2e.server import Server

ENDPOINTS = ["/v1/chat/completions", "/v1/completions", "/generate", "/tokenize", "/detokenize"]
BODY_LIMIT = 4 << 20
MEGABYTE = 1 << 20
# In seconds: more than the server allows a request to take to arrive.
PATIENCE = 90
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
COMPLETION: dict[str, Any] = {"prompt": "a", "max_tokens": 2}
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]


@pytest.fixture(scope="module")
def server(serve_for_module: Serve, tiny: Model) -> Server:
    limits = ("--max-body-bytes", str(BODY_LIMIT), "--receive-timeout", "15")
    return serve_for_module(tiny, "--served-model-name", "tiny", *limits)


def error(response: httpx2.Response, status: int) -> dict[str, Any]:
    """The error of a response, in OpenAI's shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    body = response.json()
    assert body.keys() == {"error"}
    found: dict[str, Any] = body["error"]
    assert found.keys() == {"message", "type", "param", "code"}
    assert found["message"]
    assert found["type"]
    assert "\n" not in found["message"]
    return found


def serves(server: Server) -> bool:
    """Whether a well-behaved client gets its answer."""
    answer = server.ask("/v1/completions", {"prompt": "a", "max_tokens": 2, "ignore_eos": True})
    return bool(answer["usage"]["completion_tokens"] == 2)


class Trickle:
    """A client that sends one byte at a time from a thread of its own, until the server closes the connection."""

    def __init__(self, server: Server, head: bytes, drops: bytes) -> None:
        self._socket = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
        self._socket.sendall(head)
        self._drops = drops
        self._closed = threading.Event()

    def run(self) -> bytes:
        """Runs the client; returns all bytes that the server sent before it closed the connection."""
        threading.Thread(target=self._drip, daemon=True).start()
        answer = b""
        try:
            while piece := self._socket.recv(4096):
                answer += piece
        except ConnectionResetError:
            pass
        finally:
            self._closed.set()
            self._socket.close()
        return answer

    def _drip(self) -> None:
        for drop in self._drops:
            if self._closed.wait(0.5):
                return
            try:
                self._socket.sendall(bytes([drop]))
            except OSError:
                return


@pytest.fixture(scope="module", autouse=True)
def slow_clients(server: Server) -> Iterator[dict[str, list[Future[bytes]]]]:
    """Slow clients that keep sending while the other tests of this file run."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    post = head + b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
    with ThreadPoolExecutor(32) as pool:

        def start(head: bytes, drops: bytes) -> list[Future[bytes]]:
            return [pool.submit(Trickle(server, head, drops).run) for _ in range(16)]

        yield {
            "headers": start(b"POST /v1/completions HTTP/1.1\r\n", b"X-Slow: " + b"a" * 1000),
            "body": start(post, b'{"prompt": "' + b"a" * 980),
        }


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(
    "body",
    [b"{", b"", b"nonsense", b'{"prompt": "a", "messages": [], "tokens": []} trailing', b'{"prompt": "a",}', b"\0"],
)
def test_malformed_json(server: Server, path: str, body: bytes) -> None:
    found = error(server.http.post(path, content=body), 400)
    assert (found["type"], found["code"]) == ("invalid_request_error", "malformed_json")
    assert "line 1 column" in found["message"]


@pytest.mark.parametrize("path", ENDPOINTS)
def test_json_that_is_no_object_or_goes_too_deep(server: Server, path: str) -> None:
    for body in (b"[]", b"null", b"7", b'"a"'):
        error(server.http.post(path, content=body), 400)
    deep = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    error(server.http.post(path, content=deep), 400)
    assert serves(server)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_invalid_utf8(server: Server, path: str) -> None:
    found = error(server.http.post(path, content=b'{"prompt": "\xff"}'), 400)
    assert found["code"] == "invalid_utf8"
    assert "byte 12" in found["message"]


def test_half_of_a_surrogate_pair(server: Server) -> None:
    found = error(server.http.post("/v1/completions", content=rb'{"prompt": "\ud83e"}'), 400)
    assert found["code"] == "malformed_json"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {}, "messages"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": "hi"}, "messages"),
        ("/v1/chat/completions", {"messages": [{"content": "a"}]}, "messages[0].role"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ("/v1/chat/completions", {**CHAT, "max_tokens": "many"}, "max_tokens"),
        ("/v1/chat/completions", {**CHAT, "max_tokens": -1}, "max_tokens"),
        ("/v1/chat/completions", {**CHAT, "temperature": -1}, "temperature"),
        ("/v1/chat/completions", {**CHAT, "temperature": "hot"}, "temperature"),
        ("/v1/chat/completions", {**CHAT, "top_logprobs": 3}, "top_logprobs"),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}}, "stream_options"),
        ("/v1/completions", {}, "prompt"),
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [2048]}, "prompt[0]"),
        ("/v1/completions", {"prompt": [-1]}, "prompt[0]"),
        ("/v1/completions", {"prompt": [1, "a"]}, "prompt"),
        ("/v1/completions", {**COMPLETION, "max_tokens": -1}, "max_tokens"),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 0}, "max_tokens"),
        ("/v1/completions", {**COMPLETION, "n": 0}, "n"),
        ("/v1/completions", {**COMPLETION, "n": 1.5}, "n"),
        ("/v1/completions", {**COMPLETION, "top_p": -0.1}, "top_p"),
        ("/v1/completions", {**COMPLETION, "stop": ["a", ""]}, "stop[1]"),
        ("/v1/completions", {**COMPLETION, "stop": ["a"] * 17}, "stop"),
        ("/v1/completions", {**COMPLETION, "logit_bias": {"2048": 1}}, "logit_bias.2048"),
        ("/v1/completions", {**COMPLETION, "stream": "yes"}, "stream"),
        ("/v1/completions", {**COMPLETION, "model": 7}, "model"),
        ("/generate", {}, "text"),
        ("/generate", {"text": "a", "input_ids": [1]}, "text"),
        ("/generate", {"text": "a", "sampling_params": {"top_k": -2}}, "sampling_params.top_k"),
        ("/generate", {"text": ["a", "b"], "rid": ["x"]}, "rid"),
        ("/tokenize", {}, "prompt"),
        ("/detokenize", {"tokens": [1, 2048]}, "tokens[1]"),
        ("/detokenize", {}, "tokens"),
    ],
    ids=str,
)
def test_wrong_values_are_named(server: Server, path: str, body: dict[str, Any], param: str) -> None:
    found = error(server.post(path, body), 400)
    assert (found["type"], found["param"], found["code"]) == ("invalid_request_error", param, "invalid_value")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {**CHAT, "functions": [{"name": "f"}]}, "functions"),
        ("/v1/chat/completions", {**CHAT, "stop_regex": "a"}, "stop_regex"),
        ("/v1/chat/completions", {**CHAT, "grammar": "a"}, "grammar"),
        ("/v1/chat/completions", {**CHAT, "response_format": {"type": "xml"}}, "response_format.type"),
        ("/v1/chat/completions", {**CHAT, "messages": IMAGE}, "messages[0].content[0].type=image_url"),
        ("/v1/chat/completions", {**CHAT, "modalities": ["text", "audio"]}, "modalities"),
        ("/v1/completions", {**COMPLETION, "suffix": "b"}, "suffix"),
        ("/v1/completions", {**COMPLETION, "truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),
        ("/generate", {"text": "a", "image_data": "x"}, "image_data"),
    ],
    ids=str,
)
def test_what_is_not_served_is_named(server: Server, path: str, body: dict[str, Any], param: str) -> None:
    found = error(server.post(path, body), 400)
    assert (found["param"], found["code"]) == (param, "unsupported_parameter")
    assert param in found["message"]


def test_the_clients_exceptions(server: Server) -> None:
    client = openai_client(server)
    with pytest.raises(BadRequestError) as refused:
        client.completions.create(model="tiny", prompt="a", temperature=-1)
    assert (refused.value.param, refused.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="a")
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    assert "`gpt-4`" in missing.value.message


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})]
)
def test_unknown_model(server: Server, path: str, body: dict[str, Any]) -> None:
    found = error(server.post(path, {**body, "model": "other"}), 404)
    assert (found["param"], found["code"]) == ("model", "model_not_found")
    error(server.http.get("/v1/models/other"), 404)


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_that_do_not_fit(server: Server, stream: bool) -> None:
    long = [5] * (TINY_CONTEXT + 1)
    exact = [5] * TINY_CONTEXT
    for path, body, param in (
        ("/v1/completions", {"prompt": long}, "prompt"),
        ("/v1/completions", {"prompt": exact}, "prompt"),
        ("/v1/completions", {"prompt": [[5], long]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 2 * TINY_CONTEXT}]}, "messages"),
        ("/generate", {"input_ids": long}, "input_ids"),
    ):
        found = error(server.post(path, {**body, "stream": stream}), 400)
        assert (found["code"], found["param"]) == ("context_length_exceeded", param)
        assert f"{TINY_CONTEXT} tokens" in found["message"]
    fits = server.post("/v1/completions", {"prompt": exact[:-5], "max_tokens": 5, "ignore_eos": True})
    assert fits.json()["usage"]["total_tokens"] == TINY_CONTEXT
    assert "x-forebay-ignored" not in fits.headers
    cut = server.post("/v1/completions", {"prompt": exact[:-5], "max_tokens": 10_000, "ignore_eos": True})
    assert cut.json()["usage"]["total_tokens"] == TINY_CONTEXT
    assert cut.headers["x-forebay-ignored"] == "max_tokens=5"


def test_unknown_routes_and_methods(server: Server) -> None:
    for method, path in (
        ("GET", "/nothing"),
        ("POST", "/v1/images"),
        ("GET", "/v1"),
        ("GET", "/%ff"),
        ("PUT", "/nope"),
    ):
        found = error(server.http.request(method, path), 404)
        assert found["code"] == "unknown_url"
        assert method in found["message"]
    for method, path in (
        ("GET", "/v1/completions"),
        ("DELETE", "/v1/models"),
        ("POST", "/health"),
        ("PUT", "/generate"),
    ):
        response = server.http.request(method, path)
        assert error(response, 405)["code"] == "method_not_allowed"
        assert response.headers["allow"]


def test_a_body_over_the_limit_is_not_kept(server: Server) -> None:
    """A body of 100 MB, once with its length declared and once without."""
    before = peak_memory(server.pid)

    def pieces() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(100):
            yield b"a" * MEGABYTE

    def outcome(**headers: str) -> dict[str, Any] | None:
        try:
            return error(server.http.post("/v1/completions", content=pieces(), headers=headers), 413)
        except httpx2.WriteError:
            # The server has answered and closed the connection while the client was sending.
            return None

    for found in (outcome(**{"Content-Length": str(100 * MEGABYTE + 12)}), outcome()):
        assert found is None or found["code"] == "body_too_large"
    # Room for two bodies up to the limit, buffers that grow, and the allocator; far less than 100 MB.
    assert peak_memory(server.pid) - before < 10 * BODY_LIMIT
    # With a declared length the answer comes before the body is sent.
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 104857600\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")
    # A body just below the limit is read, and its prompt is too long.
    large = server.post("/v1/completions", {"prompt": "a " * (BODY_LIMIT // 2 - 100)})
    assert error(large, 400)["code"] == "context_length_exceeded"
    assert serves(server)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"a" * MEGABYTE + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids=["nonsense", "version", "length", "chunk", "long header", "tls"],
)
def test_requests_that_are_not_http(server: Server, request_bytes: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        try:
            connection.sendall(request_bytes)
            answer = connection.recv(4096)
        except ConnectionError:
            answer = b""
        assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
    assert serves(server)


def test_a_client_that_gives_up_in_the_body(server: Server) -> None:
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            connection.sendall(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
    assert serves(server)


def test_a_full_queue(serve: Serve, tiny: Model) -> None:
    server = serve(tiny, "--max-queued-requests", "1", "--max-running-requests", "1")
    long = {"text": "a", "sampling_params": {"max_new_tokens": TINY_CONTEXT // 2, "ignore_eos": True}, "stream": True}
    name = server.http.get("/v1/models").json()["data"][0]["id"]
    with server.http.stream("POST", "/generate", json=long) as running:
        # Keep the iterator: when it is discarded, it closes the connection.
        lines = running.iter_lines()
        next(lines)
        with server.http.stream("POST", "/generate", json=long):
            server.wait_for_metric("vllm:num_requests_waiting", lambda value: value == 1)
            for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
                response = server.post(path, body)
                found = error(response, 429)
                assert (found["type"], found["code"]) == ("rate_limit_error", "queue_full")
                assert int(response.headers["retry-after"]) >= 1
            with pytest.raises(RateLimitError):
                openai_client(server).completions.create(model=name, prompt="a")
            # A request is accepted with all its choices or with none.
            error(server.post("/v1/completions", {**COMPLETION, "n": 3}), 429)
    server.wait_until_idle()
    assert serves(server)


def test_slow_clients_are_sent_away_and_keep_nobody(
    server: Server, slow_clients: dict[str, list[Future[bytes]]]
) -> None:
    """The last test of the file: the slow clients have been sending since its beginning."""
    assert serves(server)
    deadline = time.monotonic() + PATIENCE
    for kind, clients in slow_clients.items():
        for client in clients:
            answer = client.result(timeout=max(0.1, deadline - time.monotonic()))
            if kind == "body":
                head, _, body = answer.partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 408 ")
                assert json.loads(body)["error"]["code"] == "body_timeout"
            else:
                assert answer == b"" or answer.startswith(b"HTTP/1.1 408 ")
    assert serves(server)
