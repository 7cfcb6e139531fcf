"""`forebay run-batch`: files of requests, and runs that are killed, interrupted, or lose their server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.e2e.client import Json
from tests.e2e.conftest import Serve
from tests.e2e.embedders import CrossEncoder, MiniLM
from tests.e2e.models import Model
from tests.e2e.processes import alive, children, descendants, peak_memory
from tests.e2e.server import BINARY, CACHE, Server
from tests.e2e.simulated import SIM, lines, paced
from tests.e2e.waiting import eventually

SECONDS = 120
MIB = 1 << 20
FINE, STOPPED, SOME_ERRORS = 0, 1, 3
TOKENS = ("--sim-output-tokens", "5")


@dataclass
class Files:
    """The input and the output file of a run."""

    folder: Path

    @property
    def flags(self) -> tuple[str, ...]:
        return "-i", str(self.folder / "in.jsonl"), "-o", str(self.output)

    @property
    def output(self) -> Path:
        return self.folder / "out.jsonl"

    def write(self, requests: Sequence[Json | str]) -> None:
        """Writes the input: requests as JSON, and strings unchanged."""
        text = "".join(one + "\n" if isinstance(one, str) else lines([one]) for one in requests)
        (self.folder / "in.jsonl").write_text(text)

    def answers(self) -> list[Json]:
        """The complete lines of the output."""
        if not self.output.exists():
            return []
        whole, _, _ = self.output.read_text().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    def has(self, count: int) -> bool:
        """Whether the output has exactly this many answers."""
        return len(self.answers()) == count

    def names(self) -> list[str]:
        """The `custom_id` of each answer."""
        return [str(answer["custom_id"]) for answer in self.answers()]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    folder = tmp_path / "batch"
    folder.mkdir()
    return Files(folder)


def request(name: str, url: str = "/v1/completions", **body: object) -> Json:
    return {"custom_id": name, "method": "POST", "url": url, "body": body or {"prompt": name, "max_tokens": 5}}


def start(files: Files, *flags: str | Path, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Starts `run-batch` as a process."""
    return subprocess.Popen(
        [BINARY, "run-batch", *files.flags, *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "NO_COLOR": "1", "FOREBAY_CACHE": str(CACHE), **(environment or {})},
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Returns the exit status and the last line of standard error. Standard output must be empty."""
    output, error = process.communicate(timeout=SECONDS)
    assert output == ""
    return process.returncode, error.strip().splitlines()[-1] if error.strip() else ""


def run(files: Files, *flags: str | Path, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Runs `run-batch` to its end."""
    return finish(start(files, *flags, environment=environment))


@dataclass
class Stub:
    """A server that answers some requests at once, and the others after `go_on`."""

    url: str
    may: int
    """The number of requests that are answered at once."""
    go_on: threading.Event = field(default_factory=threading.Event)
    seen: list[str] = field(default_factory=list)
    """The prompts of all requests received; each prompt is the request's name."""
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def stub(may: int) -> Iterator[Stub]:
    """Serves until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(404, {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            assert self.headers["priority"] == "u=7"
            with served.lock:
                served.seen.append(body["prompt"])
                at_once = len(served.seen) <= served.may
            if not at_once:
                served.go_on.wait(SECONDS)
            self._answer(200, {"text": body["prompt"]})

        def _answer(self, status: int, body: Json) -> None:
            text = json.dumps(body, indent=1).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    served = Stub(f"http://127.0.0.1:{server.server_address[1]}", may)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield served
    finally:
        served.go_on.set()
        server.shutdown()
        server.server_close()
        thread.join()


def test_answers_are_those_of_the_routes(serve: Serve, tiny: Model, files: Files) -> None:
    chat = [{"role": "user", "content": "Hello"}]
    requests = [
        request("chat", "/v1/chat/completions", messages=chat),
        request("text", "/v1/completions", prompt="Hello"),
        request("response", "/v1/responses", input="Hello", store=False),
        request("message", "/v1/messages", messages=chat, max_tokens=5),
        request("tokens", "/tokenize", prompt="Hello"),
    ]
    files.write(requests)
    server = serve(tiny, *SIM, *TOKENS)
    assert run(files, "--url", server.url) == (FINE, "5 answered, 0 before, 0 errors")
    by_url = {str(answer["custom_id"]): answer for answer in files.answers()}
    files.output.unlink()
    # The same requests with a server that the run starts itself; it ignores the keys of the environment.
    keys = {"FOREBAY_API_KEY": "secret", "FOREBAY_ADMIN_API_KEY": "secret"}
    assert run(files, "--model", tiny.path, "--", *SIM, *TOKENS, environment=keys)[0] == FINE
    own = {str(answer["custom_id"]): answer for answer in files.answers()}
    assert by_url.keys() == own.keys() == {str(one["custom_id"]) for one in requests}
    for one in requests:
        name = str(one["custom_id"])
        plain = server.ask(str(one["url"]), one["body"])
        for answer in (by_url[name], own[name]):
            assert answer["error"] is None
            response = answer["response"]
            assert response["status_code"] == 200
            assert answer["id"] == f"batch_req_{response['request_id']}"
            assert _without_names(response["body"]) == _without_names(plain)


def _without_names(value: object) -> object:
    """An answer without the fields that differ in every response."""
    if isinstance(value, dict):
        other = ("id", "created", "created_at", "completed_at", "item_id")
        return {key: _without_names(inner) for key, inner in value.items() if key not in other}
    return [_without_names(inner) for inner in value] if isinstance(value, list) else value


def test_models_that_pool(tmp_path: Path, files: Files) -> None:
    minilm = MiniLM(tmp_path / "minilm")
    files.write([request(str(at), "/v1/embeddings", input=["a", f"b{at}"]) for at in range(20)])
    # The run accepts a flag of vLLM that Forebay does not need.
    assert run(files, "--model", minilm.path, "--", "--trust-remote-code")[0] == FINE
    assert Counter(files.names()) == Counter(str(at) for at in range(20))
    assert all(len(answer["response"]["body"]["data"]) == 2 for answer in files.answers())
    files.output.unlink()
    cross = CrossEncoder(tmp_path / "cross", minilm)
    files.write([request("a", "/v1/rerank", query="bread", documents=["flour", "a cat"])])
    assert run(files, "--model", cross.path)[0] == FINE
    assert len(files.answers()[0]["response"]["body"]["results"]) == 2


def test_lines_that_are_no_requests_have_error_lines(serve: Serve, tiny: Model, files: Files) -> None:
    server = serve(tiny, *SIM, *TOKENS)
    files.write(
        [
            request("a"),
            "nonsense",
            "",
            request("a"),
            request("b", "/flush_cache"),
            request("c", "/v1/completions", prompt="x", stream=True),
            {"method": "POST", "url": "/v1/completions", "body": {}},
            request("d", "/v1/completions", prompt=7.5),
            " " * (65 * MIB),
            request("e"),
        ]
    )
    done = run(files, "--url", server.url)
    assert done == (SOME_ERRORS, "9 answered, 0 before, 7 errors")
    text = files.output.read_bytes()
    found = files.answers()
    by_line = {answer["error"]["line"]: answer for answer in found if answer["error"]}
    faults = {number: (answer["custom_id"], answer["error"]["code"]) for number, answer in by_line.items()}
    assert faults == {
        2: (None, "invalid_json_line"),
        4: ("a", "duplicate_custom_id"),
        5: ("b", "invalid_url"),
        6: ("c", "invalid_value"),
        7: (None, "missing_required_parameter"),
        9: (None, "line_too_long"),
    }
    assert all(answer["response"] is None for answer in by_line.values())
    answered = {answer["custom_id"]: answer["response"] for answer in found if answer["response"]}
    assert {name: response["status_code"] for name, response in answered.items()} == {"a": 200, "d": 400, "e": 200}
    assert answered["d"]["body"]["error"]["param"] == "prompt"
    # All requests have their answers, so the run needs no server and writes nothing.
    server.kill()
    assert run(files, "--url", server.url) == (SOME_ERRORS, "0 answered, 9 before, 7 errors")
    assert files.output.read_bytes() == text


def test_a_killed_run_goes_on_and_asks_for_no_answer_again(files: Files) -> None:
    count = 40
    files.write([request(str(at)) for at in range(count)])
    for at, may in enumerate((0, 1, 7, 30, 31)):
        with stub(may - len(files.names())) as server:
            before = set(files.names())
            process = start(files, "--url", server.url, "--max-concurrency", str(1 + 3 * at))
            eventually(partial(files.has, may), "the answers are written")
            process.kill()
            process.communicate()
            assert not before & set(server.seen)
        # Append a part of a line, as a kill in the middle of a write leaves it.
        with files.output.open("a") as output:
            output.write('{"id":"batch_req_1","custom_id":"39","respon'[: 11 * at])
    with stub(count) as server:
        before = set(files.names())
        assert run(files, "--url", server.url) == (FINE, f"{count - 31} answered, 31 before, 0 errors")
        assert len(server.seen) == count - 31
        assert not before & set(server.seen)
    assert Counter(files.names()) == Counter(str(at) for at in range(count))
    assert all(answer["response"]["body"] == {"text": answer["custom_id"]} for answer in files.answers())


def test_the_server_ends_with_a_killed_run(tiny: Model, files: Files, tmp_path: Path) -> None:
    count = 30
    files.write([request(str(at)) for at in range(count)])
    slow = ("--model", tiny.path, "--max-concurrency", "2", "--", *SIM, *TOKENS, *paced(tmp_path, 20_000))
    process = start(files, *slow)
    eventually(lambda: len(files.names()) > 3, "some answers are written")
    below = descendants(process.pid)
    assert below
    process.kill()
    process.communicate()
    eventually(lambda: not any(alive(pid) for pid in below), "the server has ended")
    before = len(files.names())
    assert run(files, *slow) == (FINE, f"{count - before} answered, {before} before, 0 errors")
    assert Counter(files.names()) == Counter(str(at) for at in range(count))


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_stops_its_server(tiny: Model, files: Files, tmp_path: Path, ending: signal.Signals) -> None:
    files.write([request(str(at)) for at in range(100)])
    slow = ("--model", tiny.path, "--max-concurrency", "2", "--", *SIM, *TOKENS, *paced(tmp_path, 20_000))
    private = tmp_path / "private"
    private.mkdir()
    process = start(files, *slow, environment={"TMPDIR": str(private)})
    eventually(lambda: len(files.names()) > 3, "some answers are written")
    below = descendants(process.pid)
    process.send_signal(ending)
    status, line = finish(process)
    assert status == STOPPED
    assert line.startswith("error: stopped after ")
    assert line.endswith("the same command goes on from there: interrupted")
    assert f" {len(files.names())} answers" in line
    assert not any(alive(pid) for pid in below)
    assert not list(private.iterdir())


def test_a_server_that_dies_ends_the_run(tiny: Model, files: Files, tmp_path: Path) -> None:
    files.write([request(str(at)) for at in range(20)])
    slow = ("--model", tiny.path, "--max-concurrency", "2", "--", *SIM, *TOKENS, *paced(tmp_path, 20_000))
    process = start(files, *slow)
    eventually(lambda: len(files.names()) > 3, "some answers are written")
    for pid in children(process.pid):
        os.kill(pid, signal.SIGKILL)
    _, error = process.communicate(timeout=SECONDS)
    assert process.returncode == STOPPED
    assert "goes on from there: the server has ended (signal: 9" in error
    assert run(files, *slow)[0] == FINE
    assert Counter(files.names()) == Counter(str(at) for at in range(20))


def test_a_run_waits_for_a_server_that_is_started_again(tiny: Model, files: Files, tmp_path: Path) -> None:
    files.write([request(str(at)) for at in range(20)])
    flags = (tiny.path, *SIM, *TOKENS, *paced(tmp_path, 20_000))
    server = Server(*flags, log=tmp_path / "first.log")
    try:
        server.wait_for_health()
        process = start(files, "--url", server.url, "--max-concurrency", "2")
        eventually(lambda: len(files.names()) > 3, "some answers are written")
    finally:
        server.kill()
    again = Server(*flags, log=tmp_path / "second.log", port=server.port)
    try:
        assert finish(process)[0] == FINE
    finally:
        again.kill()
    assert Counter(files.names()) == Counter(str(at) for at in range(20))


def test_interactive_requests_of_the_same_client_go_before_a_run(
    serve: Serve, tiny: Model, files: Files, tmp_path: Path
) -> None:
    count, slots = 60, 2
    files.write([request(str(at), prompt=[at, 1, 2], max_tokens=40, ignore_eos=True) for at in range(count)])
    server = serve(tiny, *SIM, *paced(tmp_path, 5_000), "--max-running-requests", str(slots))
    process = start(files, "--url", server.url, "--max-concurrency", "50")
    server.wait_for_metric("vllm:num_requests_waiting", lambda waiting: waiting > 40)
    before = len(files.names())
    for at in range(20):
        server.ask("/v1/completions", {"prompt": [3, at], "max_tokens": 2, "ignore_eos": True})
    # Only batch requests that already ran may have finished: the user always has one slot.
    assert len(files.names()) - before <= 20 * 4 // 40 + slots
    assert server.metric("vllm:num_requests_waiting") > 20
    assert server.metric("vllm:num_preemptions_total") >= 1
    assert finish(process) == (FINE, f"{count} answered, 0 before, 0 errors")
    assert Counter(files.names()) == Counter(str(at) for at in range(count))
    assert all(answer["response"]["body"]["usage"]["completion_tokens"] == 40 for answer in files.answers())


def test_what_prevents_a_run_is_said(serve: Serve, tiny: Model, files: Files) -> None:
    server = serve(tiny, *SIM, *TOKENS, "--api-key", "secret")
    files.write([request("a")])
    status, line = run(files, "--url", server.url)
    assert (status, files.names()) == (STOPPED, [])
    assert "API key" in line
    assert run(files, "--url", server.url, "--api-key", "secret")[0] == FINE
    files.output.unlink()
    for flags, reason in (
        (("--model", str(tiny.path), "--", "--no-such-flag"), "--no-such-flag"),
        (("--model", str(files.folder / "nothing")), "nothing"),
    ):
        process = start(files, *flags)
        _, error = process.communicate(timeout=SECONDS)
        assert process.returncode != FINE
        assert reason in error
    (files.folder / "in.jsonl").rename(files.folder / "moved.jsonl")
    assert "in.jsonl: No such file" in run(files, "--url", server.url)[1]
    (files.folder / "moved.jsonl").rename(files.folder / "in.jsonl")
    # Neither a letter nor the input file is a file of answers.
    for text in ("Dear sir,\n", (files.folder / "in.jsonl").read_text()):
        files.output.write_text(text)
        status, line = run(files, "--url", server.url)
        assert status == STOPPED
        assert "line 1 is no answer of a batch" in line
        assert files.output.read_text() == text


def test_one_run_writes_at_a_time(files: Files) -> None:
    files.write([request("a"), request("b")])
    with stub(1) as server:
        first = start(files, "--url", server.url)
        eventually(lambda: len(files.names()) == 1, "an answer is written")
        status, line = run(files, "--url", server.url)
        assert status == STOPPED
        assert "another process writes to it" in line
        server.go_on.set()
        assert finish(first)[0] == FINE
    assert sorted(files.names()) == ["a", "b"]


def test_requests_may_come_through_a_pipe(files: Files) -> None:
    text = lines(request(str(at)) for at in range(10))
    with stub(10) as server:
        command = [str(BINARY), "run-batch", "-i", "-", "-o", str(files.output), "--url", server.url]
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stderr) == (FINE, "10 answered, 0 before, 0 errors\n")
    assert Counter(files.names()) == Counter(str(at) for at in range(10))


def test_memory_does_not_grow_with_the_files(files: Files) -> None:
    count, padding = 150_000, "x" * 1000
    with (files.folder / "in.jsonl").open("w") as requests, files.output.open("w") as answers:
        for at in range(count):
            requests.write(json.dumps(request(f"{padding}{at}")) + "\n")
            answers.write(
                f'{{"id":"batch_req_1","custom_id":"{padding}{at}","response":{{"status_code":200}},"error":null}}\n'
            )
        requests.write(json.dumps(request("last")) + "\n")
    with stub(0) as server:
        process = start(files, "--url", server.url)
        eventually(lambda: server.seen, "the run has skipped all requests but the last", SECONDS)
        # The names alone take 150 MB.
        assert peak_memory(process.pid) < 64 * MIB
        server.go_on.set()
        assert finish(process) == (FINE, f"1 answered, {count} before, 0 errors")
