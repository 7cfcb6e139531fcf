"""The weights in a model's files, according to the manifest that the brain created.

A weight is a range of bytes in a file, as plain numbers or as blocks of a GGUF type. Weights have the names that the
model's family uses.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from forebay.weights import shards
from forebay.weights.codes import Raw
from forebay.weights.errors import ModelError
from forebay.weights.shards import Cut
from forebay.weights.stored import Scheme

__all__ = ["CodedMatrix", "Manifest", "MatrixPart", "Place"]

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

_NUMBERS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The types of plain numbers, by their names in safetensors, which GGUF uses too."""
_MXFP4 = 32
"""The number of values in a block of MXFP4."""
_AT_ONCE = 1 << 20
"""The number of elements that are dequantised at a time. Temporary memory is a few times their size."""


@dataclass(frozen=True)
class MatrixPart:
    """A weight that is part of a matrix, and the conversion of its values."""

    shape: tuple[int, ...]
    """The shape of the weight, in elements."""
    matrix: tuple[int, int] | None = None
    """The shape of the matrix that contains the weight; None: the weight is the whole matrix."""
    transposed: bool = False
    rows: tuple[int, int] | None = None
    """The first row of the weight in `matrix`, after transposing, and the step to the next group of rows."""
    width: int = 1
    """The number of adjacent rows in each group."""
    pairs: int | None = None
    """The number of heads whose two halves are stored in alternating rows; None: rows are not reordered."""
    times: float = 1.0
    plus: float = 0.0
    """A factor of all values, and a term that is then added."""
    log: bool = False
    """True if the logarithm of the result is then taken."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> MatrixPart:
        """Reads an entry of a manifest."""
        chosen = dict(values)
        for name in ("shape", "matrix", "rows"):
            if name in chosen:
                chosen[name] = tuple(chosen[name])
        return cls(**chosen)

    def read(self, values: torch.Tensor, cut: Cut | None = None) -> torch.Tensor:
        """Returns the weight, or a part of it, from the values of its matrix."""
        assert self.rows is not None
        if self.transposed:
            values = values.T
        first, step = self.rows
        wanted = self.shape[0] if len(self.shape) > 1 else math.prod(self.shape) // values.shape[1]
        if self.width == 1:
            chosen = values[first : first + wanted * step : step].reshape(self.shape)
        else:
            number = torch.arange(wanted)
            chosen = values[first + number // self.width * step + number % self.width].reshape(self.shape)
        if self.pairs is not None or cut is None:
            # Rows are reordered within heads, and a part may begin inside a head: convert the whole weight.
            chosen = self.changed(chosen)
            return chosen if cut is None else chosen[cut.places]
        return self.changed(chosen[cut.places])

    def changed(self, values: torch.Tensor) -> torch.Tensor:
        """Returns rows of whole heads with the conversion applied."""
        if self.pairs is not None:
            values = _halves(values, self.pairs * len(values) // self.shape[0])
        if (self.times, self.plus) != (1.0, 0.0):
            values = values.float() * self.times + self.plus
        return values.float().log() if self.log else values


@dataclass(frozen=True)
class Place:
    """The location of a weight in a file."""

    path: str
    offset: int
    bytes: int
    format: str
    """The type of the values, by its name in safetensors or in GGUF."""
    part: MatrixPart
    """The weight within the range of bytes."""
    exponents: Place | None = None
    """The exponents, if the range has only the codes of blocks; None: the blocks are complete."""

    @classmethod
    def of(cls, files: list[str], values: Mapping[str, Any]) -> Place:
        """Reads an entry of a manifest."""
        own = {name: values[name] for name in ("offset", "bytes", "format")}
        part = {name: value for name, value in values.items() if name not in {*own, "file", "exponents"}}
        found = cls(path=files[values["file"]], **own, part=MatrixPart.of(part))
        if "exponents" not in values:
            return found
        beside = values["exponents"]
        exponents = cls(files[beside["file"]], beside["offset"], beside["bytes"], "U8", MatrixPart(()))
        return replace(found, exponents=exponents)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight, in elements."""
        return self.part.shape

    @property
    def is_blocks(self) -> bool:
        """True if the values are in blocks of a GGUF type."""
        return self.format not in _NUMBERS

    def read(self, cut: Cut | None = None) -> torch.Tensor:
        """Reads the weight, or a part of it, as a copy: in the file's type, or float32 for GGUF blocks.

        Only the requested part is read. Raises ModelError.
        """
        if self.part.matrix is not None:
            return self.part.read(self._values(*(shards.ALONE.of(size) for size in self.part.matrix)), cut)
        rows, columns = self._size()
        shape = self.shape
        if cut is not None and cut.columns is None:
            # A weight with one dimension is one row of the file.
            columns, shape = cut.rows, (cut.rows.size,)
        elif cut is not None and cut.columns is not None:
            rows, columns, shape = cut.rows, cut.columns, (cut.rows.size, cut.columns.size)
        return self.part.changed(self._values(rows, columns).view(shape))

    def _size(self) -> tuple[shards.Part, shards.Part]:
        """Returns the parts that cover all rows and all columns of the range."""
        return shards.ALONE.of(math.prod(self.shape[:-1])), shards.ALONE.of(math.prod(self.shape[-1:]))

    def stored(self) -> Bytes:
        """Reads the bytes of the range, uint8 [rows, bytes per row]. Raises ModelError."""
        rows, _ = self._size()
        return self._bytes(0, rows.size, rows.whole)

    def of_stored(self, data: Bytes) -> torch.Tensor:
        """Decodes the whole weight from the bytes of its range. The range must not be part of a matrix."""
        assert self.part.matrix is None
        _, columns = self._size()
        return self.part.changed(self._numbers(data, columns).reshape(self.shape))

    def _values(self, rows: shards.Part, columns: shards.Part) -> torch.Tensor:
        """Reads these rows and columns of the values in the file: [rows.size, columns.size]."""
        if not self.is_blocks and columns.is_whole:
            data = self._bytes(rows.first, rows.size, rows.whole)
            return torch.from_numpy(data).view(-1).view(_NUMBERS[self.format]).view(rows.size, columns.size)
        kept = torch.float32 if self.is_blocks else _NUMBERS[self.format]
        values = torch.empty((rows.size, columns.size), dtype=kept)
        step = max(1, _AT_ONCE // max(1, columns.whole))
        for at in range(0, rows.size, step):
            count = min(step, rows.size - at)
            data = self._bytes(rows.first + at, count, rows.whole)
            values[at : at + count] = self._numbers(data, columns)
        return values

    def _numbers(self, data: Bytes, columns: shards.Part) -> torch.Tensor:
        if not self.is_blocks:
            whole = torch.from_numpy(data).view(-1).view(_NUMBERS[self.format]).view(len(data), columns.whole)
            return whole[:, columns.place]
        kind = GGMLQuantizationType[self.format]
        block, size = GGML_QUANT_SIZES[kind]
        first, end = columns.first // block, -(-columns.end // block)
        some = np.ascontiguousarray(data[:, first * size : end * size])
        inside = slice(columns.first - first * block, columns.end - first * block)
        return torch.from_numpy(dequantize(some, kind)[:, inside])

    def _bytes(self, first: int, count: int, rows: int) -> Bytes:
        """Reads `count` of the range's `rows` rows, uint8 [count, bytes per row]."""
        if self.exponents is not None:
            codes = replace(self, exponents=None)._bytes(first, count, rows)
            return _mxfp4_blocks(codes, self.exponents._bytes(first, count, rows))
        row_bytes = self.bytes // max(1, rows)
        data = np.empty((count, row_bytes), np.uint8)
        memory, at = data.reshape(-1).data, 0
        try:
            with open(self.path, "rb", buffering=0) as file:
                while at < len(memory):
                    read = os.preadv(file.fileno(), [memory[at:]], self.offset + first * row_bytes + at)
                    if read == 0:
                        raise ModelError(f"{self.path} ends within a weight")
                    at += read
        except OSError as error:
            raise ModelError(f"{self.path} can't be read: {error.strerror}") from error
        return data


@dataclass(frozen=True)
class _Joined:
    """A weight in which each head consists of rows from several stacks of heads, one stack after the other."""

    shape: tuple[int, ...]
    places: tuple[Place, ...]
    """The stacks. Each `shape` is [heads, rows, columns], after transposing."""

    def read(self, cut: Cut | None = None) -> torch.Tensor:
        """Reads the weight float32 [rows, columns], or the heads of a part of it."""
        heads = self.places[0].shape[0]
        first, count = 0, heads
        if cut is not None:
            of_head = self.shape[0] // heads
            first, count = cut.rows.first // of_head, cut.rows.size // of_head
        parts = [self._heads(place, first, count) for place in self.places]
        return torch.cat(parts, dim=1).flatten(0, 1)

    def _heads(self, place: Place, first: int, count: int) -> torch.Tensor:
        heads, rows, columns = place.shape
        transposed = place.part.transposed
        if transposed:
            rows, columns = columns, rows
        lying = replace(place, part=MatrixPart((heads * rows, columns)))
        cut = Cut(shards.Part(heads * rows, first * rows, (first + count) * rows), shards.ALONE.of(columns))
        values = lying.read(cut).float().view(count, rows, columns)
        return values.transpose(1, 2) if transposed else values


@dataclass(frozen=True)
class CodedMatrix:
    """A quantised matrix in the files."""

    name: str
    shape: tuple[int, ...]
    format: str
    """The type of the codes, by its name in safetensors."""
    parts: tuple[tuple[str, Place], ...]
    """The matrix's tensors, by the suffixes of their names; codes first."""
    weights: tuple[tuple[str, MatrixPart], ...]
    """The weights that the matrix contains, by name; empty: the matrix itself is the only weight."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the weights that the matrix contains, by name."""
        return {name: part.shape for name, part in self.weights} or {self.name: self.shape}

    def raw(self, scheme: Scheme) -> Raw:
        """Reads all tensors of the matrix. Raises ModelError."""
        return Raw(self.name, scheme, {end: place.read() for end, place in self.parts})


class Manifest:
    """All weights of a model."""

    def __init__(self, model: Mapping[str, Any]) -> None:
        """`model` is from the handshake. Raises ModelError if it has no manifest."""
        found = model.get("manifest")
        if found is None:
            raise ModelError("the config has no manifest of the weights")
        self._files = [str(path) for path in model["files"]]
        self._weights: list[tuple[str, Mapping[str, Any]]] = found["weights"]
        self._matrices: list[Mapping[str, Any]] = found["matrices"]
        self.zero_biases = frozenset(found["zero_biases"])
        """Biases of quantised matrices that are 0. A model may leave them out."""

    def weights(self) -> Iterator[tuple[str, Place | _Joined]]:
        """Yields the weights other than quantised matrices, by name, in the order of the files."""
        for name, values in self._weights:
            if "joined" in values:
                places = tuple(Place.of(self._files, part) for part in values["joined"])
                yield name, _Joined(tuple(values["shape"]), places)
            else:
                yield name, Place.of(self._files, values)

    def matrices(self) -> Iterator[CodedMatrix]:
        """Yields the quantised matrices of safetensors files."""
        for values in self._matrices:
            parts = tuple((end, Place.of(self._files, place)) for end, place in values["parts"])
            weights = tuple((name, MatrixPart.of(part)) for name, part in values.get("weights", ()))
            yield CodedMatrix(values["name"], tuple(values["shape"]), values["format"], parts, weights)


def _mxfp4_blocks(codes: Bytes, exponents: Bytes) -> Bytes:
    """Converts MXFP4 from the safetensors to the GGUF format: codes [rows, blocks * 16], exponents [rows, blocks].

    In safetensors, adjacent values share a byte. In GGUF, a value of a block's first half shares a byte with one of the
    second half.
    """
    half = _MXFP4 // 2
    numbers = (codes.reshape(*exponents.shape, half, 1) >> np.array([0, 4], np.uint8)) & np.uint8(15)
    halves = numbers.reshape(*exponents.shape, 2, half)
    joined = halves[..., 0, :] | halves[..., 1, :] << np.uint8(4)
    return np.concatenate([exponents[..., None], joined], axis=-1).reshape(len(codes), -1)


def _halves(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """[heads * head_dim, ...]: in each head, reorders rows (0, h, 1, h + 1, ...) to (0, 1, ..., h, h + 1, ...)."""
    pairs = tensor.view(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
