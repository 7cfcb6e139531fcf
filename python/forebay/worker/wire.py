"""Frames of the step protocol: the Python twin of `crates/protocol`. `docs/protocol.md` is the specification.

Columns are read in place: a decoded frame's arrays are views of the connection's buffer and live until its next `recv`.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

MAGIC = b"FBAY"
VERSION = 3
HEADER_BYTES = 24
MAX_WORDS = 1 << 26

SLOT_WORDS = 13
SLOT_FLOATS = 6
PAGE_WRITE_WORDS = 3
ROW_WORDS = 4
FLAG_SAMPLE = 1
FLAG_POOL = 2
ROW_OK = 0
ROW_NOT_FINITE = 1

Int32s: TypeAlias = npt.NDArray[np.int32]
Float32s: TypeAlias = npt.NDArray[np.float32]
Columns: TypeAlias = "Sequence[Int32s | Float32s]"

_HEADER = struct.Struct("<4sHHQII")

if sys.byteorder != "little":
    raise ImportError("the step protocol reads little-endian columns in place")


class WireError(Exception):
    """Bytes that are not a frame of this protocol."""


class SlotWord(IntEnum):
    """Index of a field in a new slot's record of the `slots` column."""

    SLOT = 0
    TOKEN_COUNT = 1
    PROMPT_LEN = 2
    TOP_K = 3
    SEED_LO = 4
    SEED_HI = 5
    MIN_TOTAL = 6
    LOGPROBS = 7
    STOP_COUNT = 8
    BIAS_COUNT = 9
    ARENA_OFFSET = 10
    SEGMENT = 11
    EMBEDS_OFFSET = 12


class SlotFloat(IntEnum):
    """Index of a field in a new slot's record of the `slot_floats` column."""

    TEMPERATURE = 0
    TOP_P = 1
    MIN_P = 2
    REPETITION_PENALTY = 3
    PRESENCE_PENALTY = 4
    FREQUENCY_PENALTY = 5


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


@dataclass(frozen=True)
class Frame:
    """A received frame; `columns` are int32 views of the receive buffer."""

    kind: Kind
    step: int
    columns: list[Int32s]

    @classmethod
    def decode(cls, header: Header, body: bytes | bytearray | memoryview) -> Frame:
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
        return cls(header.kind, header.step, columns)

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


def _ints(*shape: int) -> Any:
    return field(default_factory=lambda: np.zeros(shape, np.int32))


def _floats(*shape: int) -> Any:
    return field(default_factory=lambda: np.zeros(shape, np.float32))


@dataclass
class Plan:
    """One step of work. Shapes: `n` new slots, `p` page-table writes, `r` rows."""

    step: int = 0
    slots: Int32s = _ints(0, SLOT_WORDS)  # [n, 13], fields by SlotWord
    slot_floats: Float32s = _floats(0, SLOT_FLOATS)  # [n, 6], fields by SlotFloat
    tokens: Int32s = _ints(0)  # ragged, of the new slots whose ARENA_OFFSET is -1
    stop_ids: Int32s = _ints(0)  # ragged, STOP_COUNT a new slot
    bias_ids: Int32s = _ints(0)  # ragged, BIAS_COUNT a new slot
    bias_values: Float32s = _floats(0)  # one a bias id
    page_writes: Int32s = _ints(0, PAGE_WRITE_WORDS)  # [p, 3]: slot, index, page
    rows: Int32s = _ints(0, ROW_WORDS)  # [r, 4]: slot, start, length, flags

    @classmethod
    def decode(cls, frame: Frame) -> Plan:
        """Reads a plan's frame in place; raises `WireError` when the columns' lengths contradict each other."""
        slots, slot_floats, tokens, stop_ids, bias_ids, bias_values, page_writes, rows = _columns(frame, Kind.PLAN, 8)
        if slots.size % SLOT_WORDS or page_writes.size % PAGE_WRITE_WORDS or rows.size % ROW_WORDS:
            raise WireError("malformed frame: plan record length")
        slots = slots.reshape(-1, SLOT_WORDS)
        inline = stops = biases = 0
        if len(slots):
            counts = slots[:, [SlotWord.TOKEN_COUNT, SlotWord.STOP_COUNT, SlotWord.BIAS_COUNT]].astype(np.int64)
            if counts.min() < 0:
                raise WireError("malformed frame: negative count")
            inline = counts[slots[:, SlotWord.ARENA_OFFSET] < 0, 0].sum()
            _, stops, biases = counts.sum(axis=0)
        if not (
            slot_floats.size == len(slots) * SLOT_FLOATS
            and tokens.size == inline
            and stop_ids.size == stops
            and bias_ids.size == bias_values.size == biases
        ):
            raise WireError("malformed frame: plan columns disagree")
        return cls(
            frame.step,
            slots,
            slot_floats.view(np.float32).reshape(-1, SLOT_FLOATS),
            tokens,
            stop_ids,
            bias_ids,
            bias_values.view(np.float32),
            page_writes.reshape(-1, PAGE_WRITE_WORDS),
            rows.reshape(-1, ROW_WORDS),
        )

    def encode(self) -> bytes:
        """The plan's frame."""
        return encode(Kind.PLAN, self.step, _fields(self))


