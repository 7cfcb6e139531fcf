"""Matrices that a device keeps in the checkpoint's quantised format, and matrix products with them.

`weights.codes` explains codes, scales and zero points. The device's `Products` computes the products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from forebay.weights.codes import Layout, Raw, folded, quantised
from forebay.weights.errors import ModelError

Upload = Callable[[torch.Tensor], torch.Tensor]
"""Copies a tensor of the host to the device."""
_MIDDLE = 8
"""The zero point of random 4-bit codes: the middle of the range."""
_NO_LARGE = 0xBF
"""A bit mask for random 8-bit floats, which excludes large values and NaN."""
_RANDOM_SCALES = 0.04, 0.005
"""The scales of random 8-bit floats and 4-bit codes, so that values are about as large as other random weights."""


class Products(Protocol):
    """A device's matrix products."""

    def dense(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Returns `x W^T + b` [tokens, rows] for x [tokens, inputs] and `weight` [rows, inputs], in their type."""

    def gated(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
    ) -> torch.Tensor | None:
        """Returns `Ops.gate` of `dense`; None: there is no fused operator. The activation is one of `GATES`."""

    def product(self, x: torch.Tensor, matrix: KeptMatrix, bias: torch.Tensor | None) -> torch.Tensor:
        """Like `dense`, for a matrix in its quantised format."""

    def experts(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: KeptMatrix, down: KeptMatrix
    ) -> torch.Tensor:
        """Returns the weighted sum as in `Ops.experts`. Each matrix has the rows of all experts, concatenated."""


@dataclass(eq=False)
class KeptMatrix:
    """A matrix on the device, which may be joined from several matrices of the checkpoint."""

    layout: Layout
    codes: torch.Tensor  # uint8 [rows, layout.width]
    scale: torch.Tensor  # float32 [row blocks, groups]
    zeros: torch.Tensor | None  # uint8 [rows, groups]; None: codes are floats
    order: torch.Tensor | None  # int64 [inputs]: the input of each column; None: columns are in the order of inputs
    ordered_by: str | None = None
    """The name of the weight that has determined the order of inputs."""

    @classmethod
    def make(cls, layout: Layout, rows: int, device: torch.device) -> KeptMatrix:
        """Allocates a matrix without initialising it."""
        return cls(
            layout,
            torch.empty(rows, layout.width, dtype=torch.uint8, device=device),
            torch.empty(-(-rows // layout.block_rows), layout.groups, dtype=torch.float32, device=device),
            torch.empty(rows, layout.groups, dtype=torch.uint8, device=device) if layout.fold else None,
            torch.empty(layout.inputs, dtype=torch.int64, device=device) if layout.ordered else None,
        )

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the matrix."""
        return [tensor for tensor in (self.codes, self.scale, self.zeros, self.order) if tensor is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def inputs(self) -> int:
        """The number of inputs of the matrix."""
        return self.layout.inputs

    @property
    def group(self) -> int:
        """The number of inputs that share a scale."""
        return self.layout.group

    @property
    def block_rows(self) -> int:
        """The number of rows that share a scale."""
        return self.layout.block_rows

    @property
    def fold(self) -> int:
        """The number of consecutive inputs whose codes are folded together, as in `Layout`; 0: codes are not folded."""
        return self.layout.fold


@dataclass(frozen=True)
class KeptPart:
    """The rows of a kept matrix that one weight of the checkpoint fills."""

    name: str
    matrix: KeptMatrix
    first: int
    rows: int

    @property
    def shape(self) -> torch.Size:
        """The shape of the dequantised weight."""
        return torch.Size((self.rows, self.matrix.inputs))

    def store(self, value: Raw | torch.Tensor, upload: Upload) -> None:
        """Stores the checkpoint's codes, or quantises a weight [rows, inputs]. Raises `ModelError`."""
        codes = value.at(upload).codes() if isinstance(value, Raw) else quantised(upload(value))
        if codes.codes.shape != self.shape:
            raise ModelError(
                f"{self.name} is {list(codes.codes.shape)} in the checkpoint, the model wants {list(self.shape)}"
            )
        matrix, layout = self.matrix, self.matrix.layout
        part = slice(self.first, self.first + self.rows)
        matrix.codes[part] = folded(codes.codes, layout.fold) if layout.fold else codes.codes.view(torch.uint8)
        self._scales.copy_(codes.scale if codes.block_rows == layout.block_rows else codes.with_rows_of_their_own())
        if matrix.zeros is not None:
            assert codes.zeros is not None
            matrix.zeros[part] = codes.zeros
        if matrix.order is not None:
            assert codes.order is not None
            if matrix.ordered_by is not None and not torch.equal(matrix.order, codes.order):
                raise ModelError(
                    f"{self.name} has its inputs in another order than {matrix.ordered_by}, with which it is fused"
                )
            matrix.order.copy_(codes.order)
            matrix.ordered_by = self.name

    def randomise(self, generator: torch.Generator) -> None:
        """Fills the part with random codes whose values are small."""
        matrix, part = self.matrix, slice(self.first, self.first + self.rows)
        codes = matrix.codes[part].random_(0, 256, generator=generator)
        of_floats, of_integers = _RANDOM_SCALES
        if matrix.zeros is None:
            codes.bitwise_and_(_NO_LARGE)
        else:
            matrix.zeros[part] = _MIDDLE
        self._scales.fill_(of_floats if matrix.zeros is None else of_integers)
        self._in_order()

    def clear(self) -> None:
        """Sets all values to 0."""
        self.matrix.codes[self.first : self.first + self.rows] = 0
        self._scales.zero_()
        if self.matrix.zeros is not None:
            self.matrix.zeros[self.first : self.first + self.rows] = 0
        self._in_order()

    def _in_order(self) -> None:
        if self.matrix.order is not None:
            torch.arange(self.matrix.inputs, out=self.matrix.order)

    @property
    def _scales(self) -> torch.Tensor:
        size = self.matrix.block_rows
        return self.matrix.scale[self.first // size : -(-(self.first + self.rows) // size)]
