"""A hand without a model, in the standard library alone: what it does is chosen by FAKE_BEHAVIOUR."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time

SOCKET = socket.socket(fileno=3)
HELLO, CONFIG, PROGRESS, READY, PLAN, RESULT, FATAL, SHUTDOWN = range(1, 9)
SLOTS, ROWS = 1, 8
TOKENS, ROW_ERRORS, TIMING = 1, 2, 6


def read_exactly(count):
    """Bytes from the brain; exits at the end of the stream."""
    data = b""
    while len(data) < count:
        piece = SOCKET.recv(count - len(data))
        if not piece:
            sys.exit(0)
        data += piece
    return data


def read_frame():
    """Kind, step and columns by id of the next frame."""
    _, _, kind, step, columns, words = struct.unpack("<4sHHQII", read_exactly(24))
    body = struct.unpack(f"<{words}i", read_exactly(4 * words))
    table, rest, split = body[: 2 * columns], body[2 * columns :], {}
    for id_, length in zip(table[::2], table[1::2], strict=True):
        split[id_] = rest[:length]
        rest = rest[length:]
    return kind, step, split


def send(kind, step, columns):
    """Writes a frame of integer columns by id."""
    words = [w for id_, c in columns.items() for w in (id_, len(c))] + [w for c in columns.values() for w in c]
    head = struct.pack(
        "<4sHHQII", b"FBAY", int(os.environ.get("FAKE_VERSION", "4")), kind, step, len(columns), len(words)
    )
    SOCKET.sendall(head + struct.pack(f"<{len(words)}i", *words))


def send_json(kind, value):
    """Writes a frame of one JSON column."""
    text = json.dumps(value).encode()
    text += b" " * (-len(text) % 4)
    send(kind, 0, {1: struct.unpack(f"<{len(text) // 4}i", text)})


send_json(HELLO, {"pid": os.getpid()})
_, _, columns = read_frame()
config = json.loads(struct.pack(f"<{len(columns[1])}i", *columns[1]))
behaviour = os.environ["FAKE_BEHAVIOUR"]
if behaviour == "fatal":
    send_json(FATAL, {"error": "no such model", "traceback": ""})
    sys.exit(1)
if behaviour == "child":
    grandchild = subprocess.Popen(["sleep", "1000"])
    with open(os.environ["FAKE_PID_FILE"], "w") as file:
        file.write(f"{grandchild.pid}")
send_json(PROGRESS, {"stage": "weights", "done": 1, "total": 2})
pages = (config.get("max_total_tokens") or 1600) // config["page_size"]
facts = {"page_count": pages, "vocab_size": 9, "hidden_size": 4, "dtype": "float32", "weight_bytes": 1, "kv_bytes": 2}
facts |= {"device": "fake", "load_seconds": 0.5}
if behaviour == "no page count":
    del facts["page_count"]
send_json(READY, facts)
while True:
    kind, step, columns = read_frame()
    if kind == SHUTDOWN:
        if behaviour == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)
        sys.exit(0)
    if behaviour == "garbage":
        SOCKET.sendall(b"what is this? " * 10)
    if behaviour == "crash":
        os._exit(7)
    slots, rows = columns.get(SLOTS, ()), columns.get(ROWS, ())
    sampled = sum(flags & 1 for flags in rows[3::4])
    first = config["rank"] if behaviour == "own token" else 0
    if slots and slots[10] >= 0:
        arena = os.pread(4, 4, slots[10])
        first = struct.unpack("<i", arena)[0]
    send(RESULT, step, {TOKENS: [first] * sampled, ROW_ERRORS: [0] * (len(rows) // 4), TIMING: [11, 22]})
