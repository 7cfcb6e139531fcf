"""Implements `layers.quantised.Products` with the operators of this package, and PyTorch's products.

As in `ops`, protocols describe the arguments of layers.
"""

from __future__ import annotations

import os
from typing import Protocol

import torch
import torch.nn.functional as F

from forebay.gpu.interface import Codes, Kernels

_ALIGNED = 16
"""PyTorch's product of 8-bit floats requires matrix sizes that are multiples of this."""
MANY_ROWS = 64
"""Above this number of rows, it is faster to dequantise a quantised matrix first.

Otherwise its codes are converted again for every 64 rows. With 256 rows and 24576 x 4096 4-bit codes, that takes 449 us
on an H100, against 202 us with dequantisation.
"""


FUSED = "FOREBAY_GPU_FUSED"
"""An environment variable: 1 fuses a one-row product with the gate after it. The fused kernel is untested on GPUs.
"""


def fuses() -> bool:
    """True if the environment turns `FUSED` on."""
    return os.environ.get(FUSED, "0") == "1"


class Matrix(Codes, Protocol):
    """`layers.quantised.KeptMatrix`."""

    @property
    def order(self) -> torch.Tensor | None:
        """The index of the input that belongs to each column."""


class GpuProducts:
    """Implements `layers.quantised.Products`."""

    def __init__(self, kernels: Kernels, floats: bool, fused: bool = False) -> None:
        """`floats`: the device supports products of 8-bit floats. `fused`: see `FUSED`."""
        self._kernels = kernels
        self._floats = floats
        self._fused = fused

    def product(self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
        if self._floats and x.dtype == torch.bfloat16 and _is_plain(matrix):
            codes, scale = self._kernels.quantise(x)
            rows = matrix.codes.view(torch.float8_e4m3fn)
            return torch._scaled_mm(codes, rows.t(), scale, matrix.scale.t(), bias=bias, out_dtype=x.dtype)
        if matrix.order is not None:
            x = x.index_select(1, matrix.order)
        if len(x) > MANY_ROWS and x.dtype == torch.bfloat16:
            return F.linear(x, self._kernels.expand(matrix, x.dtype), bias)
        return self._kernels.product(x, matrix, bias)

    def dense(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if _is_own(x):
            return self._kernels.one_row(x, weight, bias)
        return F.linear(x, weight, bias)

    def gated(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
    ) -> torch.Tensor | None:
        if not self._fused or not _is_own(x):
            return None
        return self._kernels.one_row_gated(x, weight, bias, activation)

    def experts(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: Matrix, down: Matrix
    ) -> torch.Tensor:
        return self._kernels.experts_of_codes(x, ids, weights, gate_up, down)


def _is_own(x: torch.Tensor) -> bool:
    """True for one bfloat16 row, which our kernels multiply. In float32, PyTorch's sums don't depend on the batch."""
    return len(x) == 1 and x.dtype == torch.bfloat16


def _is_plain(matrix: Matrix) -> bool:
    """True for 8-bit floats with a scale per row, and sizes that PyTorch's product accepts."""
    rows, inputs = matrix.codes.shape
    a_scale_a_row = matrix.group >= inputs and matrix.block_rows == 1
    return matrix.zeros is None and a_scale_a_row and rows % _ALIGNED == inputs % _ALIGNED == 0


def multiplies_floats(device: torch.device) -> bool:
    """True for GPUs that multiply 8-bit floats (Ada, Hopper and later), and for all devices other than GPUs."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)
