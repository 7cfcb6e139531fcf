"""Requests of a hostile client: each is small or within the limits, and once took a server down or delayed others.

Grammars and schemas are built from counts, so that a reader sees what makes them expensive.
"""

from __future__ import annotations

import base64
import http.client
import json
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from benchmarks.images import MODEL as SEEING

PATIENCE_SECONDS = 90.0
Body = dict[str, Any]


@dataclass(frozen=True)
class Client:
    """A client with a key, at a port of this machine."""

    port: int
    key: str

    def post(self, path: str, body: Body) -> int:
        """The status of a request. 0: the server closed the connection, or did not answer in time."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_SECONDS)
        head = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        try:
            connection.request("POST", path, json.dumps(body), head)
            response = connection.getresponse()
            while response.read(1 << 20):
                pass
        except (OSError, http.client.HTTPException):
            return 0
        else:
            return response.status
        finally:
            connection.close()

    def post_all(self, path: str, bodies: Sequence[Body]) -> list[int]:
        """The statuses of requests that are sent at the same time."""
        with ThreadPoolExecutor(len(bodies)) as threads:
            return list(threads.map(lambda body: self.post(path, body), bodies))


Send = Callable[[Client], list[int]]


@dataclass(frozen=True)
class Attack:
    """An attack of a hostile client, and the further flags of the attacked server."""

    name: str
    send: Send
    """Sends the requests and returns their statuses."""
    model: str = "smollm2"
    context: int = 8192
    flags: tuple[str, ...] = field(default=())
    """Further flags of the server."""


def doubling(terminals: int, word: str = "a") -> str:
    """A Lark grammar whose terminals each contain the next one twice."""
    lines = [f"T{at}: T{at + 1} T{at + 1}" for at in range(terminals - 1)]
    return "\n".join(["start: T0", *lines, f'T{terminals - 1}: "{word}"'])


def distinct_grammars(client: Client) -> list[int]:
    """Grammars of about 350 bytes, one after the other, each with a large compiled form."""
    words = [chr(ord("a") + at) for at in range(16)]
    return [
        client.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "guided_grammar": doubling(19, word)})
        for word in words
    ]


def choices_of_a_grammar(client: Client) -> list[int]:
    """Two requests of about 310 bytes, each for 128 copies of a matcher."""
    body = {"prompt": "x", "max_tokens": 1, "n": 128, "guided_grammar": doubling(18)}
    return [client.post("/v1/completions", body) for _ in range(2)]


def choices_of_an_enum(client: Client) -> list[int]:
    """128 choices of 16 prompts from 5000 strings."""
    body = {
        "prompt": ["x"] * 16,
        "max_tokens": 1,
        "n": 128,
        "guided_json": {"enum": [f"value {at}" for at in range(5000)]},
    }
    return [client.post("/v1/completions", body)]


def schema_cycle(client: Client) -> list[int]:
    """A forced call whose argument's schema refers to itself twelve times; then a simple schema."""
    value = {"type": ["number", "null"], "anyOf": [{"$ref": "#/$defs/v"}] * 12}
    parameters = {"type": "object", "properties": {"x": {"$ref": "#/$defs/v"}}, "$defs": {"v": value}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8, "tools": [tool], "tool_choice": "required"}
    forced = client.post("/v1/chat/completions", chat)
    return [forced, client.post("/v1/completions", {"prompt": "x", "max_tokens": 4, "guided_regex": "x1y+"})]


def dear_masks(client: Client) -> list[int]:
    """256 choices, in which every token leads to a new state of the lexer."""
    body = {"prompt": ["x"] * 2, "max_tokens": 12, "n": 128, "guided_regex": "x0.*a.{18}b.{18}c.{18}"}
    return [client.post("/v1/completions", body)]


def optional_letters(client: Client) -> list[int]:
    """128 choices of a regular expression with 2000 optional letters."""
    return [
        client.post("/v1/completions", {"prompt": "x", "max_tokens": 12, "n": 128, "guided_regex": "[a-z]?" * 2000})
    ]


