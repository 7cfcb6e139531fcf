"""A stand-in for the brain's store, by which ranks find each other. It answers their `store` frames."""

from __future__ import annotations

import base64
import threading
from typing import Any

from forebay.protocol.connection import Connection
from forebay.protocol.frames import Frame, Kind, encode_json


class Meeting:
    """The store of one group. A separate thread answers each rank."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self.questions: list[str] = []
        """The operations that ranks requested, in order."""

    def answer(self, frame: Frame) -> bytes:
        """Returns the `store_reply` to a `store` frame. Blocks until the operation is done."""
        question = frame.json()
        with self._changed:
            self.questions.append(question["op"])
            value, number = self._do(question)
            self._changed.notify_all()
        text = None if value is None else base64.b64encode(value).decode()
        return encode_json(Kind.STORE_REPLY, {"id": question["id"], "value": text, "number": number})

    def serve(self, connection: Connection) -> None:
        """Answers until the rank closes the connection."""
        while (frame := connection.recv()) is not None:
            assert frame.kind == Kind.STORE, frame.kind
            connection.send(self.answer(frame))

    def _do(self, question: dict[str, Any]) -> tuple[bytes | None, int | None]:
        op, key, values = question["op"], question.get("key", ""), self._values
        if op in ("get", "wait"):
            wanted = [key] if op == "get" else question["keys"]
            self._changed.wait_for(lambda: all(name in values for name in wanted))
            return (values[key] if op == "get" else None), None
        if op == "set":
            values[key] = base64.b64decode(question["value"])
            return None, None
        if op == "add":
            total = int(values.get(key, b"0")) + question["amount"]
            values[key] = str(total).encode()
            return None, total
        if op == "compare_set":
            if values.get(key, b"") == base64.b64decode(question["expected"]):
                values[key] = base64.b64decode(question["value"])
            return values.get(key, base64.b64decode(question["expected"])), None
        if op == "check":
            return None, int(all(name in values for name in question["keys"]))
        if op == "delete":
            return None, int(values.pop(key, None) is not None)
        assert op == "count", op
        return None, len(values)
