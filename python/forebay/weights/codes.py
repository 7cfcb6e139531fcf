"""Quantised matrices as codes with scales: one form for all checkpoint formats, and their values.

A matrix is [rows, inputs]. Its value at (r, i) is `(code[r, i] - zero[r, g]) * scale[r / rows of a block, g]`, where g
is the group of input i. Codes of FP8 are 8-bit floats, without zero points. 4-bit codes take one byte each here;
`folded` packs two into a byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from forebay.weights.errors import ModelError
from forebay.weights.stored import COMPRESSED, Fp8, Int4, Mxfp4, Scheme

__all__ = ["LARGEST", "Codes", "Layout", "Raw", "folded", "quantised"]

LARGEST = 448.0
"""The largest 8-bit float with 4 bits of exponent (e4m3)."""
_LEAST_SCALE = 1e-12
"""The smallest scale that quantisation uses, so that a row of zeros also has a scale above 0."""
_AT_A_TIME = 256
"""The number of rows that are dequantised at a time. A scale per value of the matrix would double the memory."""
_PER_WORD = 8
"""The number of 4-bit codes in a word of 32 bits."""
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""The index within an AWQ word of each of eight consecutive codes."""
_MOST_FOLDED = 128
_LEAST_TILE = 16
"""The smallest number of inputs of a product on tensor cores."""


