"""A ready server, as used by one process: the process that started it, or one that received the `LLM` object."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import select
import selectors
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakSet

from forebay.llm.calls import unnamed_tokens
from forebay.llm.client import Client
from forebay.llm.connection import Connection, ConnectionLost
from forebay.llm.errors import EngineDeadError
from forebay.llm.outputs import RequestOutput
from forebay.llm.params import SamplingParams, to_json
from forebay.llm.progress import Stages
from forebay.llm.server import Server

__all__ = ["Background", "BorrowedServer", "Facts", "failures", "name_tokens", "new_client", "wait_until_ready"]

FIRST_PAUSE, LONGEST_PAUSE = 0.005, 0.1
"""The first and the longest pause between checks whether the server is ready, in seconds."""
IDS_AT_A_TIME = 4096
"""The number of tokens whose texts are requested together."""

T = TypeVar("T")


@dataclass(frozen=True)
class Facts:
    """The facts that a ready server reports."""

    model: str
    """The served name."""
    limit: int
    """The most choices to request at a time: twice the number that can run, if the queue and file descriptors allow."""
    idle_seconds: float
    """Seconds after which an idle connection is not used again: the server closes it after twice that time."""
    sampling_defaults: dict[str, float]
    """The sampling parameters that the model's authors recommend."""

    @classmethod
    def from_info(cls, info: Any) -> Facts:
        """Reads the facts from the response of /server_info."""
        config = info["config"]
        running = config["max_running_requests"] * config["dp_size"]
        # Each request needs a connection. Half of the file descriptors are left to the caller.
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        # All requests must fit into the server's queue, since it may receive all before any of them runs.
        most = config["max_queued_requests"]
        if descriptors != resource.RLIM_INFINITY:
            most = min(most, descriptors // 2)
        defaults = {name: value for name, value in config["sampling_defaults"].items() if value is not None}
        return cls(config["model"], max(1, min(2 * running, most)), config["receive_timeout"] / 2, defaults)

    def sampling(self) -> SamplingParams:
        """Returns sampling parameters with the defaults of the model."""
        return SamplingParams(**self.sampling_defaults)  # type: ignore[arg-type]  # The names are those of the API.


@dataclass
class BorrowedServer:
    """A server that another process started and stops."""

    socket: str

    def is_alive(self) -> bool:
        """Always true: only a request can detect the server's exit."""
        return True

    def stop(self) -> None:
        """Does nothing: another process owns the server."""

    def death(self) -> EngineDeadError:
        """Returns the error for requests after the server has exited."""
        return EngineDeadError("the server has ended with the process that started it")


AnyServer = Server | BorrowedServer


def new_client(server: AnyServer, facts: Facts) -> Client:
    """Creates a client for the running event loop."""
    return Client(server.socket, server.death, limit=facts.limit, idle_seconds=facts.idle_seconds)


async def wait_until_ready(server: Server, model: str) -> Facts:
    """Waits until the server is ready. Raises StartError."""
    stages, pause = Stages(model), FIRST_PAUSE
    try:
        while True:
            status, body = await _get(server.socket, "/health")
            if status == 200:
                break
            if not server.is_alive():
                raise server.start_error()
            if status:
                stages.show(_stage(body))
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return Facts.from_info(json.loads((await _get(server.socket, "/server_info"))[1]))
    finally:
        stages.clear()


async def _get(socket: str, path: str) -> tuple[int, bytes]:
    """Returns the status and the body of a response; status 0 if the connection fails."""
    try:
        connection = await Connection.open(socket)
    except OSError:
        return 0, b""
    try:
        response = await connection.send("GET", path, b"")
        return response.status, await connection.body(response)
    except ConnectionLost:
        return 0, b""
    finally:
        connection.close()


def _stage(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "starting"


async def name_tokens(client: Client, outputs: Iterable[RequestOutput], texts: dict[int, str]) -> None:
    """Fills in missing token texts of log-probabilities. `texts` caches the texts by token id."""
    unnamed = unnamed_tokens(outputs)
    missing = [token for token in unnamed if token not in texts]
    for start in range(0, len(missing), IDS_AT_A_TIME):
        ids = missing[start : start + IDS_AT_A_TIME]
        answer = await client.ask("POST", "/detokenize", to_json({"tokens": ids, "with_pieces": True}))
        texts.update(zip(ids, answer["pieces"], strict=True))
    for token, found in unnamed.items():
        for one in found:
            one.decoded_token = texts[token]


_inherited: list[object] = []
"""Objects that a forked process inherited. They share the parent's connections, so the child must not use them."""
_selectors: WeakSet[selectors.EpollSelector] = WeakSet()
_lock = threading.Lock()


def _after_fork() -> None:
    """Gives inherited event loops new epoll sets, so that collected connections leave the parent's sets unchanged."""
    global _lock
    _lock = threading.Lock()
    for selector in _selectors:
        with select.epoll() as own:
            os.dup2(own.fileno(), selector.fileno(), inheritable=False)
    _selectors.clear()


os.register_at_fork(after_in_child=_after_fork)


class Background:
    """An event loop on a separate thread, with a client. After a fork, the child creates a new loop on first use."""

    def __init__(self, server: AnyServer) -> None:
        self._server = server
        self._facts: Facts | None = None
        self._client: Client | None = None
        self._owner = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def use(self, facts: Facts) -> None:
        """Sets the facts with which clients are created."""
        self._facts = facts

    def submit(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Starts work on the loop."""
        return asyncio.run_coroutine_threadsafe(work(), self._running())

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs work on the loop, and returns its result. An interrupt of the caller cancels the work."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def ask(self, work: Callable[[Client], Awaitable[T]]) -> T:
        """Runs work that needs a client, and returns its result."""

        async def with_client() -> T:
            return await work(self.client())

        return self.run(with_client)

    def client(self) -> Client:
        """Returns the loop's client. Called only by work on the loop."""
        if self._client is None:
            assert self._facts is not None
            self._client = new_client(self._server, self._facts)
        return self._client

    def _running(self) -> asyncio.AbstractEventLoop:
        with _lock:
            if self._loop is not None and self._owner == os.getpid():
                return self._loop
            _inherited.extend([self._loop, self._client])
            selector = selectors.EpollSelector()
            _selectors.add(selector)
            self._loop, self._client, self._owner = asyncio.SelectorEventLoop(selector), None, os.getpid()
            threading.Thread(target=_run_loop, args=[self._loop], name="forebay-requests", daemon=True).start()
            weakref.finalize(self, _stop_loop, self._loop, self._owner)
            return self._loop

    def close(self) -> None:
        """Closes idle connections."""
        if self._client is not None and self._owner == os.getpid():
            self._running().call_soon_threadsafe(self._client.close)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _stop_loop(loop: asyncio.AbstractEventLoop, owner: int) -> None:
    if os.getpid() == owner and not loop.is_closed():
        loop.call_soon_threadsafe(loop.stop)


def failures(outputs: Sequence[Any]) -> dict[int, Any]:
    """Returns the errors among the results of a batch, by index."""
    return {number: output.error for number, output in enumerate(outputs) if output.error is not None}
