"""A hand without a model, in the standard library alone: what it does is chosen by the config's `behaviour`."""

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
    """Kind, step and columns of the next frame."""
    _, _, kind, step, columns, words = struct.unpack("<4sHHQII", read_exactly(24))
    body = struct.unpack(f"<{words}i", read_exactly(4 * words))
    lengths, rest, split = body[:columns], body[columns:], []
    for length in lengths:
        split.append(rest[:length])
        rest = rest[length:]
    return kind, step, split


def send(kind, step, columns):
    """Writes a frame of integer columns."""
    words = [len(c) for c in columns] + [w for c in columns for w in c]
    head = struct.pack(
        "<4sHHQII", b"FBAY", int(os.environ.get("FAKE_VERSION", "3")), kind, step, len(columns), len(words)
    )
    SOCKET.sendall(head + struct.pack(f"<{len(words)}i", *words))


def send_json(kind, value):
    """Writes a frame of one JSON column."""
    text = json.dumps(value).encode()
    text += b" " * (-len(text) % 4)
    send(kind, 0, [struct.unpack(f"<{len(text) // 4}i", text)])


send_json(HELLO, {"rank": 0, "pid": os.getpid()})
_, _, [column] = read_frame()
config = json.loads(struct.pack(f"<{len(column)}i", *column))
behaviour = config["behaviour"]
if behaviour == "fatal":
    send_json(FATAL, {"error": "no such model", "traceback": ""})
    sys.exit(1)
if behaviour == "child":
    grandchild = subprocess.Popen(["sleep", "1000"])
    with open(config["pid_file"], "w") as file:
        file.write(f"{grandchild.pid}")
send_json(PROGRESS, {"stage": "weights", "done": 1, "total": 2})
pages = (config.get("max_total_tokens") or 1600) // config["page_size"]
facts = {"page_count": pages, "vocab_size": 9, "hidden_size": 4, "dtype": "float32", "weight_bytes": 1, "kv_bytes": 2}
facts |= {"device": "fake", "load_seconds": 0.5}
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
    rows = columns[7]
    sampled = sum(flags & 1 for flags in rows[3::4])
    first = 0
    if columns[0] and columns[0][10] >= 0:
        arena = os.pread(4, 4, columns[0][10])
        first = struct.unpack("<i", arena)[0]
    send(RESULT, step, [[first] * sampled, [0] * (len(rows) // 4), [], [], [], [11, 22], []])
