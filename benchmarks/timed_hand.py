"""A hand whose every step takes 5 ms, whatever is in it: to measure the processes around a hand, here or elsewhere.

It speaks the step protocol and computes nothing. A server or an outpost starts it with `--python FILE`, where FILE is
written by `program`. FILE runs the usual interpreter, except for the module of the PyTorch hand.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import socket
import struct
import sys
import time
from pathlib import Path

STEP_SECONDS = 5e-3
VERSION = 4
"""The version of the step protocol."""
HELLO, CONFIG, READY, PLAN, RESULT, SHUTDOWN = 1, 2, 4, 5, 6, 8
ROWS = 8
"""The index of the plan column with rows (`slot`, `start`, `length`, `flags`)."""
TOKENS, ROW_ERRORS, TIMING = 1, 2, 6
TOKEN = 1000
"""The token that every row samples."""
MODULE = "forebay.worker"


def program(folder: Path) -> Path:
    """Writes an interpreter to `folder` that runs this module in place of the PyTorch hand."""
    python, hand = shlex.quote(sys.executable), shlex.quote(str(Path(__file__).resolve()))
    found = folder / "python"
    # The arguments: -I -c TEXT MODULE.
    found.write_text(f'#!/bin/sh\n[ "$4" = {MODULE} ] && exec {python} {hand}\nexec {python} "$@"\n')
    found.chmod(0o755)
    return found


class Hand:
    """The hand's end of its socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def _bytes(self, count: int) -> bytes:
        """Receives this many bytes. Exits if the connection is closed."""
        found = bytearray()
        while len(found) < count:
            piece = self._socket.recv(count - len(found))
            if not piece:
                sys.exit(0)
            found += piece
        return bytes(found)

    def receive(self) -> tuple[int, int, dict[int, bytes]]:
        """Receives a frame: kind, step and columns."""
        _, _, kind, step, columns, words = struct.unpack("<4sHHQII", self._bytes(24))
        body = self._bytes(4 * words)
        table = struct.unpack_from(f"<{2 * columns}i", body)
        at, found = 8 * columns, {}
        for column, length in zip(table[::2], table[1::2], strict=True):
            found[column] = body[at : at + 4 * length]
            at += 4 * length
        return kind, step, found

    def send(self, kind: int, step: int, columns: dict[int, bytes]) -> None:
        """Sends a frame of integer columns."""
        table = [word for column, content in columns.items() for word in (column, len(content) // 4)]
        body = struct.pack(f"<{len(table)}i", *table) + b"".join(columns.values())
        head = struct.pack("<4sHHQII", b"FBAY", VERSION, kind, step, len(columns), len(body) // 4)
        self._socket.sendall(head + body)

    def tell(self, kind: int, value: object) -> None:
        """Sends a frame with a JSON text."""
        text = json.dumps(value).encode()
        self.send(kind, 0, {1: text + b" " * (-len(text) % 4)})

    def has_more(self) -> bool:
        """True if another frame has arrived."""
        return bool(select.select([self._socket], [], [], 0)[0])


def serve(hand: Hand) -> None:
    """Answers plans in order, each 5 ms after its arrival or after the answer before."""
    hand.tell(HELLO, {"pid": os.getpid()})
    _, _, columns = hand.receive()
    config = json.loads(columns[1])
    facts = {"page_count": config["max_total_tokens"] // config["page_size"], "vocab_size": 49152, "hidden_size": 576}
    facts |= {"dtype": "bfloat16", "weight_bytes": 1, "kv_bytes": 1, "device": "5 ms a step", "load_seconds": 0.0}
    hand.tell(READY, facts)
    busy_until, pipelined = 0.0, False
    while True:
        kind, step, columns = hand.receive()
        if kind == SHUTDOWN:
            return
        if kind != PLAN:
            continue
        begun = busy_until if pipelined else time.monotonic()
        rows = columns.get(ROWS, b"")
        flags = struct.unpack(f"<{len(rows) // 4}i", rows)[3::4]
        tokens = struct.pack("<i", TOKEN) * sum(one & 1 for one in flags)
        busy_until = begun + STEP_SECONDS
        time.sleep(max(0.0, busy_until - time.monotonic()))
        gap_us = 0 if pipelined else 1
        timing = struct.pack("<2i", int(STEP_SECONDS * 1e6), gap_us)
        hand.send(RESULT, step, {TOKENS: tokens, ROW_ERRORS: bytes(4 * len(flags)), TIMING: timing})
        pipelined = hand.has_more()


if __name__ == "__main__":
    serve(Hand(socket.socket(fileno=3)))