@dataclass
class StepResult:
    """What one step gave.

    Shapes: `s` sampled rows, `r` rows, `e` log-probability entries of all sampled rows, `p` pooled rows.
    """

    step: int = 0
    tokens: Int32s = _ints(0)  # [s]
    row_errors: Int32s = _ints(0)  # [r]: ROW_OK or ROW_NOT_FINITE
    logprob_counts: Int32s = _ints(0)  # [s], or empty when no row asked
    logprob_ids: Int32s = _ints(0)  # [e]: a row's sampled token, then its most likely tokens
    logprob_values: Float32s = _floats(0)  # [e]: natural logarithms
    timing: Int32s = _ints(2)  # microseconds: the step's compute, the gap before it
    pooled: Float32s = _floats(0)  # [p * size]: the vectors one after the other

    @classmethod
    def decode(cls, frame: Frame) -> StepResult:
        """Reads a result's frame in place; raises `WireError` when the columns' lengths contradict each other."""
        tokens, row_errors, counts, ids, values, timing, pooled = _columns(frame, Kind.RESULT, 7)
        if counts.size and counts.min() < 0:
            raise WireError("malformed frame: negative count")
        if not (
            tokens.size <= row_errors.size
            and counts.size in (0, tokens.size)
            and ids.size == values.size == counts.sum(dtype=np.int64)
            and timing.size == 2
        ):
            raise WireError("malformed frame: result columns disagree")
        floats = values.view(np.float32), pooled.view(np.float32)
        return cls(frame.step, tokens, row_errors, counts, ids, floats[0], timing, floats[1])

    def encode(self) -> bytes:
        """The result's frame."""
        return encode(Kind.RESULT, self.step, _fields(self))


def _columns(frame: Frame, kind: Kind, count: int) -> list[Int32s]:
    if frame.kind != kind:
        raise WireError(f"malformed frame: not a {kind.name.lower()}")
    if len(frame.columns) != count:
        raise WireError("malformed frame: number of columns")
    return frame.columns


def _fields(record: Plan | StepResult) -> list[Int32s | Float32s]:
    return [getattr(record, column.name) for column in fields(record)[1:]]


class Connection:
    """Frames over a connected stream socket, received into one buffer that only grows."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._header = bytearray(HEADER_BYTES)
        self._body = bytearray(1 << 16)

    def send(self, data: bytes) -> None:
        """Sends an encoded frame."""
        self._socket.sendall(data)

    def recv(self) -> Frame | None:
        """The next frame, or None at the end of the stream. Arrays of the frame before it become invalid."""
        if not self._fill(memoryview(self._header)):
            return None
        header = Header.decode(self._header)
        size = 4 * header.words
        if len(self._body) < size:
            # Arrays handed out before still export the old buffer, so it can only be replaced, never resized.
            self._body = bytearray(max(size, 2 * len(self._body)))
        body = memoryview(self._body)[:size]
        if size and not self._fill(body):
            raise WireError("the stream ended in the middle of a frame")
        return Frame.decode(header, body)

    def _fill(self, view: memoryview) -> bool:
        """Receives exactly `len(view)` bytes; False if the stream ended before the first."""
        got = 0
        while got < len(view):
            count = self._socket.recv_into(view[got:])
            if count == 0:
                if got:
                    raise WireError("the stream ended in the middle of a frame")
                return False
            got += count
        return True
