"""The header of a GGUF file: metadata, and the place of each tensor.

The `gguf` package's own reader makes one numpy array for each string, which takes seconds for a usual vocabulary. This
one reads the same bytes with `struct`. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from forebay.weights.errors import ModelError, UnsupportedModelError

__all__ = ["GgufFile", "GgufFiles", "GgufTensor"]

_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING = 8
_ARRAY = 9
_U32 = _SCALARS[4]
_U64 = _SCALARS[10]
_MAX_DIMENSIONS = 4
# Far beyond every known file: vocabularies have some hundred thousand tokens, templates some hundred KiB.
_MAX_HEADER = 256 << 20
_MAX_ELEMENTS = 1 << 25
_MAX_DEPTH = 4
_MAX_ALIGNMENT = 1 << 20
# The kernel maps pages around the one that was read, as far as this.
_AROUND = 2 << 20
# The fewest bytes of a string, an array, a field and a tensor's header in a file.
_LEAST = {_STRING: 8, _ARRAY: 12}
_LEAST_FIELD = 8 + 4 + 1
_LEAST_TENSOR = 8 + 4 + 4 + 8


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in its stored form."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    """The shape in elements. The outermost dimension is first, as in torch (GGUF has the opposite order)."""
    data: np.ndarray[Any, np.dtype[np.uint8]]
    """The stored bytes, [rows, bytes of a row], as a view of the mapping. Rows of all outer dimensions are together."""
    mapping: mmap.mmap | None = None
    """The mapping of the file; None: the bytes lie in memory."""
    offset: int = 0
    """The offset of the first byte in the file."""

    def release(self, first: int, count: int) -> None:
        """Releases the memory of rows that were read. A later read takes them from the file again."""
        if self.mapping is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        row_bytes = self.data.shape[1]
        begin = (self.offset + first * row_bytes) // _AROUND * _AROUND
        end = -(-(self.offset + (first + count) * row_bytes) // _AROUND) * _AROUND
        end = min(end, len(self.mapping))
        if begin < end:
            self.mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)


class GgufFile:
    """One file, memory-mapped. Opening reads the header only."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                # A mapping of nothing is an error, and no file of less than a header is a GGUF anyway.
                if self.path.stat().st_size < 24:
                    raise ModelError(f"{self.path} is not a GGUF file")
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelError(f"{self.path} can't be read: {error.strerror}") from error
        self._at = 0
        try:
            self._read_header()
        except (struct.error, ValueError, OverflowError) as error:
            if isinstance(error, ModelError):
                raise
            raise ModelError(f"{self.path} is truncated or damaged: {error}") from error

    def _read_header(self) -> None:
        if self._bytes[:4] != b"GGUF":
            raise ModelError(f"{self.path} is not a GGUF file")
        self._at = 4
        version = self._scalar(_U32)
        if version >> 24 in (1, 2, 3):
            raise UnsupportedModelError(
                f"{self.path} is big-endian: gguf-py's gguf_convert_endian.py makes it little-endian"
            )
        if version not in (2, 3):
            raise UnsupportedModelError(f"{self.path} has version {version} of the format; supported: 2, 3")
        self._elements = 0
        tensor_count = self._scalar(_U64)
        field_count = self._scalar(_U64)
        self._claim(field_count, _LEAST_FIELD)
        self._claim(tensor_count, _LEAST_TENSOR)
        self.metadata = {}
        for _ in range(field_count):
            name = self._string()
            self.metadata[name] = self._value(self._scalar(_U32), 0)
        headers = [self._tensor_header() for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT:
            raise ValueError(f"general.alignment is {str(alignment)[:40]}")
        start = -(-self._at // alignment) * alignment
        self.tensors = {name: self._tensor(name, shape, kind, start + offset) for name, shape, kind, offset in headers}

    def _tensor_header(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = self._scalar(_U32)
        if dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self._scalar(_U64) for _ in range(dimensions))[::-1]
        return name, shape, self._scalar(_U32), self._scalar(_U64)

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        try:
            type_ = GGMLQuantizationType(kind)
        except ValueError:
            raise UnsupportedModelError(f"tensor {name!r} of {self.path} has the unknown type {kind}") from None
        block, block_bytes = GGML_QUANT_SIZES[type_]
        columns = shape[-1] if shape else 1
        if columns % block:
            raise ValueError(f"tensor {name!r} has rows of {columns} elements in blocks of {block}")
        row_bytes = columns // block * block_bytes
        rows = math.prod(shape[:-1])
        if offset + rows * row_bytes > len(self._bytes):
            raise ValueError(f"the data of tensor {name!r} goes beyond the end of the file")
        data = np.frombuffer(self._bytes, np.uint8, rows * row_bytes, offset).reshape(rows, row_bytes)
        return GgufTensor(name, type_, shape, data, self._bytes, offset)

    def _scalar(self, kind: struct.Struct) -> Any:
        (value,) = kind.unpack_from(self._bytes, self._at)
        self._at += kind.size
        return value

    def _string(self) -> str:
        length = self._scalar(_U64)
        end = self._at + length
        if end > len(self._bytes):
            raise ValueError("a string goes beyond the end of the file")
        self._check_size(end)
        raw = self._bytes[self._at : end]
        self._at = end
        # Vocabularies hold what their makers put there: a token that isn't UTF-8 must not keep a model from loading.
        return raw.decode("utf-8", errors="replace")

    def _value(self, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            if depth == _MAX_DEPTH:
                raise ValueError(f"arrays are inside each other more than {_MAX_DEPTH} deep")
            item = self._scalar(_U32)
            count = self._scalar(_U64)
            if item in _SCALARS:
                return self._scalars(_SCALARS[item], count)
            self._claim(count, _LEAST.get(item, 1))
            return [self._value(item, depth + 1) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"metadata of the unknown type {kind}")
        return self._scalar(_SCALARS[kind])

    def _scalars(self, kind: struct.Struct, count: int) -> list[Any]:
        self._claim(count, kind.size)
        values = struct.unpack_from(f"<{count}{kind.format[1:]}", self._bytes, self._at)
        self._at += count * kind.size
        return list(values)

    def _claim(self, count: int, least: int) -> None:
        """Raises ValueError unless the file can have `count` things of at least `least` bytes here."""
        self._elements += count
        end = self._at + count * least
        if end > len(self._bytes):
            raise ValueError("an array goes beyond the end of the file")
        if self._elements > _MAX_ELEMENTS:
            raise ValueError(f"its header has more than {_MAX_ELEMENTS} entries")
        self._check_size(end)

    def _check_size(self, end: int) -> None:
        if end > _MAX_HEADER:
            raise ValueError(f"its header has more than {_MAX_HEADER} bytes")


@dataclass(frozen=True)
class GgufFiles:
    """A model in one GGUF file, or split over several ("-00001-of-00003")."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @classmethod
    def open(cls, paths: Sequence[str | Path]) -> GgufFiles:
        """Opens all files of a model. The first one has the metadata of the model. Raises ModelError."""
        files = [GgufFile(path) for path in paths]
        tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
        metadata = files[0].metadata
        expected = metadata.get("split.tensors.count")
        if expected is not None and expected != len(tensors):
            raise ModelError(
                f"{files[0].path} is one part of several: {len(tensors)} of {expected} tensors are in {len(files)}"
            )
        return cls(metadata, tensors)

    @property
    def architecture(self) -> str:
        """The architecture, such as `llama` or `qwen2`. It is also the prefix of its metadata."""
        return str(self.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """A value from the architecture's own metadata.

        Some writers state a value for each layer: if all are equal, it is this one.
        """
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            return value[0]
        return value