@dataclass(frozen=True)
class Layout:
    """The storage format of a matrix on a device."""

    inputs: int
    group: int
    """The number of inputs that share a scale."""
    block_rows: int = 1
    """The number of rows that share a scale."""
    fold: int = 0
    """The number of consecutive inputs whose 4-bit codes `folded` packs together; 0: codes are 8-bit floats."""
    ordered: bool = False
    """True if the columns are in another order than the inputs."""

    @classmethod
    def of(cls, scheme: Scheme, inputs: int, parts: list[int]) -> Layout | None:
        """Returns the layout of a fused matrix whose parts have `parts` rows; None: it has to be dequantised."""
        if isinstance(scheme, Int4):
            group = scheme.group or inputs
            fold = min(group & -group, _MOST_FOLDED)
            if inputs % group or fold < 2 * _LEAST_TILE:
                return None
            return cls(inputs, group, 1, fold, scheme.ordered)
        if isinstance(scheme, Mxfp4):
            return None
        if scheme.block is None:
            return cls(inputs, inputs)
        rows, columns = scheme.block
        if columns & (columns - 1) or columns < _LEAST_TILE:
            return None
        # Blocks of rows fit only if each part starts a new block.
        aligned = all(part % rows == 0 for part in parts[:-1])
        return cls(inputs, columns, rows if aligned else 1)

    @property
    def width(self) -> int:
        """The number of bytes of a row's codes."""
        return self.inputs // 2 if self.fold else self.inputs

    @property
    def groups(self) -> int:
        """The number of scales of each row."""
        return -(-self.inputs // self.group)


@dataclass(frozen=True)
class Codes:
    """A matrix as codes."""

    codes: torch.Tensor  # uint8 [rows, inputs]: 4-bit codes; or float8 [rows, inputs]
    scale: torch.Tensor  # float32 [row blocks, groups]
    zeros: torch.Tensor | None  # uint8 [rows, groups]; None: codes are floats
    group: int
    block_rows: int
    order: torch.Tensor | None = None
    """The input of each column, int64 [inputs]; None: columns are in the order of inputs."""

    def values(self) -> torch.Tensor:
        """Returns the dequantised values, float32 [rows, inputs]."""
        values = self.codes.float()
        inputs = values.shape[1]
        for first in range(0, len(values), _AT_A_TIME):
            part = slice(first, min(first + _AT_A_TIME, len(values)))
            if self.zeros is not None:
                values[part] -= self._spread(self.zeros[part].float(), inputs)
            rows = torch.arange(first, part.stop, device=values.device) // self.block_rows
            values[part] *= self._spread(self.scale.index_select(0, rows), inputs)
        return values if self.order is None else torch.empty_like(values).index_copy_(1, self.order, values)

    def _spread(self, of_groups: torch.Tensor, inputs: int) -> torch.Tensor:
        return of_groups.repeat_interleave(self.group, 1)[:, :inputs]

    def with_rows_of_their_own(self) -> torch.Tensor:
        """Returns a scale for each row and group, float32 [rows, groups]."""
        return self.scale.repeat_interleave(self.block_rows, 0)[: len(self.codes)]


@dataclass(frozen=True)
class Raw:
    """The tensors of one matrix of a checkpoint."""

    name: str
    scheme: Scheme
    parts: Mapping[str, torch.Tensor]
    """The tensors, by the suffixes of their names after the module's name."""

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(part.nbytes for part in self.parts.values())

    def at(self, place: Callable[[torch.Tensor], torch.Tensor]) -> Raw:
        """Returns the same matrix with its tensors moved by `place`, such as to a device."""
        return Raw(self.name, self.scheme, {end: place(part) for end, part in self.parts.items()})

    def codes(self) -> Codes:
        """Returns the matrix as codes. Raises ModelError if groups differ in size."""
        if isinstance(self.scheme, Fp8):
            return self._of_floats(self.scheme)
        assert isinstance(self.scheme, Int4)
        of = {"awq": self._of_awq, "gptq": self._of_gptq, COMPRESSED: self._of_compressed}
        return of[self.scheme.packing](self.scheme)

    def _of_floats(self, scheme: Fp8) -> Codes:
        codes = self.parts["weight"]
        scale = next(part for end, part in self.parts.items() if end != "weight").float()
        if scheme.block is not None:
            return Codes(codes, scale, None, scheme.block[1], scheme.block[0])
        return Codes(codes, scale.reshape(-1, 1).expand(len(codes), 1).contiguous(), None, codes.shape[1], 1)

    def _of_awq(self, scheme: Int4) -> Codes:
        # Stored transposed, [inputs, outputs]: each word has the codes of eight outputs.
        codes = _nibbles(self.parts["qweight"])[..., _AWQ_ORDER].flatten(1).T
        zeros = _nibbles(self.parts["qzeros"])[..., _AWQ_ORDER].flatten(1).T
        return self._made(codes, self.parts["scales"].T, zeros, scheme, None)

    def _of_gptq(self, scheme: Int4) -> Codes:
        codes = _nibbles(self.parts["qweight"]).permute(1, 0, 2).flatten(1)
        zeros = _nibbles(self.parts["qzeros"]).flatten(1).T
        if scheme.less_one:
            zeros = zeros + 1 & 15
        return self._made(codes, self.parts["scales"].T, zeros, scheme, self.parts.get("g_idx"))

    def _of_compressed(self, scheme: Int4) -> Codes:
        scale, inputs = self.parts["weight_scale"], int(self.parts["weight_shape"][1])
        codes = _nibbles(self.parts["weight_packed"]).flatten(1)[:, :inputs]
        packed = self.parts.get("weight_zero_point")
        if packed is None:
            zeros = torch.full(scale.shape, 8, dtype=torch.uint8, device=scale.device)
        else:
            zeros = _nibbles(packed).permute(0, 2, 1).flatten(0, 1)[: len(codes)]
        return self._made(codes, scale, zeros, scheme, self.parts.get("weight_g_idx"))

    def _made(
        self,
        codes: torch.Tensor,
        scale: torch.Tensor,
        zeros: torch.Tensor,
        scheme: Int4,
        of_inputs: torch.Tensor | None,
    ) -> Codes:
        """`of_inputs` int [inputs]: the group of each input; None: groups follow the order of inputs."""
        inputs = codes.shape[1]
        group = scheme.group or inputs
        order = None
        if of_inputs is not None:
            order = of_inputs.long().sort(stable=True).indices
            wanted = torch.arange(inputs, device=order.device) // group
            if not torch.equal(of_inputs.long()[order], wanted):
                raise ModelError(f"{self.name} has groups that are not of {group} inputs each")
            if scheme.ordered:
                codes = codes.index_select(1, order)
            elif not torch.equal(of_inputs.long(), wanted):
                raise ModelError(f"{self.name} has groups in an order of their own, and the config does not say so")
            else:
                order = None
        elif scheme.ordered:
            # Some matrices of such a checkpoint may still be in the order of inputs.
            order = torch.arange(inputs, device=codes.device)
        scale = scale.float().contiguous()
        return Codes(codes.contiguous(), scale, zeros.contiguous(), group, 1, order)


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """Unpacks int32 [...] to 4-bit codes uint8 [..., 8], the lowest 4 bits first."""
    # Works on bytes, the lowest byte of a word first: shifting words would need four times the memory traffic.
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).view(*words.shape, _PER_WORD)


def folded(codes: torch.Tensor, fold: int) -> torch.Tensor:
    """Packs 4-bit codes uint8 [rows, inputs] into uint8 [rows, inputs / 2].

    Of every `fold` consecutive codes, the first half is in the low bits of the bytes, and the second half in the high
    bits.
    """
    low, high = codes.unflatten(1, (-1, 2, fold // 2)).unbind(2)
    joined: torch.Tensor = low | high << 4
    return joined.flatten(1)


def quantised(values: torch.Tensor) -> Codes:
    """Quantises values [rows, inputs] to 8-bit floats, with a scale per row.

    The largest magnitude of a row becomes the largest float.
    """
    scale = values.abs().amax(dim=1, keepdim=True).float().div_(LARGEST).clamp_(min=_LEAST_SCALE)
    codes = (values.float() / scale).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return Codes(codes, scale, None, values.shape[1], 1)
