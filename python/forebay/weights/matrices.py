"""The quantised matrices of a checkpoint, and the tensors of each, in any of the files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from safetensors import safe_open

from forebay.weights.codes import Raw
from forebay.weights.errors import ModelError
from forebay.weights.stored import COMPRESSED, Fp8, Int4, Scheme, Stored
from forebay.weights.vision import own_name

__all__ = ["Matrices", "Matrix"]

_EIGHT_BITS = ("F8_E4M3", "F8_E5M2")
_SCALES = ("weight_scale_inv", "weight_scale")
"""The ends of the names of 8-bit floats' scales."""
_NOT_READ = ("input_scale", "output_scale", "k_scale", "v_scale", "q_scale", "kv_scale")
"""Scales of activations, keys and values. Activations are measured, and keys and values have the model's type."""
_PER_WORD = 8


@dataclass(frozen=True)
class Matrix:
    """A quantised matrix in the files."""

    name: str
    """The name of the weight: the module's, and `.weight`."""
    shape: tuple[int, int]
    kind: str
    """The type of the codes, by safetensors' name."""
    ends: tuple[str, ...]
    """The ends of its tensors' names, behind the module's; codes first."""


@dataclass(frozen=True)
class Matrices:
    """The quantised matrices of a checkpoint."""

    scheme: Scheme | None = None
    by_codes: Mapping[str, Matrix] = field(default_factory=dict)
    """The matrices, by the name of the tensor with their codes."""
    beside: frozenset[str] = frozenset()
    """Names of tensors that are read with others, or not at all."""
    zero_biases: frozenset[str] = frozenset()
    """Biases of quantised matrices that are 0: GPTQ's tools write some that a model does not have."""
    _files: Mapping[str, str] = field(default_factory=dict)
    """The file of each tensor."""

    @classmethod
    def find(cls, files: Sequence[str], stored: Stored | None, wanted: Callable[[str, str], bool]) -> Matrices:
        """Reads the headers, and biases of GPTQ's files. Raises ModelError if parts are missing or do not fit.

        `stored` None: nothing may be quantised. `wanted` is true for the tensors of the model.
        """
        where: dict[str, str] = {}
        headers: dict[str, tuple[str, list[int]]] = {}
        for path in files:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():
                    if wanted(path, name):
                        part = file.get_slice(name)
                        where[name], headers[name] = path, (part.get_dtype(), part.get_shape())
        if stored is None:
            for name, (kind, _) in headers.items():
                if kind in _EIGHT_BITS:
                    raise ModelError(f"{name} has 8-bit floats, and the checkpoint has no quantization_config")
            return cls()
        scheme = stored.scheme
        found = _floats(headers, scheme) if isinstance(scheme, Fp8) else _integers(headers, scheme)
        beside = {f"{_module(name)}.{end}" for name, matrix in found.items() for end in matrix.ends[1:]}
        beside |= {name for name in headers if name.rpartition(".")[2] in _NOT_READ}
        biases = [f"{_module(name)}.bias" for name in found] if stored.method == "gptq" else []
        zero = frozenset(name for name in biases if name in where and _is_zero(where[name], name))
        return cls(stored.scheme, found, frozenset(beside), zero, where)

    def name_of(self, tensor: str) -> str:
        """The name of the weight of a tensor."""
        matrix = self.by_codes.get(tensor)
        return tensor if matrix is None else matrix.name

    def raw(self, matrix: Matrix, path: str, file: Any) -> Raw:
        """A matrix with all its tensors. `file` is the open file at `path`, which has its codes."""
        module = _module(matrix.name)
        parts = {}
        for end in matrix.ends:
            name = f"{module}.{end}"
            if self._files[name] == path:
                parts[end] = file.get_tensor(name)
                continue
            with safe_open(self._files[name], framework="pt", device="cpu") as other:
                parts[end] = other.get_tensor(name).clone()
        assert self.scheme is not None
        return Raw(matrix.name, self.scheme, parts)

    def kept(self) -> frozenset[str]:
        """Weights that can be kept in their bits, by the models' names."""
        return frozenset(own_name(matrix.name) for matrix in self.by_codes.values() if matrix.kind != "F8_E5M2")


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _is_zero(path: str, name: str) -> bool:
    with safe_open(path, framework="pt", device="cpu") as file:
        return not file.get_tensor(name).any()


_Headers = Mapping[str, tuple[str, Sequence[int]]]


