"""A network between two programs that can be cut, or fall silent."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


class Network:
    """Relays TCP connections to a port of this machine on a separate thread. A context manager."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network", daemon=True)
        self.address = ""
        """The address that it listens at, as HOST:PORT."""

    def __enter__(self) -> Network:
        self._thread.start()
        server = self._run(asyncio.start_server(self._relay, "127.0.0.1", 0))
        host, port = server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def cut(self) -> None:
        """Resets all open connections. New ones work."""

        async def reset() -> None:
            for writer in self._writers:
                writer.transport.abort()

        self._run(reset())

    def silence(self) -> None:
        """From now on no data arrives, and neither side is notified, as with a pulled cable."""
        self._loop.call_soon_threadsafe(self._flows.clear)

    def restore(self) -> None:
        """New connections work again. Silenced connections are reset, as by a machine that has lost their state."""
        self.cut()
        self._loop.call_soon_threadsafe(self._flows.set)

    def _run(self, work: Coroutine[object, object, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _relay(self, near: asyncio.StreamReader, to_near: asyncio.StreamWriter) -> None:
        try:
            far, to_far = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            to_near.transport.abort()
            return
        both = {to_near, to_far}
        self._writers |= both
        try:
            await asyncio.gather(self._carry(near, to_far), self._carry(far, to_near))
        except OSError:
            pass
        finally:
            self._writers -= both
            for writer in both:
                writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            await self._flows.wait()
            writer.write(data)
            await writer.drain()
        await self._flows.wait()
        writer.write_eof()
