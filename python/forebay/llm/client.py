"""Concurrent requests to one server over kept-alive connections, with a limit on how many run at a time."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from forebay.llm.connection import JSON, Connection, ConnectionLost, Response
from forebay.llm.errors import EngineDeadError, ForebayError, RequestError
from forebay.llm.params import to_json

__all__ = ["Call", "Client", "Gate"]

T = TypeVar("T")
DONE = b"[DONE]"


@dataclass
class Call(Generic[T]):
    """A request, and the conversion of its response."""

    path: str
    fields: Callable[[], dict[str, Any]]
    """Returns the fields of the body. May raise RequestError."""
    read: Callable[[Any], T]
    """Converts the response's JSON object to a result."""
    failed: Callable[[RequestError], T]
    """Converts an error to a result."""
    weight: int = 1
    """The number of choices that are computed for the request."""


class Gate:
    """Admits calls in order of arrival, while the sum of their weights is within a limit.

    A call whose weight exceeds the limit is admitted alone.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def enter(self, weight: int) -> int:
        """Waits for room. Returns the weight to pass to `leave`."""
        weight = min(weight, self.limit)
        if self._waiting or self.held + weight > self.limit:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((weight, turn))
            try:
                await turn
            except BaseException:
                if turn.done() and not turn.cancelled():
                    self.leave(weight)
                raise
        else:
            self.held += weight
        return weight

    def leave(self, weight: int) -> None:
        """Releases the room of an admitted call."""
        self.held -= weight
        while self._waiting:
            weight, turn = self._waiting[0]
            if turn.cancelled():
                self._waiting.popleft()
            elif self.held + weight <= self.limit:
                self._waiting.popleft()
                self.held += weight
                turn.set_result(None)
            else:
                return


class Client:
    """Sends the requests of one event loop."""

    def __init__(self, socket: str, death: Callable[[], EngineDeadError], *, limit: int, idle_seconds: float) -> None:
        """`limit`: the most choices that run at a time. `idle_seconds`: how long a connection may be idle."""
        self._socket, self._death, self._idle_seconds = socket, death, idle_seconds
        self._gate = Gate(limit)
        self._idle: list[Connection] = []

    def close(self) -> None:
        """Closes the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def ask(self, method: str, path: str, body: bytes = b"", weight: int = 1, kind: str = JSON) -> Any:
        """Returns the JSON object of a response with status 200. `kind` is the content type of the body.

        Raises RequestError and EngineDeadError.
        """
        async with self._answer(method, path, body, weight, kind) as (connection, response):
            return _parsed(response, await connection.body(response))

    async def events(self, path: str, body: bytes, weight: int = 1) -> AsyncGenerator[Any, None]:
        """Yields the JSON objects of a stream. Raises RequestError and EngineDeadError, also in mid-stream."""
        async with self._answer("POST", path, body, weight) as (connection, response):
            if response.status != 200:
                _parsed(response, await connection.body(response))
            rest = b""
            async with aclosing(connection.parts(response)) as parts:
                async for part in parts:
                    *events, rest = (rest + part).split(b"\n\n")
                    for event in events:
                        if (data := event.removeprefix(b"data: ")) == DONE:
                            continue
                        found = json.loads(data)
                        if "error" in found:
                            raise RequestError.from_body(found)
                        yield found

    async def every(self, calls: Sequence[Call[T]], progress: Callable[[int], object]) -> list[T]:
        """Returns the results of calls, in order. `progress` is called with the index of each call that has ended.

        A failed request has a result with an error. EngineDeadError cancels all calls.
        """
        results: dict[int, T] = {}
        numbered = enumerate(calls)

        async def work() -> None:
            for number, call in numbered:
                try:
                    body = to_json(call.fields())
                    results[number] = call.read(await self.ask("POST", call.path, body, call.weight))
                except RequestError as error:
                    results[number] = call.failed(error)
                progress(number)

        tasks = [asyncio.ensure_future(work()) for _ in range(min(self._gate.limit, len(calls)))]
        try:
            await asyncio.gather(*tasks)
        except ForebayError as error:
            error.outputs = [results[number] for number in sorted(results)]
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [results[number] for number in range(len(results))]

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: bytes, weight: int, kind: str = JSON
    ) -> AsyncIterator[tuple[Connection, Response]]:
        held = await self._gate.enter(weight)
        connection: Connection | None = None
        try:
            connection = await self._connection()
            response = await connection.send(method, path, body, kind)
            yield connection, response
        except (ConnectionLost, OSError) as error:
            raise await asyncio.get_running_loop().run_in_executor(None, self._death) from error
        finally:
            self._gate.leave(held)
            if connection is not None:
                self._put_back(connection)

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable(self._idle_seconds):
                return connection
            connection.close()
        return await Connection.open(self._socket)

    def _put_back(self, connection: Connection) -> None:
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()


def _parsed(response: Response, body: bytes) -> Any:
    """Returns the object of a response. Warns of parameters that have no effect. Raises RequestError."""
    try:
        found = json.loads(body)
    except ValueError:
        found = body.decode(errors="replace")
    if response.status != 200:
        raise RequestError.from_body(found, response.status)
    # An entry such as `max_tokens=812` reports a reduced limit, not an ignored one. `finish_reason` shows that too.
    ignored = response.headers.get("x-forebay-ignored", "").split(", ")
    for name in ignored:
        if name and not name.startswith(("max_tokens=", "max_completion_tokens=")):
            warnings.warn(f"`{name}` has no effect", stacklevel=2)
    return found