def _floats(headers: _Headers, scheme: Fp8) -> dict[str, Matrix]:
    found = {}
    for name, (kind, shape) in headers.items():
        if kind not in _EIGHT_BITS:
            continue
        module = _module(name)
        ends = [end for end in _SCALES if f"{module}.{end}" in headers]
        if not ends or not name.endswith(".weight"):
            raise ModelError(
                f"{name} has 8-bit floats, and the checkpoint has no {module}.{_SCALES[scheme.block is None]} for it"
            )
        scale = f"{module}.{ends[0]}"
        has = list(headers[scale][1])
        if scheme.block is not None:
            wanted = [[-(-size // of) for size, of in zip(shape, scheme.block, strict=False)]]
        else:
            wanted = [[shape[0], 1], [shape[0]], [1], [], [1, 1]]
        if len(shape) != 2 or has not in wanted:
            raise ModelError(f"{scale} is {has}, and {name} of {list(shape)} wants {wanted[0]}")
        found[name] = Matrix(name, (shape[0], shape[1]), kind, ("weight", ends[0]))
    return found


def _integers(headers: _Headers, scheme: Int4) -> dict[str, Matrix]:
    of = {"gptq": _of_gptq, "awq": _of_awq, COMPRESSED: _of_compressed}[scheme.packing]
    codes = "weight_packed" if scheme.packing == COMPRESSED else "qweight"
    return {name: of(headers, _module(name), scheme) for name in headers if name.rpartition(".")[2] == codes}


def _of_gptq(headers: _Headers, module: str, scheme: Int4) -> Matrix:
    """The codes of words of inputs. Their zero points are in words of outputs."""
    _require(headers, module, "qweight", "qzeros", "scales")
    words, rows = headers[f"{module}.qweight"][1]
    inputs = words * _PER_WORD
    groups = -(-inputs // (scheme.group or inputs))
    wanted = {"qweight": [words, rows], "qzeros": [groups, rows // _PER_WORD], "scales": [groups, rows]}
    if f"{module}.g_idx" in headers:
        wanted["g_idx"] = [inputs]
    return _fitting(headers, module, (rows, inputs), wanted)


def _of_awq(headers: _Headers, module: str, scheme: Int4) -> Matrix:
    """The codes of words of outputs."""
    _require(headers, module, "qweight", "qzeros", "scales")
    inputs, words = headers[f"{module}.qweight"][1]
    rows = words * _PER_WORD
    groups = -(-inputs // (scheme.group or inputs))
    wanted = {"qweight": [inputs, words], "qzeros": [groups, words], "scales": [groups, rows]}
    return _fitting(headers, module, (rows, inputs), wanted)


def _of_compressed(headers: _Headers, module: str, scheme: Int4) -> Matrix:
    """The codes of words of inputs. Their zero points are in words of outputs.

    The last word is filled up without inputs.
    """
    _require(headers, module, "weight_packed", "weight_scale", "weight_shape")
    rows, words = headers[f"{module}.weight_packed"][1]
    inputs = words * _PER_WORD
    groups = -(-inputs // (scheme.group or inputs))
    wanted = {"weight_packed": [rows, words], "weight_scale": [rows, groups], "weight_shape": [2]}
    optional = {"weight_zero_point": [-(-rows // _PER_WORD), groups], "weight_g_idx": [inputs]}
    wanted |= {end: size for end, size in optional.items() if f"{module}.{end}" in headers}
    return _fitting(headers, module, (rows, inputs), wanted)


def _require(headers: _Headers, module: str, codes: str, *ends: str) -> None:
    for end in ends:
        if f"{module}.{end}" not in headers:
            raise ModelError(f"{module}.{codes} is quantised, and the checkpoint has no {module}.{end} for it")


def _fitting(headers: _Headers, module: str, shape: tuple[int, int], wanted: Mapping[str, list[int]]) -> Matrix:
    """The matrix, if each of its tensors has the shape that is wanted; the first has the codes."""
    ends = tuple(wanted)
    for end, size in wanted.items():
        has = list(headers[f"{module}.{end}"][1])
        if has != size:
            raise ModelError(f"{module}.{end} is {has}, and a matrix of {list(shape)} in such groups wants {size}")
    kind = headers[f"{module}.{ends[0]}"][0]
    if kind != "I32":
        raise ModelError(f"{module}.{ends[0]} is of the type {kind}, and 4-bit codes are read of words (I32)")
    return Matrix(f"{module}.weight", shape, kind, ends)
