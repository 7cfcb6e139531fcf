"""`forebay eval gsm8k` against a scripted server, and against a real server and transformers."""

from __future__ import annotations

import json
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks.studies.gsm8k_reference import STOP, Reference, differences, last_integer, make_prompts, read_jsonl
from tests.e2e.models import TinyModel
from tests.e2e.server import BINARY, Server

DATA = Path(__file__).parent / "gsm8k"
TEST, TRAIN = read_jsonl(DATA / "test.jsonl"), read_jsonl(DATA / "train.jsonl")
SECONDS = 300

Json = dict[str, Any]
# Returns the answer to a question at an attempt (both are counted from 0): a text, or an HTTP status.
Script = Callable[[int, int], str | int]


@dataclass
class Scripted:
    """A scripted server, and the requests that it got."""

    url: str
    bodies: list[tuple[str, Json]] = field(default_factory=list)
    """Path and body of each request."""


def question_number(body: Json) -> int:
    prompt = body.get("text") or body.get("prompt") or body["messages"][0]["content"]
    last = prompt.rpartition("Question: ")[2].removesuffix("\nAnswer:")
    return [one["question"] for one in TEST].index(last)


def reply(path: str, text: str) -> Json:
    usage = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
    match path:
        case "/generate":
            return {"text": text, "meta_info": {**usage, "finish_reason": {"type": "stop"}}}
        case "/v1/completions":
            return {"choices": [{"index": 0, "text": text, "finish_reason": "stop"}], "usage": usage}
        case "/v1/chat/completions":
            message = {"role": "assistant", "content": text}
            return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}
    raise AssertionError(path)


