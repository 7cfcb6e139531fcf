"""Frames of the step protocol, the Python equivalent of `crates/protocol`. `docs/protocol.md` is the specification.

Columns are read in place: the arrays of a decoded frame are views of its buffer.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from forebay.protocol.constants import ENTRY_WORDS, VERSION
from forebay.protocol.constants import HEADER_BYTES as HEADER_BYTES
from forebay.protocol.constants import MAX_WORDS as MAX_WORDS
from forebay.protocol.constants import Kind as Kind

MAGIC = b"FBAY"

Int32s: TypeAlias = npt.NDArray[np.int32]
Float32s: TypeAlias = npt.NDArray[np.float32]
Columns: TypeAlias = "Sequence[Int32s | Float32s]"

_HEADER = struct.Struct("<4sHHQII")

if sys.byteorder != "little":
    raise ImportError("the step protocol reads little-endian columns in place")


class WireError(Exception):
    """The bytes are not a frame of this protocol."""


class Column(NamedTuple):
    """A column of a kind of frame."""

    id: int
    name: str
    words: int = 0
    """The number of words of a record; 0: the column is one-dimensional."""
    is_float: bool = False

    def read(self, words: Int32s) -> Int32s | Float32s | None:
        """Returns the column's array, a view of `words`; None if the last record is incomplete."""
        if self.words:
            if words.size % self.words:
                return None
            words = words.reshape(-1, self.words)
        return words.view(np.float32) if self.is_float else words


@dataclass(frozen=True)
class Header:
    """A decoded frame header. `words`: the number of 32-bit words after it (table of columns, and columns)."""

    kind: Kind
    step: int
    columns: int
    words: int

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> Header:
        """Reads `HEADER_BYTES` bytes. Raises `WireError` for anything except a well-formed header of this version."""
        magic, version, kind, step, columns, words = _HEADER.unpack(data)
        if magic != MAGIC:
            raise WireError(f"not a Forebay frame (magic {magic.hex()})")
        if version != VERSION:
            raise WireError(
                f"protocol version {version}, but this hand speaks {VERSION}: "
                "brain and hand are from different releases"
            )
        try:
            known = Kind(kind)
        except ValueError:
            raise WireError(f"unknown frame kind {kind}") from None
        if words > MAX_WORDS:
            raise WireError(f"frame of {words} words is over the limit")
        if ENTRY_WORDS * columns > words:
            raise WireError("malformed frame: more columns than words")
        return cls(known, step, columns, words)


def nothing() -> None:
    """The `release` of a frame whose buffer is not reused: does nothing."""


