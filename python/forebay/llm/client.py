"""Requests to one server: as many at a time as it computes, over connections that are kept."""

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
    """A request, and the conversion of its answer."""

    path: str
    fields: Callable[[], dict[str, Any]]
    """Makes the fields of the body, and may raise RequestError."""
    read: Callable[[Any], T]
    """Makes the result of the answer's object."""
    failed: Callable[[RequestError], T]
    """Makes the result of an error."""
    weight: int = 1
    """The number of choices that are computed for the request."""


class Gate:
    """Admits calls in the order in which they come, while the sum of their weights is within a limit.

    A call that is heavier than the limit is admitted alone.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def enter(self, weight: int) -> int:
        """Waits for room. Returns the weight to leave with."""
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
        """Gives room back."""
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
    """The requests of one event loop."""

    def __init__(self, socket: str, death: Callable[[], EngineDeadError], *, limit: int, idle_seconds: float) -> None:
        """`limit`: choices that are computed at a time. `idle_seconds`: how long a connection may be idle."""
        self._socket, self._death, self._idle_seconds = socket, death, idle_seconds
        self._gate = Gate(limit)
        self._idle: list[Connection] = []

    def close(self) -> None:
        """Closes the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def ask(self, method: str, path: str, body: bytes = b"", weight: int = 1, kind: str = JSON) -> Any:
        """The object of an answer with status 200. `kind` is the type of the body.

        Raises RequestError and EngineDeadError.
        """
        async with self._answer(method, path, body, weight, kind) as (connection, response):
            return _parsed(response, await connection.body(response))

    async def events(self, path: str, body: bytes, weight: int = 1) -> AsyncGenerator[Any, None]:
        """The objects of a stream. Raises RequestError and EngineDeadError, also in its middle."""
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
        """The results of calls, in order. `progress` is called with the number of each that has ended.

        A failed request has its place among the results. EngineDeadError ends all of them.
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
    """The object of an answer. Warns of parameters without an effect. Raises RequestError."""
    try:
        found = json.loads(body)
    except ValueError:
        found = body.decode(errors="replace")
    if response.status != 200:
        raise RequestError.from_body(found, response.status)
    # `max_tokens=812` is the length that was cut to, as `finish_reason` reports.
    ignored = response.headers.get("x-forebay-ignored", "").split(", ")
    for name in ignored:
        if name and not name.startswith(("max_tokens=", "max_completion_tokens=")):
            warnings.warn(f"`{name}` has no effect", stacklevel=2)
    return found
