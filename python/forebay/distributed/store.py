"""A PyTorch store by which ranks find each other: it sends requests to the brain over the hand's socket.

So no rank listens on a port, and no port has to be chosen.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch.distributed as dist

from forebay.protocol.connection import Connection, Dismissed
from forebay.protocol.frames import Kind, WireError, encode_json

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
else:
    Store = dist.Store


Reply: TypeAlias = dict[str, Any]
Answer = TypeVar("Answer")


class BrainStore(Store):
    """Implements `torch.distributed.Store` with the frames `store` and `store_reply`, one request at a time.

    Timeouts are ignored, because the brain decides how long ranks may wait.
    """

    def __init__(self, connection: Connection) -> None:
        """Until `close`, only the store may read from the connection."""
        super().__init__()
        self._connection = connection
        self._asked = 0
        self._open = True
        self.failure: Exception | None = None
        """The error of a failed request. A C++ caller may wrap the error so that its type is lost."""

    def close(self) -> None:
        """Refuses all further requests. After `ready`, only plans use the socket."""
        self._open = False

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", _nothing, key=key, value=_text(value))

    def get(self, key: str) -> bytes:
        """Waits until the key exists."""
        return self._ask("get", _bytes, key=key)

    def add(self, key: str, amount: int) -> int:
        """Adds to a number, which is 0 at first. Returns the new number."""
        return self._ask("add", _number, key=key, amount=amount)

    def check(self, keys: Sequence[str]) -> bool:
        """True if all keys exist."""
        return self._ask("check", _number, keys=list(keys)) == 1

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys exist."""
        self._ask("wait", _nothing, keys=list(keys))

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        """Sets a value if the old one is `expected`. Returns the value afterwards."""
        return self._ask("compare_set", _bytes, key=key, expected=_text(expected), value=_text(value))

    def delete_key(self, key: str) -> bool:
        """Deletes a key. Returns true if it existed."""
        return self._ask("delete", _number, key=key) == 1

    def num_keys(self) -> int:
        """The number of keys."""
        return self._ask("count", _number)

    def _ask(self, op: str, read: Callable[[Reply], Answer], **arguments: Any) -> Answer:
        try:
            return read(self._reply(op, arguments))
        except Exception as error:
            self.failure = error
            raise

    def _reply(self, op: str, arguments: dict[str, Any]) -> Reply:
        if not self._open:
            raise WireError(f"the store was asked to {op} after ranks had found each other")
        self._asked += 1
        self._connection.send(encode_json(Kind.STORE, {"id": self._asked, "op": op, **arguments}))
        frame = self._connection.recv()
        if frame is None or frame.kind == Kind.SHUTDOWN:
            raise Dismissed
        if frame.kind != Kind.STORE_REPLY:
            raise WireError(f"expected store_reply, got {frame.kind.name.lower()}")
        reply = frame.json()
        if reply.get("id") != self._asked:
            raise WireError(f"an answer to question {reply.get('id')} of the store, and {self._asked} was asked")
        return reply


def _nothing(reply: Reply) -> None:
    """Reads nothing, for requests whose reply has no value."""


def _bytes(reply: Reply) -> bytes:
    value = reply.get("value")
    if not isinstance(value, str):
        raise WireError("an answer of the store without a value")
    try:
        return base64.b64decode(value, validate=True)
    except ValueError as error:
        raise WireError(f"an answer of the store that is not base64: {error}") from error


def _number(reply: Reply) -> int:
    number = reply.get("number")
    if not isinstance(number, int):
        raise WireError("an answer of the store without a number")
    return number


def _text(value: str | bytes) -> str:
    data = value.encode() if isinstance(value, str) else bytes(value)
    return base64.b64encode(data).decode()
