"""`/v1/files` and `/v1/batches`: OpenAI's client, killed servers, keys and limits."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import openai
import pytest
from openai import OpenAI
from openai.types import Batch

from tests.e2e.client import Json, openai_client
from tests.e2e.conftest import Serve
from tests.e2e.models import Model
from tests.e2e.server import STOP_SECONDS, Server
from tests.e2e.simulated import SIM, lines, paced
from tests.e2e.waiting import eventually

SECONDS = 120
ROUTE = "/v1/completions"
TOKENS = ("--sim-output-tokens", "5")
OVER = ("completed", "failed", "expired", "cancelled")


def request(name: str, url: str = ROUTE, **body: object) -> Json:
    return {"custom_id": name, "method": "POST", "url": url, "body": body or {"prompt": name, "max_tokens": 5}}


def send(client: OpenAI, requests: list[Json], name: str = "in.jsonl") -> str:
    """Uploads a file of requests; returns its id."""
    return client.files.create(file=(name, lines(requests).encode()), purpose="batch").id


def begin(client: OpenAI, requests: list[Json], endpoint: str = ROUTE) -> Batch:
    create = client.batches.create
    return create(input_file_id=send(client, requests), endpoint=endpoint, completion_window="24h")  # type: ignore[arg-type]


def ended(client: OpenAI, batch: Batch) -> Batch:
    """Waits until a batch has ended."""

    def look() -> Batch | None:
        now = client.batches.retrieve(batch.id)
        return now if now.status in OVER else None

    found = eventually(look, "the batch ends", SECONDS)
    assert found
    return found


def content(client: OpenAI, file: str | None) -> list[Json]:
    """The lines of an answer file."""
    assert file
    return [json.loads(line) for line in client.files.content(file).text.splitlines()]


def code(error: openai.APIStatusError) -> tuple[int, object]:
    return error.status_code, error.code


def test_openais_client_has_its_batch_computed(serve: Serve, tiny: Model, tmp_path: Path) -> None:
    server = serve(tiny, *SIM, *TOKENS, "--batch-dir", str(tmp_path / "batches"))
    client = openai_client(server)
    chat = [{"role": "user", "content": "Hello"}]
    requests = [request(f"r{at}", "/v1/chat/completions", messages=chat, max_tokens=5) for at in range(30)]
    requests.append(request("wrong", "/v1/chat/completions", messages=7))
    file = client.files.create(file=("work.jsonl", lines(requests).encode()), purpose="batch")
    assert (file.filename, file.bytes, file.purpose) == ("work.jsonl", len(lines(requests)), "batch")
    assert client.files.content(file.id).text == lines(requests)
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"of": "a test"},
    )
    done = ended(client, batch)
    assert (done.status, done.metadata, done.errors) == ("completed", {"of": "a test"}, None)
    counts = done.request_counts
    assert counts
    assert (counts.total, counts.completed, counts.failed) == (31, 30, 1)
    answers = {answer["custom_id"]: answer for answer in content(client, done.output_file_id)}
    assert set(answers) == {f"r{at}" for at in range(30)}
    plain = server.ask("/v1/chat/completions", requests[0]["body"])
    assert answers["r0"]["response"]["body"]["usage"] == plain["usage"]
    (wrong,) = content(client, done.error_file_id)
    assert wrong["response"]["status_code"] == 400
    assert wrong["response"]["body"]["error"]["param"] == "messages"
    # Lists are paginated, and the client requests further pages itself.
    second = begin(client, [request("a")])
    ended(client, second)
    assert [one.id for one in client.batches.list(limit=1)] == [second.id, batch.id]
    names = {one.id for one in client.files.list()}
    assert {file.id, done.output_file_id, done.error_file_id} < names
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError) as gone:
        client.files.retrieve(file.id)
    assert code(gone.value) == (404, "file_not_found")


def test_embeddings_and_wrong_lines(serve: Serve, tiny: Model, tmp_path: Path) -> None:
    server = serve(tiny, *SIM, *TOKENS, "--batch-dir", str(tmp_path / "batches"))
    client = openai_client(server)
    failed = ended(client, begin(client, [request("a"), request("a"), request("b", "/v1/embeddings", input="x")]))
    assert failed.status == "failed"
    assert failed.errors
    assert failed.errors.data
    found = [(error.code, error.line) for error in failed.errors.data]
    assert found == [("duplicate_custom_id", 2), ("mismatched_url", 3)]
    for endpoint, window in (("/flush_cache", "24h"), ("/v1/files", "24h"), (ROUTE, "soon")):
        with pytest.raises(openai.BadRequestError):
            client.batches.create(
                input_file_id=send(client, [request("a")]),
                endpoint=endpoint,  # type: ignore[arg-type]
                completion_window=window,  # type: ignore[arg-type]
            )


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_batch_goes_on_after_a_restart(serve: Serve, tiny: Model, tmp_path: Path, how: signal.Signals) -> None:
    flags = (*SIM, *TOKENS, *paced(tmp_path, 5000), "--max-running-requests", "4")
    folder = ("--batch-dir", str(tmp_path / "batches"))
    server = serve(tiny, *flags, *folder)
    client = openai_client(server)
    count = 300
    batch = begin(client, [request(f"r{at:03}") for at in range(count)])

    def completed(client: OpenAI) -> int:
        counts = client.batches.retrieve(batch.id).request_counts
        return counts.completed if counts else 0

    eventually(lambda: completed(client) >= 20, "20 requests are answered", SECONDS)
    server.process.send_signal(how)
    server.process.wait(STOP_SECONDS)
    files = (tmp_path / "batches" / "files").glob("*.jsonl")
    before = sum(path.read_bytes().count(b'"id":"batch_req_') for path in files)
    assert 20 <= before < count
    server = serve(tiny, *flags, *folder)
    client = openai_client(server)
    done = ended(client, batch)
    names = sorted(answer["custom_id"] for answer in content(client, done.output_file_id))
    assert names == [f"r{at:03}" for at in range(count)], "each request has one answer"
    assert server.metric("vllm:request_success_total", finished_reason="length") <= count - before


def test_a_cancelled_batch_leaves_nothing_running(serve: Serve, tiny: Model, tmp_path: Path) -> None:
    flags = (*SIM, "--sim-output-tokens", "4000", *paced(tmp_path, 20_000, 1 << 15))
    server = serve(tiny, *flags, "--batch-dir", str(tmp_path / "batches"))
    client = openai_client(server)
    batch = begin(client, [request(f"r{at}", prompt="x", max_tokens=4000) for at in range(3)])
    server.wait_for_metric("vllm:num_requests_running", lambda value: value > 0)
    assert client.batches.cancel(batch.id).status == "cancelling"
    done = ended(client, batch)
    assert (done.status, done.output_file_id) == ("cancelled", None)
    server.wait_until_idle()
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_others_go_first(serve: Serve, tiny: Model, tmp_path: Path) -> None:
    flags = (*SIM, *TOKENS, *paced(tmp_path, 5000), "--max-running-requests", "1")
    server = serve(tiny, *flags, "--batch-dir", str(tmp_path / "batches"), "--batch-concurrency", "50")
    client = openai_client(server)
    batch = begin(client, [request(f"r{at}") for at in range(100)])
    server.wait_for_metric("vllm:num_requests_running", lambda value: value > 0)
    for _ in range(5):
        server.ask(ROUTE, {"prompt": "now", "max_tokens": 5})
    counts = client.batches.retrieve(batch.id).request_counts
    assert counts
    assert counts.completed < 50
    assert ended(client, batch).status == "completed"


def test_each_key_has_its_own(serve: Serve, tiny: Model, tmp_path: Path) -> None:
    folder = tmp_path / "batches"
    keys = ("--api-key", "one", "--api-key", "two", "--admin-api-key", "boss")
    server = serve(tiny, *SIM, *TOKENS, "--batch-dir", str(folder), *keys)
    one, two, boss = (openai_client(server, key) for key in ("one", "two", "boss"))
    batch = ended(one, begin(one, [request("a")]))
    assert batch.status == "completed"
    assert batch.output_file_id
    for other in (two, boss):
        assert not list(other.files.list())
        assert not list(other.batches.list())
        for ask, name in (
            (other.files.content, batch.output_file_id),
            (other.files.delete, batch.input_file_id),
            (other.batches.retrieve, batch.id),
            (other.batches.cancel, batch.id),
        ):
            with pytest.raises(openai.NotFoundError):
                ask(name)
    with pytest.raises(openai.AuthenticationError):
        openai_client(server, "three").files.list()
    assert ended(boss, begin(boss, [request("a")])).status == "completed"
    # A second server must not use the folder at the same time.
    second = Server(tiny.path, *SIM, "--batch-dir", str(folder), log=tmp_path / "second.log")
    try:
        assert second.process.wait(STOP_SECONDS) == 1
        assert "another server uses it" in second.log()
    finally:
        second.kill()
    # The folder contains no API key.
    assert b"one" not in b"".join(path.read_bytes() for path in folder.rglob("*.json"))
    server.kill()
    # The batches of a removed key are not listed for another key.
    server = serve(tiny, *SIM, *TOKENS, "--batch-dir", str(folder), "--api-key", "two")
    assert not list(openai_client(server, "two").batches.list())


def test_forms_and_bounds(serve: Serve, tiny: Model, tmp_path: Path) -> None:
    folder = tmp_path / "batches"
    bounds = ("--batch-max-file-bytes", "2000", "--batch-key-bytes", "3000", "--batch-max-requests", "3")
    server = serve(tiny, *SIM, *TOKENS, "--batch-dir", str(folder), *bounds)
    client = openai_client(server)
    good = {"file": ("a.jsonl", lines([request("a")]).encode())}
    for files, data, status, param in (
        (good, {}, 400, "purpose"),
        (good, {"purpose": "fine-tune"}, 400, "purpose"),
        (good, {"purpose": "batch", "other": "x"}, 400, "body"),
        (good, {"purpose": "batch" * 1000}, 400, "purpose"),
        (good, {"purpose": "batch", "expires_after[seconds]": "soon"}, 400, "expires_after"),
        (good, {"purpose": "batch", "expires_after[seconds]": "1"}, 400, "expires_after[seconds]"),
        ({"file": ("a.jsonl", b"")}, {"purpose": "batch"}, 400, "file"),
        ({"data": ("a.jsonl", b"x")}, {"purpose": "batch"}, 400, "body"),
        ({"file": ("a.jsonl", b"x" * 2001)}, {"purpose": "batch"}, 413, None),
    ):
        answer = server.http.post("/v1/files", files=files, data=data)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert server.post("/v1/files", {"file": "x"}).status_code == 400
    form = {"content-type": "multipart/form-data; boundary=x"}
    for body in (
        b"",
        b"--x",
        b"--x\r\n\r\n",
        b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\nabc',
    ):
        answer = server.http.post("/v1/files", content=body, headers=form)
        assert answer.status_code == 400, answer.text
    endless = server.http.post("/v1/files", content=b"--x\r\nname: " + b"a" * (3 << 20), headers=form)
    assert endless.status_code == 400
    assert "beside its file" in endless.json()["error"]["message"]
    # A web page of another site may not send a form.
    answer = server.http.post(
        "/v1/files", files=good, data={"purpose": "batch"}, headers={"origin": "http://evil.example"}
    )
    assert answer.status_code in (403, 415)
    assert not any((folder / "files").iterdir()), "a refused upload leaves no file"
    long = client.files.create(file=("a.jsonl", b"x" * 2000), purpose="batch")
    with pytest.raises(openai.PermissionDeniedError) as full:
        client.files.create(file=("a.jsonl", b"x" * 1001), purpose="batch")
    assert code(full.value) == (403, "storage_quota_exceeded")
    client.files.delete(long.id)
    failed = ended(client, begin(client, [request(str(at), prompt="") for at in range(4)]))
    assert failed.errors
    assert failed.errors.data
    assert failed.errors.data[0].code == "too_many_requests"
    for path in ("/v1/files/..%2f..%2fsalt", "/v1/files/salt/content", "/v1/batches/x", "/v1/files?limit=0"):
        assert server.http.get(path).status_code in (400, 404)
    wishes: list[object] = [[], {"input_file_id": 7}, {"endpoint": ROUTE}, {"metadata": {"a": "x" * 65536}}]
    for wish in wishes:
        assert server.post("/v1/batches", wish).status_code == 400


def test_a_server_without_a_folder_says_so(serve: Serve, tiny: Model) -> None:
    client = openai_client(serve(tiny, *SIM))
    with pytest.raises(openai.NotFoundError) as off:
        client.batches.list()
    assert code(off.value) == (404, "batches_off")
    assert "--batch-dir" in off.value.message