@dataclass(frozen=True)
class Frame:
    """A received frame."""

    kind: Kind
    step: int
    places: dict[int, slice]
    """The slices of the body, in words, that contain the columns, by id."""
    body: Int32s
    """The received words after the header."""
    release: Callable[[], None] = nothing
    """Releases the body; called once, after the last read. The next frame may then use the buffer."""

    @classmethod
    def decode(
        cls, header: Header, body: bytes | bytearray | memoryview, release: Callable[[], None] = nothing
    ) -> Frame:
        """Reads the table of columns in the `4 * header.words` bytes after the header. Raises `WireError`."""
        words = np.frombuffer(body, dtype="<i4")
        if len(words) != header.words:
            raise WireError("malformed frame: word count")
        at = ENTRY_WORDS * header.columns
        table = words[:at].view(np.uint32).tolist()
        places = {}
        last = 0
        for id_, length in zip(table[::ENTRY_WORDS], table[1::ENTRY_WORDS], strict=True):
            if id_ <= last:
                raise WireError("malformed frame: order of columns")
            last = id_
            places[id_] = slice(at, at + length)
            at += length
        if at != header.words:
            raise WireError("malformed frame: column lengths")
        return cls(header.kind, header.step, places, words, release)

    @classmethod
    def of(cls, data: bytes) -> Frame:
        """Decodes a whole encoded frame into a separate buffer."""
        return cls.decode(Header.decode(data[:HEADER_BYTES]), bytearray(data[HEADER_BYTES:]))

    def json(self) -> dict[str, Any]:
        """Returns the object of a JSON frame."""
        (column,) = self.known(1)
        try:
            value = json.loads(column.tobytes())
        except ValueError as error:
            raise WireError(f"malformed frame: JSON: {error}") from error
        if not isinstance(value, dict):
            raise WireError("malformed frame: JSON: not an object")
        return value

    def known(self, count: int) -> list[Int32s]:
        """Returns the columns 1 to `count`, as views of the body. Absent columns are empty.

        Raises `WireError` for other columns.
        """
        columns = [self.body[:0]] * count
        for id_, place in self.places.items():
            if id_ > count:
                raise WireError(f"malformed frame: unknown column {id_}")
            columns[id_ - 1] = self.body[place]
        return columns

    def check_kind(self, kind: Kind) -> None:
        """Raises `WireError` if the frame is of another kind."""
        if self.kind != kind:
            raise WireError(f"malformed frame: not a {kind.name.lower()}")

    def read(self, kind: Kind, columns: Mapping[int, Column]) -> dict[str, Int32s | Float32s]:
        """Returns the frame's columns by name, as views of the body; `columns` are those of this kind of frame, by id.

        Raises `WireError` for another kind, an unknown id, and an incomplete record.
        """
        self.check_kind(kind)
        found = {}
        for id_, place in self.places.items():
            column = columns.get(id_)
            if column is None:
                raise WireError(f"malformed frame: unknown column {id_}")
            array = column.read(self.body[place])
            if array is None:
                raise WireError(f"malformed frame: {kind.name.lower()} record length")
            found[column.name] = array
        return found

    def expect(self, kind: Kind, count: int) -> list[Int32s]:
        """Returns the columns of a frame, as `known` does. Raises `WireError` if the frame is of another kind."""
        self.check_kind(kind)
        return self.known(count)


def encode(kind: Kind, step: int, columns: Columns) -> bytes:
    """Encodes a frame of columns of words (int32 or float32 arrays) with the ids 1, 2, and so on.

    Empty columns are left out.
    """
    return encode_columns(kind, step, enumerate(columns, 1))


def encode_columns(kind: Kind, step: int, columns: Iterable[tuple[int, Int32s | Float32s]]) -> bytes:
    """Encodes a frame of columns with their ids, which ascend. Empty columns are left out."""
    there = [(id_, column) for id_, column in columns if column.size]
    words = sum(column.size for _, column in there) + ENTRY_WORDS * len(there)
    header = _HEADER.pack(MAGIC, VERSION, kind, step, len(there), words)
    table = [word for id_, column in there for word in (id_, column.size)]
    return b"".join([header, struct.pack(f"<{len(table)}I", *table), *(column.tobytes() for _, column in there)])


def encode_json(kind: Kind, value: Mapping[str, Any]) -> bytes:
    """Encodes a frame whose only column is JSON text, padded with spaces to a whole word."""
    return encode_text(kind, json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def encode_text(kind: Kind, text: str) -> bytes:
    """Encodes a frame whose only column is `text`, which is JSON. Without text there is no column, as in `shutdown`."""
    data = text.encode()
    data += b" " * (-len(data) % 4)
    return encode(kind, 0, [np.frombuffer(data, dtype="<i4")] if data else [])


def ints(*shape: int) -> Any:
    """Returns a dataclass field: int32 zeros of this shape."""
    return _zeros(shape, np.int32)


def floats(*shape: int) -> Any:
    """Returns a dataclass field: float32 zeros of this shape."""
    return _zeros(shape, np.float32)


def _zeros(shape: tuple[int, ...], dtype: type[np.generic]) -> Any:
    empty = np.zeros(shape, dtype)
    # Empty arrays can't be written to, so all fields share one array: a result has a dozen such fields.
    return field(default_factory=lambda: empty if not empty.size else np.zeros(shape, dtype))
