"""Answers in all forms that a server may write: in any pieces, over connections that stay open, close or break."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from forebay import EngineDeadError, RequestError
from forebay.llm.client import Call, Client
from forebay.llm.connection import OCTETS

Json = dict[str, Any]


def whole(body: Json, status: int = 200, *headers: str) -> bytes:
    """An answer with a `Content-Length`."""
    text = json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} X", "Content-Type: application/json", f"Content-Length: {len(text)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + text


def chunked(*chunks: bytes, end: bool = True) -> bytes:
    """An answer with chunked transfer encoding. With `end` false, the last chunk is missing."""
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in chunks) + (b"0\r\n\r\n" if end else b"")


def events(*objects: Json) -> bytes:
    return b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in objects) + b"data: [DONE]\n\n"


class Fake:
    """A server that gives prepared answers, one for each request."""

    def __init__(self, answers: Sequence[bytes], closes: bool, step: int | None) -> None:
        self._answers = list(answers)
        self._closes, self._step = closes, step
        self.connections = 0
        self.requests: list[tuple[str, Json]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while self._answers:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
                self.requests.append((head.split(" ")[1], json.loads(await reader.readexactly(length) or b"{}")))
                answer = self._answers.pop(0)
                for start in range(0, len(answer), self._step or len(answer)):
                    writer.write(answer[start : start + (self._step or len(answer))])
                    await writer.drain()
                if self._closes:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()


@asynccontextmanager
async def client(
    folder: Path,
    *answers: bytes,
    closes: bool = False,
    step: int | None = None,
    idle_seconds: float = 60,
    limit: int = 1,
) -> AsyncIterator[tuple[Client, Fake]]:
    """A client of a server with these answers."""
    fake = Fake(answers, closes, step)
    path = str(folder / "socket")
    listener = await asyncio.start_unix_server(fake.serve, path)
    found = Client(path, lambda: EngineDeadError("it is dead"), limit=limit, idle_seconds=idle_seconds)
    try:
        yield found, fake
    finally:
        found.close()
        listener.close()


def ask(client: Client) -> Any:
    return client.ask("POST", "/x", b'{"a": 1}')


@pytest.mark.parametrize(
    ("options", "connections"), [({}, 1), ({"closes": True}, 2), ({"idle_seconds": 0}, 2), ({"step": 1}, 1)]
)
def test_a_connection_is_kept_while_the_server_keeps_it(
    tmp_path: Path, options: dict[str, Any], connections: int
) -> None:
    async def story() -> None:
        async with client(tmp_path, whole({"n": 1}), whole({"n": 2}), **options) as (found, fake):
            assert await ask(found) == {"n": 1}
            # Waits until the server's close of the connection has arrived.
            await asyncio.sleep(0)
            while options.get("closes") and not found._idle[0]._reader.at_eof():
                await asyncio.sleep(0)
            assert await ask(found) == {"n": 2}
            assert fake.connections == connections
            assert fake.requests == [("/x", {"a": 1})] * 2

    asyncio.run(story())


def test_a_connection_that_the_server_announces_to_close_is_not_kept(tmp_path: Path) -> None:
    async def story() -> None:
        async with client(tmp_path, whole({}, 200, "Connection: close"), whole({})) as (found, fake):
            await ask(found)
            await ask(found)
            assert fake.connections == 2

    asyncio.run(story())


@pytest.mark.parametrize("step", [None, 1, 7])
def test_events_in_any_pieces(tmp_path: Path, step: int | None) -> None:
    objects = [{"n": number, "text": "ä\n\n{}"} for number in range(4)]
    text = events(*objects)
    pieces = [text[start : start + 11] for start in range(0, len(text), 11)]

    async def story() -> None:
        async with client(tmp_path, chunked(*pieces), whole({"n": 9}), step=step) as (found, fake):
            assert [event async for event in found.events("/x", b"{}")] == objects
            # The whole answer was read, so the connection can serve another request.
            assert await ask(found) == {"n": 9}
            assert fake.connections == 1

    asyncio.run(story())


def test_every_stream_has_one_end(tmp_path: Path) -> None:
    first = b'data: {"n": 0}\n\n'
    failed = b'data: {"error": {"message": "broken", "code": "x"}}\n\n'

    async def read(found: Client) -> list[Any]:
        return [event async for event in found.events("/x", b"{}")]

    async def story() -> None:
        refused = whole({"error": {"message": "`n`: no", "param": "n", "code": "invalid_value"}}, 400)
        answers = [chunked(first, failed), refused, chunked(first, end=False)]
        async with client(tmp_path, *answers, closes=True) as (found, _):
            with pytest.raises(RequestError, match="broken"):
                await read(found)
            with pytest.raises(RequestError, match="`n`: no") as caught:
                await read(found)
            assert (caught.value.status, caught.value.param, caught.value.code) == (400, "n", "invalid_value")
            with pytest.raises(EngineDeadError, match="it is dead"):
                await read(found)
            assert found._gate.held == 0

    asyncio.run(story())


def test_an_answer_that_is_no_json_is_shown(tmp_path: Path) -> None:
    async def story() -> None:
        answer = b"HTTP/1.1 502 X\r\ncontent-length: 4\r\n\r\noops"
        async with client(tmp_path, answer) as (found, _):
            with pytest.raises(RequestError, match="status 502: oops"):
                await ask(found)

    asyncio.run(story())


@pytest.mark.parametrize("status", [400, 200])
def test_octets_are_sent_once_the_server_takes_them(tmp_path: Path, status: int) -> None:
    """A refusal comes before the body is sent, and then the server does not read the body."""
    body = bytes(range(256)) * 20_000
    received: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"expect: 100-continue" in head
        assert b"content-type: application/octet-stream" in head
        if status == 200:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            received.append(await reader.readexactly(len(body)))
            writer.write(whole({"n": 1}))
        else:
            writer.write(whole({"error": {"message": "no", "param": "body"}}, status))
        await writer.drain()
        received.append(await reader.read())
        writer.close()
        ended.set()

    ended = asyncio.Event()

    async def story() -> None:
        path = str(tmp_path / "socket")
        listener = await asyncio.start_unix_server(serve, path)
        found = Client(path, lambda: EngineDeadError("it is dead"), limit=1, idle_seconds=60)
        sent = found.ask("POST", "/x", body, kind=OCTETS)
        if status == 200:
            assert await sent == {"n": 1}
            assert len(found._idle) == 1
        else:
            with pytest.raises(RequestError, match="no"):
                await sent
            assert not found._idle
        found.close()
        await ended.wait()
        listener.close()

    asyncio.run(story())
    assert received[0] == (body if status == 200 else b"")


def test_a_batch_is_sent_once_in_order_and_within_the_limit(tmp_path: Path) -> None:
    def call(number: int) -> Call[Any]:
        def fields() -> Json:
            if number == 2:
                raise RequestError("not sent")
            return {"n": number}

        return Call("/x", fields, lambda answer: answer["n"], lambda error: str(error))

    answers = [whole({"n": 10}), whole({"error": {"message": "refused"}}, 400), whole({"n": 13})]

    async def story() -> None:
        ended: list[int] = []
        async with client(tmp_path, *answers) as (found, fake):
            results = await found.every([call(number) for number in range(4)], ended.append)
            assert results == [10, "refused", "not sent", 13]
            assert [body["n"] for _, body in fake.requests] == [0, 1, 3]
            assert ended == [0, 1, 2, 3]
            assert fake.connections == 1

    asyncio.run(story())


def test_a_dead_server_ends_a_batch_with_what_there_is(tmp_path: Path) -> None:
    calls: list[Call[Any]] = [Call("/x", dict, lambda answer: answer["n"], lambda error: None) for _ in range(3)]

    async def story() -> None:
        async with client(
            tmp_path, whole({"n": 1}), b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{", closes=True
        ) as (
            found,
            _,
        ):
            with pytest.raises(EngineDeadError) as caught:
                await found.every(calls, lambda number: None)
            assert caught.value.outputs == [1]

    asyncio.run(story())