@contextmanager
def scripted(script: Script) -> Iterator[Scripted]:
    """A server on a free port whose answers are those of the script."""
    attempts: Counter[int] = Counter()
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            """Logs nothing."""

        def answer(self, status: int, value: Json) -> None:
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            self.answer(200, {"object": "list", "data": [{"id": "the-model", "object": "model"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            index = question_number(body)
            with lock:
                server.bodies.append((self.path, body))
                attempt = attempts[index]
                attempts[index] += 1
            said = script(index, attempt)
            if isinstance(said, str):
                self.answer(200, reply(self.path, said))
            else:
                self.answer(said, {"error": {"message": "out of order", "type": "server_error"}})

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server = Scripted(f"http://127.0.0.1:{http.server_port}")
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


@dataclass(frozen=True)
class Run:
    """The results of a run of the command."""

    status: int
    stdout: str
    stderr: str
    summary: Json
    answers: list[Json]


def evaluate(folder: Path, url: str, *flags: str, train: Path = DATA / "train.jsonl") -> Run:
    summary, raw = folder / "summary.json", folder / "raw.jsonl"
    command: list[str | Path] = [
        BINARY,
        "eval",
        "gsm8k",
        "--base-url",
        url,
        "--data-path",
        DATA / "test.jsonl",
        "--train-path",
        train,
    ]
    command += ["--output-file", summary, "--raw-result-file", raw, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    read = summary.is_file() and summary.read_text()
    answers = read_jsonl(raw) if raw.is_file() else []
    return Run(done.returncode, done.stdout, done.stderr, json.loads(read) if read else {}, answers)


def right(index: int) -> str:
    return f" so it is\n#### {last_integer(TEST[index]['answer'])}"


def mixed(index: int, _: int) -> str:
    """Question 1 gets a wrong answer, question 2 gets none, and all others get the right one."""
    return {1: " 1 or rather 1,000,001", 2: " I do not know"}.get(index, right(index))


@pytest.mark.parametrize(
    ("backend", "path"),
    [("sglang", "/generate"), ("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")],
)
def test_numbers_and_requests(tmp_path: Path, backend: str, path: str) -> None:
    with scripted(mixed) as server:
        run = evaluate(tmp_path, server.url, "--backend", backend, "--num-shots", "3", "--num-questions", "8")
    assert run.status == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[:2] == ["Accuracy: 0.750", "Invalid: 0.125"]
    assert [line.split(":")[0] for line in lines[2:]] == ["Latency", "Output throughput"]
    summary = run.summary
    assert (summary["accuracy"], summary["invalid"], summary["correct"]) == (0.75, 0.125, 6)
    assert (summary["num_questions"], summary["failed"], summary["retried"], summary["errors"]) == (8, 0, 0, {})
    assert (summary["backend"], summary["base_url"], summary["model"]) == (backend, server.url, "the-model")
    assert summary["output_tokens"] == 8 * 7
    assert summary["output_throughput"] == pytest.approx(8 * 7 / summary["latency"])

    prompts = make_prompts(TEST[:8], TRAIN[:3])
    assert [answer["prompt"] for answer in run.answers] == prompts
    assert [answer["index"] for answer in run.answers] == list(range(8))
    assert [answer["text"] for answer in run.answers] == [mixed(index, 0) for index in range(8)]
    assert [answer["label"] for answer in run.answers] == [last_integer(one["answer"]) for one in TEST[:8]]
    assert [answer["predicted"] for answer in run.answers[1:3]] == [1000001, None]
    assert [answer["correct"] for answer in run.answers] == [index not in (1, 2) for index in range(8)]
    assert all(answer["tokens"] == 7 and answer["latency"] > 0 for answer in run.answers)

    assert Counter(where for where, _ in server.bodies) == {path: 8}
    for _, body in server.bodies:
        prompt = prompts[question_number(body)]
        match backend:
            case "sglang":
                sampling = {"temperature": 0, "max_new_tokens": 512, "stop": list(STOP)}
                assert body == {"text": prompt, "sampling_params": sampling, "stream": False}
            case _:
                asked = (
                    {"prompt": prompt} if backend == "openai" else {"messages": [{"role": "user", "content": prompt}]}
                )
                sampling = {"temperature": 0, "max_tokens": 512, "stop": list(STOP)}
                assert body == {"model": "the-model", **asked, **sampling, "stream": False}


def test_failed_requests_are_reported_and_not_scored(tmp_path: Path) -> None:
    with scripted(lambda index, attempt: 500 if index in (0, 4) else mixed(index, attempt)) as server:
        run = evaluate(tmp_path, server.url, "--backend", "sglang", "--num-questions", "6")
    assert run.status != 0
    assert "2 of 6 requests failed" in run.stderr
    assert run.stdout.startswith("Accuracy: 0.500\nInvalid: 0.250\n")
    assert run.stdout.count("Failed: 2 of 6: ") == 1
    assert "out of order" in run.stdout
    assert run.summary["failed"] == sum(run.summary["errors"].values()) == 2
    assert [answer["error"] is None for answer in run.answers] == [index not in (0, 4) for index in range(6)]
    assert [answer["text"] for answer in run.answers if answer["error"]] == ["", ""]


def test_retries(tmp_path: Path) -> None:
    """Question 0 is answered at the third attempt, question 3 never, and all others at the first."""

    def script(index: int, attempt: int) -> str | int:
        return 503 if index == 3 or (index == 0 and attempt < 2) else right(index)

    with scripted(script) as server:
        run = evaluate(tmp_path, server.url, "--num-questions", "5", "--retries", "2")
    assert run.status != 0
    assert (run.summary["accuracy"], run.summary["failed"], run.summary["retried"]) == (1, 1, 4)
    assert len(server.bodies) == 5 + 4


def test_so_many_at_a_time_and_no_more(tmp_path: Path) -> None:
    at_once, most = 0, 0
    lock = threading.Lock()
    # The server answers when five requests have arrived. With fewer, the barrier would time out.
    barrier = threading.Barrier(5, timeout=SECONDS)

    def script(index: int, _: int) -> str:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        barrier.wait()
        with lock:
            at_once -= 1
        # The server answers only after all five are subtracted from the count.
        barrier.wait()
        return right(index)

    with scripted(script) as server:
        run = evaluate(tmp_path, server.url, "--num-questions", "10", "--parallel", "5")
    assert run.status == 0, run.stderr
    assert most == 5


def test_an_example_among_the_questions_is_an_error(tmp_path: Path) -> None:
    with scripted(mixed) as server:
        run = evaluate(tmp_path, server.url, train=DATA / "test.jsonl")
    assert run.status != 0
    assert "an example is also asked" in run.stderr
    assert server.bodies == []


def test_no_server(tmp_path: Path) -> None:
    with scripted(mixed) as server:
        pass
    run = evaluate(tmp_path, server.url, "--model", "m", "--num-questions", "2")
    assert run.status != 0
    assert run.stdout.startswith("Accuracy: none\nInvalid: none\n")
    assert run.summary["accuracy"] is None


def test_differences_are_told() -> None:
    same = {"index": 0, "prompt": "p", "text": "5", "predicted": 5, "label": 5, "error": None, "margin": 0.5}
    assert differences([same], [same]) == []
    assert differences([same], [same, same]) == ["1 answers, but the reference has 2"]
    for changed in ({"text": "6", "predicted": 6}, {"prompt": "q"}, {"predicted": None}, {"error": "HTTP 500"}):
        found = differences([{**same, **changed}], [same])
        assert len(found) == 1
        assert next(iter(changed)) in found[0] or "failed" in found[0]


def test_every_answer_is_that_of_transformers(tmp_path: Path) -> None:
    shots, most = 3, 64
    model = TinyModel("llama", tmp_path / "tiny")
    server = Server(model.path, "--dtype", "float32", "--threads", "1", log=tmp_path / "server.log")
    try:
        server.wait_for_health()
        flags = ["--num-shots", str(shots), "--max-new-tokens", str(most)]
        runs = {
            backend: evaluate(tmp_path, server.url, "--backend", backend, *flags) for backend in ("sglang", "openai")
        }
    finally:
        server.kill()
    labels = [answer["label"] for answer in runs["openai"].answers]
    reference = Reference.load(str(model.path))
    expected = [asdict(answer) for answer in reference.answers(make_prompts(TEST, TRAIN[:shots]), labels, most)]
    assert len(expected) == len(TEST)
    for backend, run in runs.items():
        assert run.status == 0, run.stderr
        assert differences(run.answers, expected) == [], backend
        assert [answer["tokens"] for answer in run.answers] == [answer["tokens"] for answer in expected]
