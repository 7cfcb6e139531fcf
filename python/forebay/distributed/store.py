"""The brain as the place where ranks find each other: a store of PyTorch's that asks over the hand's own socket.

So nothing listens on a port, and nobody has to choose one before it is bound.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from forebay.protocol.connection import Connection, Dismissed
from forebay.protocol.frames import Kind, WireError, encode_json

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
else:
    Store = dist.Store


class BrainStore(Store):
    """`torch.distributed.Store` over the frames `store` and `store_reply`: one question at a time, each answered.

    Timeouts are not looked at: it is the brain that decides how long ranks may take.
    """

    def __init__(self, connection: Connection) -> None:
        """Nobody else reads frames from the connection before `close`."""
        super().__init__()
        self._connection = connection
        self._asked = 0
        self._open = True
        self.failure: Exception | None = None
        """Why a question has failed. What calls a store from C++ may wrap it beyond recognition."""

    def close(self) -> None:
        """Refuses all further questions: after `ready` the socket is for plans."""
        self._open = False

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key=key, value=_text(value))

    def get(self, key: str) -> bytes:
        """Waits until the key is there."""
        return self._bytes(self._ask("get", key=key))

    def add(self, key: str, amount: int) -> int:
        """Adds to a number, 0 at first; gives the sum."""
        return self._number(self._ask("add", key=key, amount=amount))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return self._number(self._ask("check", keys=list(keys))) == 1

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys are there."""
        self._ask("wait", keys=list(keys))

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        """Sets a value if it is the expected one; gives what it is afterwards."""
        return self._bytes(self._ask("compare_set", key=key, expected=_text(expected), value=_text(value)))

    def delete_key(self, key: str) -> bool:
        """Whether the key was there."""
        return self._number(self._ask("delete", key=key)) == 1

    def num_keys(self) -> int:
        """How many keys there are."""
        return self._number(self._ask("count"))

    def _ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        try:
            return self._answer(op, arguments)
        except Exception as error:
            self.failure = error
            raise

    def _answer(self, op: str, arguments: dict[str, Any]) -> dict[str, Any]:
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

    @staticmethod
    def _bytes(reply: dict[str, Any]) -> bytes:
        value = reply.get("value")
        if not isinstance(value, str):
            raise WireError("an answer of the store without a value")
        try:
            return base64.b64decode(value, validate=True)
        except ValueError as error:
            raise WireError(f"an answer of the store that is not base64: {error}") from error

    @staticmethod
    def _number(reply: dict[str, Any]) -> int:
        number = reply.get("number")
        if not isinstance(number, int):
            raise WireError("an answer of the store without a number")
        return number


def _text(value: str | bytes) -> str:
    data = value.encode() if isinstance(value, str) else bytes(value)
    return base64.b64encode(data).decode()