def repeated_log_probabilities(client: Client) -> list[int]:
    """A prompt's log-probabilities, for each of 128 choices, then of 16 choices of eight requests."""
    prompt = [10] * 6000
    one = client.post("/v1/completions", {"prompt": prompt, "max_tokens": 1, "n": 128, "prompt_logprobs": 20})
    body = {"prompt": prompt, "max_tokens": 1, "n": 16, "echo": True, "logprobs": 20}
    return [one, *client.post_all("/v1/completions", [body] * 8)]


def declared_bodies(client: Client) -> list[int]:
    """Bodies that declare 64 MiB to 8 KiB and are sent in part, until the server accepts no more of them."""

    def head(path: str, length: int) -> bytes:
        lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {client.key}"]
        lines += ["Content-Type: application/json", f"Content-Length: {length}"]
        return "\r\n".join([*lines, "", ""]).encode()

    with ExitStack() as connections:
        for length, count in ((64 << 20, 16), (4 << 20, 40), (512 << 10, 40), (64 << 10, 40), (8 << 10, 200)):
            for _ in range(count):
                connection = connections.enter_context(socket.create_connection(("127.0.0.1", client.port)))
                try:
                    connection.sendall(head("/v1/completions", length) + b'{"prompt":"' + b"x" * (length // 1024))
                except OSError:
                    continue
        time.sleep(5.0)
    return []


def wide_answers(client: Client) -> list[int]:
    """Eight chats of 152 bytes for 128 choices of 4096 tokens with 20 alternatives."""
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "n": 128,
        "max_tokens": 4096,
        "logprobs": True,
        "top_logprobs": 20,
    }
    return client.post_all("/v1/chat/completions", [body] * 8)


def dear_compiles(client: Client) -> list[int]:
    """Schemas of 10 to 400 KB that take the compiler seconds or minutes."""

    def patterns(count: int) -> Body:
        return {"type": "object", "patternProperties": {f"^a{at}.*x{at}$": {"type": "null"} for at in range(count)}}

    many = {"type": "object", "properties": {f"p{at}": {"type": "integer"} for at in range(15_000)}}
    schemas = [patterns(300), patterns(500), patterns(800), many]
    return client.post_all("/v1/completions", [{"prompt": "x", "max_tokens": 1, "guided_json": one} for one in schemas])


def blanks(client: Client) -> list[int]:
    """Two texts of 3.9 MB of blanks to tokenize."""
    return client.post_all("/tokenize", [{"prompt": " " * 3_900_000}] * 2)


def one_colour(side: int) -> bytes:
    """A PNG file of a single color with 16-bit pixels: a small file of many pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    row = b"\0" + b"\x40\x40" * (3 * side)
    packer = zlib.compressobj(9)
    pixels = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    head = struct.pack(">IIBBBBB", side, side, 16, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def large_pictures(client: Client) -> list[int]:
    """Twelve chats with an image of 4000 by 4000 pixels in one color."""
    url = f"data:image/png;base64,{base64.b64encode(one_colour(4000)).decode()}"

    def chats() -> Iterator[Body]:
        for at in range(12):
            parts = [{"type": "text", "text": str(at)}, {"type": "image_url", "image_url": {"url": url}}]
            yield {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}

    return client.post_all("/v1/chat/completions", list(chats()))


ATTACKS = [
    Attack("16 grammars of 350 bytes", distinct_grammars),
    Attack("128 choices of a grammar, twice", choices_of_a_grammar),
    Attack("128 x 16 choices of an enum", choices_of_an_enum),
    Attack("a schema that refers to itself", schema_cycle, flags=("--tool-call-parser", "qwen3_coder")),
    Attack("dear masks", dear_masks),
    Attack("2000 optional letters", optional_letters),
    Attack("a prompt's log-probabilities, 128 times", repeated_log_probabilities),
    Attack("declared bodies", declared_bodies),
    Attack("8 x 128 choices with 20 alternatives", wide_answers),
    Attack("dear compiles", dear_compiles),
    Attack("4 MB of blanks", blanks),
    Attack("12 pictures of 16 megapixels", large_pictures, model=SEEING, context=4096),
]
"""The attacks, in order. Flags name a tool-call format if the model's template has none."""
