"""The part of HTTP/1.1 that Forebay's server uses, over a Unix socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from time import monotonic

__all__ = ["JSON", "OCTETS", "Connection", "ConnectionLost", "Response"]

LINE_LIMIT = 1 << 16
"""The most bytes of a response's head, and of the line before a chunk."""
JSON, OCTETS = "application/json", "application/octet-stream"
AT_ONCE = 1 << 20
"""Bytes of a body that are written to the socket at a time."""


class ConnectionLost(Exception):
    """The server closed the connection before the end of a response."""


@dataclass
class Response:
    """The status and headers of a response."""

    status: int
    headers: Mapping[str, str]


class Connection:
    """A connection that is kept alive between requests."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.last_used = monotonic()
        self.reusable = False
        """True if the last response was read to its end, and the server keeps the connection open."""

    @classmethod
    async def open(cls, socket: str) -> Connection:
        """Connects. Raises OSError."""
        return cls(*await asyncio.open_unix_connection(socket, limit=LINE_LIMIT))

    def close(self) -> None:
        """Closes the connection. The server aborts a request whose response is not complete."""
        self._writer.close()

    def is_usable(self, idle_seconds: float) -> bool:
        """True if another request may be sent: the connection is open, and was not idle for `idle_seconds`."""
        fresh = monotonic() - self.last_used < idle_seconds
        return self.reusable and fresh and not self._reader.at_eof() and not self._writer.is_closing()

    async def send(self, method: str, path: str, body: bytes, kind: str = JSON) -> Response:
        """Sends a request, and reads the head of the response. Raises ConnectionLost.

        A body of type OCTETS may be large: it is only sent after the server has accepted it with status 100.
        """
        self.reusable = False
        expect = "expect: 100-continue\r\n" if kind == OCTETS else ""
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n"
            f"content-type: {kind}\r\n{expect}content-length: {len(body)}\r\n\r\n"
        )
        try:
            if not expect:
                self._writer.write(head.encode() + body)
                await self._writer.drain()
                return await self._head()
            self._writer.write(head.encode())
            answer = await self._head()
            if answer.status != 100:
                # The server may still expect the body, so the connection is not reused.
                return Response(answer.status, {**answer.headers, "connection": "close"})
            for start in range(0, len(body), AT_ONCE):
                self._writer.write(memoryview(body)[start : start + AT_ONCE])
                await self._writer.drain()
            return await self._head()
        except (OSError, EOFError, asyncio.LimitOverrunError) as error:
            raise ConnectionLost(str(error)) from error

    async def _head(self) -> Response:
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        fields = (line.partition(":") for line in lines[1:] if line)
        return Response(int(lines[0].split(" ", 2)[1]), {name.lower(): value.strip() for name, _, value in fields})

    async def body(self, response: Response) -> bytes:
        """Reads the whole body of a response. Raises ConnectionLost."""
        return b"".join([part async for part in self.parts(response)])

    async def parts(self, response: Response) -> AsyncGenerator[bytes, None]:
        """Yields the chunks of a response's body as they arrive. Raises ConnectionLost."""
        try:
            if response.headers.get("transfer-encoding") == "chunked":
                while size := int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16):
                    yield (await self._reader.readexactly(size + 2))[:-2]
                await self._reader.readuntil(b"\r\n")
            elif length := int(response.headers.get("content-length", 0)):
                yield await self._reader.readexactly(length)
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            raise ConnectionLost(str(error)) from error
        self.reusable = response.headers.get("connection") != "close"
        self.last_used = monotonic()
