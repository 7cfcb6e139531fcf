"""A hand without a model that needs only the standard library. FAKE_BEHAVIOUR selects its behaviour."""

import io
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

PROTOCOL = Path(__file__).resolve().parents[2] / "protocol" / "src" / "frame.rs"
VERSION = re.search(r"VERSION: u16 = (\d+)", PROTOCOL.read_text())[1]
SOCKET = socket.socket(fileno=3)
SHARED = []
ORDERS = []
COPYING = []
HELLO, CONFIG, PROGRESS, READY, PLAN, RESULT, FATAL, SHUTDOWN = range(1, 9)
STORE, STORE_REPLY, PLAN_AT, ADAPTER = 10, 11, 12, 13
SLOTS, TOKENS_OF_SLOTS, ROWS, EMBEDS, COPIES = 1, 3, 8, 11, 14
TOKENS, ROW_ERRORS, TIMING, COPIED, COPY_TIMING = 1, 2, 6, 9, 10
HOST = 5


def read_exactly(count):
    """Reads bytes from the brain. Exits when the connection closes."""
    data = b""
    while len(data) < count:
        piece = SOCKET.recv(count - len(data))
        if not piece:
            sys.exit(0)
        data += piece
    return data


def read_frame(read=read_exactly):
    """Reads the next frame, from the socket or the arena. Returns its kind, its step and its columns by id."""
    _, _, kind, step, columns, words = struct.unpack("<4sHHQII", read(24))
    body = struct.unpack(f"<{words}i", read(4 * words))
    table, rest, split = body[: 2 * columns], body[2 * columns :], {}
    for id_, length in zip(table[::2], table[1::2], strict=True):
        split[id_] = rest[:length]
        rest = rest[length:]
    if kind == PLAN_AT:
        offset, words = split[1]
        frame = io.BytesIO(os.pread(4, 4 * words, offset))
        in_arena = read_frame(frame.read)
        assert not frame.read(), "more words than the frame has"
        assert in_arena[1] == step
        SHARED.append(step)
        return in_arena
    return kind, step, split


def ask(op, **arguments):
    """Sends a request to the store. Returns the response."""
    send_json(STORE, {"id": 9, "op": op, **arguments})
    _, _, columns = read_frame()
    reply = json.loads(struct.pack(f"<{len(columns[1])}i", *columns[1]))
    assert reply["id"] == 9
    return reply


def send(kind, step, columns):
    """Sends a frame of integer columns, given by id."""
    words = [w for id_, c in columns.items() for w in (id_, len(c))] + [w for c in columns.values() for w in c]
    head = struct.pack(
        "<4sHHQII", b"FBAY", int(os.environ.get("FAKE_VERSION", VERSION)), kind, step, len(columns), len(words)
    )
    SOCKET.sendall(head + struct.pack(f"<{len(words)}i", *words))


def send_json(kind, value):
    """Sends a frame with one JSON column."""
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
rank = config["rank"]
if behaviour == "meet":
    # Rank 0 is late: the other ranks wait for the value that it sets.
    if rank == 0:
        time.sleep(0.2)
        ask("set", key="word", value="aGk=")
    else:
        assert ask("get", key="word")["value"] == "aGk="
    count = ask("add", key="met", amount=1)["number"]
    assert 1 <= count <= config["world_size"]
    ask("wait", keys=["word", "met"])
if behaviour == "dies while others wait":
    if rank == 0:
        os._exit(3)
    ask("get", key="never")
if behaviour == "asks too much":
    ask("set", key="k" * 2000, value="")
if behaviour == "other pages":
    config["max_total_tokens"] = 16 * (100 + rank)
send_json(PROGRESS, {"stage": "weights", "done": 1, "total": 2})
pages = (config.get("max_total_tokens") or 1600) // config["page_size"]
facts = {"page_count": pages, "vocab_size": 9, "hidden_size": 4, "dtype": "float32", "weight_bytes": 1, "kv_bytes": 2}
facts |= {"device": "fake", "load_seconds": 0.5}
if behaviour == "no page count":
    del facts["page_count"]
if behaviour == "copies":
    # Each rank writes a mark to its memory, and must not find another rank's mark there.
    mark = os.pread(HOST, 1, 0)
    assert mark in (b"", b"%d" % rank), mark
    os.pwrite(HOST, b"%d" % rank, 0)
    facts |= {"page_bytes": 100 if mark else 1, "host_page_count": config["host_pages"] or config["host_bytes"] // 10}
send_json(READY, facts)
while True:
    kind, step, columns = read_frame()
    if kind == SHUTDOWN:
        if behaviour == "last words":
            with open(os.environ["FAKE_PID_FILE"], "w") as file:
                file.write("told")
        if behaviour == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)
        sys.exit(0)
    if kind == ADAPTER:
        ORDERS.append(columns[1])
        continue
    if behaviour == "garbage":
        SOCKET.sendall(b"what is this? " * 10)
    if behaviour == "crash":
        os._exit(7)
    if behaviour == "asks late":
        ask("count")
    if rank == 1 and step == int(os.environ.get("FAKE_STEP", "2")):
        if behaviour == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if behaviour == "is stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if behaviour == "lies":
            rank = 7
        if behaviour == "skips":
            step += 1
    slots, rows = columns.get(SLOTS, ()), columns.get(ROWS, ())
    sampled = sum(flags & 1 for flags in rows[3::4])
    told = {"own token": rank, "lies": rank // 7, "tells": len(SHARED)}
    told["is told"] = 10 * len(ORDERS) + len(SHARED)
    told["echo"] = (*columns.get(TOKENS_OF_SLOTS, ()), 0)[0]
    first = told.get(behaviour, 0)
    if slots and slots[10] >= 0 and behaviour != "tells":
        arena = os.pread(4, 4, slots[10])
        first = struct.unpack("<i", arena)[0]
    if columns.get(EMBEDS):
        first = struct.unpack("<i", os.pread(4, 4, columns[EMBEDS][1]))[0]
    answer = {TOKENS: [first] * sampled, ROW_ERRORS: [0] * (len(rows) // 4), TIMING: [11, 22]}
    if behaviour == "copies":
        # Rank 0 reports a copy in the result of its plan, and rank 1 in the result after it. Rank 1
        # fails at some copies.
        COPYING.append([(ticket, int(rank == 1 and ticket % 10 == 7)) for ticket in columns.get(COPIES, ())[::4]])
        ended = COPYING[-1 - rank] if len(COPYING) > rank else []
        if ended:
            answer |= {COPIED: [word for end in ended for word in end], COPY_TIMING: [10 + rank, 0]}
    send(RESULT, step, answer)
