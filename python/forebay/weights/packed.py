"""Packed weights, kept on disk from one start to the next.

A file is safetensors, so that any tool can look into it. It is read into memory of its own, not mapped. Such memory can
lie in large pages, and a step that reads all weights from 4 KiB pages of a mapping is slower.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from forebay.device.memory import HugePages
from forebay.weights.cache import atomic_file

__all__ = ["PackedFile", "content_key"]

# Goes up with every change to what is written, or to how a checkpoint's values become what is written.
_VERSION = 2
_EDGE = 1 << 20
_PIECES = 64
_PIECE = 4096
# Of one read, and of one sum: enough that calls cost nothing, and that the threads end at about the same time.
_CHUNK = 16 << 20
_LENGTH = 8  # of the number before the header: its bytes, little-endian
_ALIGNMENT = 64
_METADATA = "__metadata__"
_SEAL = "seal"
_SUMS = "sums"
_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

Report = Callable[[int, int], None]


def content_key(files: Sequence[str], facts: Mapping[str, Any]) -> str:
    """The name of the packed weights of a model's files under `facts`, which has to fit into JSON. Raises OSError.

    The name depends on each file's size, its time of change, its first and last MiB and 64 pieces in between. To read
    all of a large model would cost as much time as the cache saves. So one change is not noticed: elsewhere in the
    file, in place, without growth, and with the old time.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps([_VERSION, facts], sort_keys=True).encode())
    for name in files:
        with open(name, "rb") as file:
            found = os.fstat(file.fileno())
            digest.update(f"{found.st_size} {found.st_mtime_ns}".encode())
            places = [(0, _EDGE), (max(0, found.st_size - _EDGE), _EDGE)]
            places += [(found.st_size * piece // _PIECES, _PIECE) for piece in range(_PIECES)]
            for offset, length in places:
                digest.update(os.pread(file.fileno(), length, offset))
    return digest.hexdigest()


class _Place(NamedTuple):
    """The place of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _Header(NamedTuple):
    notes: Mapping[str, str]
    places: Mapping[str, _Place]
    chunk: int
    """Bytes of a chunk. Each chunk of a tensor has a sum of its own."""
    sums: Mapping[str, Sequence[int]]
    """The CRC-32 of each chunk of each tensor."""


class _DamagedError(ValueError):
    """A file that is not what its name promises."""


class _WrongDataError(_DamagedError):
    """A file with the right header and other data."""


class PackedFile:
    """The file of one key in a folder whose files have a limit of bytes together. The file need not exist.

    No fault here is an error for a server of the model. A file that can't be read counts as absent, and one that can't
    be written is not written. One line on standard error has the reason. Every byte is checked at the read. A file with
    other data than were written is removed, and counts as absent.
    """

    def __init__(self, folder: Path, key: str, limit: int) -> None:
        """`limit` in bytes."""
        self.path = folder / key
        self._limit = limit
        self._found: _Header | None = None
        try:
            self._found = self._header()
        except (OSError, _DamagedError) as error:
            self._say(f"is not used: {error}")

    @property
    def notes(self) -> Mapping[str, str] | None:
        """The notes that were written with the tensors; None: there is no such file."""
        return None if self._found is None else self._found.notes

    def read(self, into: Mapping[str, torch.Tensor], report: Report) -> dict[str, torch.Tensor] | None:
        """Fills the tensors of `into` and gives all others, by name; None if that fails. `report` gets bytes.

        After None the content of `into` is undefined.
        """
        if self._found is None:
            return None
        places = self._found.places
        try:
            _check(into, places)
            missing = {name: place for name, place in places.items() if name not in into}
            room = HugePages(place.nbytes for place in missing.values())
            others = {name: room.take(place.shape, place.dtype) for name, place in missing.items()}
            _read_all(self.path, self._found, {**into, **others}, report)
        except _WrongDataError as error:
            # Its header is whole, so nobody would replace it.
            self._say(f"is not used and removed: {error}")
            self.remove()
            return None
        except (OSError, _DamagedError) as error:
            self._say(f"is not used: {error}")
            return None
        # What was used last is removed last. A folder that can't be written to does not need that.
        with suppress(OSError):
            os.utime(self.path)
        return others

    def write(self, tensors: Mapping[str, torch.Tensor], notes: Mapping[str, str]) -> None:
        """Writes the file, unless it exists by now or there is no room for it.

        Files that are unused for longest make room.
        """
        head, size = self._head(tensors, notes), sum(tensor.nbytes for tensor in tensors.values())
        try:
            with self._only_writer():
                if not self._is_there() and self._make_room(len(head) + size):
                    with atomic_file(self.path) as file:
                        file.write(head)
                        for tensor in tensors.values():
                            file.write(_bytes_of(tensor))
        except OSError as error:
            self._say(f"can't be written: {error}")

    def remove(self) -> None:
        """Removes the file if possible, because its content is wrong."""
        self._found = None
        with suppress(OSError):
            self.path.unlink()

    def _head(self, tensors: Mapping[str, torch.Tensor], notes: Mapping[str, str]) -> bytes:
        entries: dict[str, Any] = {_METADATA: dict(notes)}
        at = 0
        for name, tensor in tensors.items():
            end = at + tensor.nbytes
            entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
            at = end
        sums = {name: [zlib.crc32(chunk) for chunk in _chunks(_bytes_of(tensor))] for name, tensor in tensors.items()}
        entries[_METADATA][_SUMS] = json.dumps({"chunk": _CHUNK, "crc32": sums})
        entries[_METADATA][_SEAL] = _seal(self.path.name, entries)
        text = json.dumps(entries).encode()
        text += b" " * (-(_LENGTH + len(text)) % _ALIGNMENT)
        return len(text).to_bytes(_LENGTH, "little") + text

    def _header(self) -> _Header | None:
        """The header of the file; None if it is not there. Raises OSError and _DamagedError."""
        try:
            file = self.path.open("rb")
        except (FileNotFoundError, NotADirectoryError):
            return None
        with file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH), "little")
            if length > size - _LENGTH:
                raise _DamagedError("it is no packed file, or was cut")
            return _parse(file.read(length), _LENGTH + length, size, self.path.name)

    def _is_there(self) -> bool:
        """True if the file exists by now."""
        try:
            return self._header() is not None
        except (OSError, _DamagedError):
            return False

    @contextmanager
    def _only_writer(self) -> Iterator[None]:
        """Waits until no other process writes into the folder. A process that dies lets go."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Who can write here decides what is computed. A folder of somebody else's is that one's business.
        with suppress(PermissionError):
            self.path.parent.chmod(0o700)
        with (self.path.parent / ".lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _make_room(self, size: int) -> bool:
        """Makes room for `size` bytes; other files may go for it. False if there is no room. For the only writer."""
        if size > self._limit:
            self._say(f"is not written: it would take {_mib(size)} of the {_mib(self._limit)} that all may take")
            return False
        kept = []
        for path in self.path.parent.iterdir():
            if path == self.path or (path.name.startswith(".") and path.name != ".lock"):
                # A damaged one, or what a writer was at when it died.
                path.unlink()
            elif path.name != ".lock":
                found = path.stat()
                kept.append((found.st_mtime_ns, found.st_size, path))
        total = sum(length for _, length, _ in kept)
        free = shutil.disk_usage(self.path.parent).free
        leaving = []
        for _, length, path in sorted(kept):
            if total + size <= self._limit:
                break
            leaving.append(path)
            total -= length
            free += length
        if free < 2 * size:
            self._say(f"is not written: it takes {_mib(size)}, and the disk has {_mib(free)}")
            return False
        for path in leaving:
            path.unlink()
        return True

    def _say(self, what: str) -> None:
        print(f"the file of packed weights {self.path} {what}", file=sys.stderr)


def _seal(key: str, entries: Mapping[str, Any]) -> str:
    """The digest that tells that a header is whole, and of this key."""
    return hashlib.blake2b((key + json.dumps(entries)).encode(), digest_size=16).hexdigest()


def _parse(text: bytes, start: int, size: int, key: str) -> _Header:
    """The header of a file of `size` bytes whose data begins at `start`. Raises _DamagedError."""
    try:
        entries = json.loads(text)
        whole = entries[_METADATA].pop(_SEAL) == _seal(key, entries)
    except (KeyError, TypeError, AttributeError, ValueError):
        whole = False
    if not whole:
        raise _DamagedError("it is damaged, or was made of something else")
    notes = entries.pop(_METADATA)
    summed = json.loads(notes.pop(_SUMS))
    places = {
        name: _Place(_DTYPES[entry["dtype"]], tuple(entry["shape"]), start + entry["data_offsets"][0])
        for name, entry in entries.items()
    }
    end = max((place.offset + place.nbytes for place in places.values()), default=start)
    if end != size:
        raise _DamagedError(f"it has {size} bytes in place of {end}")
    return _Header(notes, places, summed["chunk"], summed["crc32"])


def _check(wanted: Mapping[str, torch.Tensor], places: Mapping[str, _Place]) -> None:
    for name, tensor in wanted.items():
        place = places.get(name)
        if place is None or (place.dtype, place.shape) != (tensor.dtype, tuple(tensor.shape)):
            raise _DamagedError(f"it lacks {name} of {tensor.dtype} {list(tensor.shape)}")


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _chunks(memory: memoryview, size: int | None = None) -> Iterator[memoryview]:
    size = size or _CHUNK
    return (memory[start : start + size] for start in range(0, len(memory), size))


class _Piece(NamedTuple):
    """The piece that one thread reads at a time."""

    name: str
    memory: memoryview
    offset: int
    sum: int


def _read_all(path: Path, header: _Header, tensors: Mapping[str, torch.Tensor], report: Report) -> None:
    """Fills each tensor from its place in the file, with as many threads as compute, and checks what was read."""
    pieces = [
        _Piece(name, chunk, place.offset + number * header.chunk, header.sums[name][number])
        for name, place in header.places.items()
        for number, chunk in enumerate(_chunks(_bytes_of(tensors[name]), header.chunk))
    ]
    total = sum(len(piece.memory) for piece in pieces)
    done = 0
    with path.open("rb") as file, ThreadPoolExecutor(torch.get_num_threads()) as threads:
        for length in threads.map(lambda piece: _read_piece(file.fileno(), piece), pieces):
            done += length
            report(done, total)


def _read_piece(file: int, piece: _Piece) -> int:
    """Fills the piece's memory; gives its length."""
    memory, at = piece.memory, 0
    while at < len(memory):
        count = os.preadv(file, [memory[at:]], piece.offset + at)
        if count == 0:
            raise _DamagedError("it was cut while it was read")
        at += count
    # It is in the processor's cache still, and the interpreter is free meanwhile.
    if zlib.crc32(memory) != piece.sum:
        raise _WrongDataError(f"{piece.name} is not what was written")
    return at


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"
