"""Frames of the step protocol, the Python twin of `crates/protocol`. `docs/protocol.md` is the specification.

Columns are read in place: the arrays of a decoded frame are views of the buffer that it was received into.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

MAGIC = b"FBAY"
VERSION = 3
HEADER_BYTES = 24
MAX_WORDS = 1 << 26

Int32s: TypeAlias = npt.NDArray[np.int32]
Float32s: TypeAlias = npt.NDArray[np.float32]
Columns: TypeAlias = "Sequence[Int32s | Float32s]"

_HEADER = struct.Struct("<4sHHQII")

if sys.byteorder != "little":
    raise ImportError("the step protocol reads little-endian columns in place")


class WireError(Exception):
    """Bytes that are not a frame of this protocol."""


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1
    CONFIG = 2
    PROGRESS = 3
    READY = 4
    PLAN = 5
    RESULT = 6
    FATAL = 7
    SHUTDOWN = 8


@dataclass(frozen=True)
class Header:
    """A decoded frame header: `columns` column lengths and all columns together are `words` 32-bit words."""

    kind: Kind
    step: int
    columns: int
    words: int

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> Header:
        """Reads `HEADER_BYTES` bytes; raises `WireError` on anything but a well-formed header of this version."""
        magic, version, kind, step, columns, words = _HEADER.unpack(data)
        if magic != MAGIC:
            raise WireError(f"not a Forebay frame (magic {magic.hex()})")
        if version != VERSION:
            raise WireError(
                f"protocol version {version}, but this hand speaks {VERSION}: "
                "brain and hand are from different releases"
            )
        if kind not in Kind.__members__.values():
            raise WireError(f"unknown frame kind {kind}")
        if words > MAX_WORDS:
            raise WireError(f"frame of {words} words is over the limit")
        if columns > words:
            raise WireError("malformed frame: more columns than words")
        return cls(Kind(kind), step, columns, words)


def nothing() -> None:
    """The release of a buffer that nobody else waits for."""


@dataclass(frozen=True)
class Frame:
    """A received frame; `columns` are views of its body."""

    kind: Kind
    step: int
    columns: list[Int32s]
    body: Int32s = field(default_factory=lambda: np.zeros(0, np.int32))
    """The words after the header, as they were received."""
    release: Callable[[], None] = nothing
    """Called once when nobody reads the body any more: the next frame may be received into its buffer."""

    @classmethod
    def decode(
        cls, header: Header, body: bytes | bytearray | memoryview, release: Callable[[], None] = nothing
    ) -> Frame:
        """Splits the `4 * header.words` bytes after the header into columns."""
        words = np.frombuffer(body, dtype="<i4")
        if len(words) != header.words:
            raise WireError("malformed frame: word count")
        lengths = words[: header.columns].view(np.uint32).tolist()
        if header.columns + sum(lengths) != header.words:
            raise WireError("malformed frame: column lengths")
        columns = []
        at = header.columns
        for length in lengths:
            columns.append(words[at : at + length])
            at += length
        return cls(header.kind, header.step, columns, words, release)

    @classmethod
    def of(cls, data: bytes) -> Frame:
        """A whole encoded frame, in a buffer of its own."""
        return cls.decode(Header.decode(data[:HEADER_BYTES]), bytearray(data[HEADER_BYTES:]))

    def json(self) -> dict[str, Any]:
        """The object of a JSON frame."""
        if len(self.columns) != 1:
            raise WireError("malformed frame: number of columns")
        try:
            value = json.loads(self.columns[0].tobytes())
        except ValueError as error:
            raise WireError(f"malformed frame: JSON: {error}") from error
        if not isinstance(value, dict):
            raise WireError("malformed frame: JSON: not an object")
        return value

    def expect(self, kind: Kind, columns: int) -> list[Int32s]:
        """The columns of a frame that is of this kind and has so many; raises `WireError`."""
        if self.kind != kind:
            raise WireError(f"malformed frame: not a {kind.name.lower()}")
        if len(self.columns) != columns:
            raise WireError("malformed frame: number of columns")
        return self.columns


def encode(kind: Kind, step: int, columns: Columns) -> bytes:
    """A frame of word columns (int32 or float32 arrays)."""
    words = len(columns) + sum(column.size for column in columns)
    header = _HEADER.pack(MAGIC, VERSION, kind, step, len(columns), words)
    lengths = struct.pack(f"<{len(columns)}I", *(column.size for column in columns))
    return b"".join([header, lengths, *(column.tobytes() for column in columns)])


def encode_json(kind: Kind, value: Mapping[str, Any]) -> bytes:
    """A frame whose one column is JSON text, padded with spaces to a whole word."""
    return encode_text(kind, json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def encode_text(kind: Kind, text: str) -> bytes:
    """A frame whose one column is `text`, which is JSON; empty text: no column, as `shutdown` has it."""
    data = text.encode()
    data += b" " * (-len(data) % 4)
    return encode(kind, 0, [np.frombuffer(data, dtype="<i4")] if data else [])


def ints(*shape: int) -> Any:
    """A dataclass field: int32 zeros of this shape."""
    return field(default_factory=lambda: np.zeros(shape, np.int32))


def floats(*shape: int) -> Any:
    """A dataclass field: float32 zeros of this shape."""
    return field(default_factory=lambda: np.zeros(shape, np.float32))
