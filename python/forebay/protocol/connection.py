"""Frames over a connected stream socket."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from forebay.protocol.frames import HEADER_BYTES, Frame, Header, WireError, nothing

RING = 6
"""The number of buffers of a ring: two plans in flight and their masks, a frame being received, and one spare."""
_SMALLEST = 1 << 16

Bytes: TypeAlias = npt.NDArray[np.uint8]
Allocate: TypeAlias = Callable[[int], Bytes]
"""Allocates this many bytes for frames. A device returns memory from which its copies are fastest."""


class Dismissed(Exception):
    """The brain has exited, or orders the hand to exit, while the hand waits for another frame."""


class _Buffer:
    def __init__(self, memory: Bytes) -> None:
        self.memory = memory
        self.taken = False

    def release(self) -> None:
        # Any thread may call this, because it is one assignment.
        self.taken = False


class Ring:
    """Buffers for received frames, used in a cycle. A buffer is reused only after its frame's `release`."""

    def __init__(self, allocate: Allocate, count: int = RING) -> None:
        self._allocate = allocate
        self._buffers = [_Buffer(allocate(_SMALLEST)) for _ in range(count)]
        self._next = 0

    def take(self, size: int) -> tuple[memoryview, Callable[[], None]]:
        """Returns a buffer of `size` bytes, and its release. Raises `WireError` if the next buffer is still in use."""
        buffer = self._buffers[self._next]
        if buffer.taken:
            raise WireError(f"more than {len(self._buffers)} frames in flight")
        self._next = (self._next + 1) % len(self._buffers)
        if len(buffer.memory) < size:
            buffer.memory = self._allocate(max(size, 2 * len(buffer.memory)))
        buffer.taken = True
        return buffer.memory.data[:size], buffer.release


class Connection:
    """Sends and receives frames over a connected stream socket. Without a ring, each frame has separate memory."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._header = bytearray(HEADER_BYTES)
        self._ring: Ring | None = None

    def receive_into(self, ring: Ring) -> None:
        """Receives frames into `ring` from now on. The receiver of a frame must release it."""
        self._ring = ring

    def send(self, data: bytes) -> None:
        """Sends an encoded frame."""
        self._socket.sendall(data)

    def hear_no_more(self) -> None:
        """Shuts down the receiving side, even for a thread that waits in `recv`. `send` still works.

        May be called by any thread.
        """
        self._socket.shutdown(socket.SHUT_RD)

    def recv(self) -> Frame | None:
        """Returns the next frame, or None at the end of the stream."""
        if not self._fill(memoryview(self._header)):
            return None
        header = Header.decode(self._header)
        body, release = self._room(header)
        if header.words and not self._fill(body):
            raise WireError("the stream ended in the middle of a frame")
        return Frame.decode(header, body, release)

    def copied(self, header: Header, data: Bytes) -> Frame:
        """Returns a frame in the form of a received one, with a body that was received by other means."""
        body, release = self._room(header)
        body[:] = data.data
        return Frame.decode(header, body, release)

    def _room(self, header: Header) -> tuple[memoryview, Callable[[], None]]:
        size = 4 * header.words
        return (memoryview(bytearray(size)), nothing) if self._ring is None else self._ring.take(size)

    def _fill(self, view: memoryview) -> bool:
        """Receives exactly `len(view)` bytes; False if the stream ended before the first."""
        got = 0
        while got < len(view):
            count = self._socket.recv_into(view[got:])
            if count == 0:
                if got:
                    raise WireError("the stream ended in the middle of a frame")
                return False
            got += count
        return True
