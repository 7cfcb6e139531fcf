"""Matrix products with quantised matrices in PyTorch's operators, which dequantise first."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from forebay.gpu.interface import Codes
from forebay.gpu.reference.eight_bits import LARGEST, numbers
from forebay.gpu.reference.grouped import experts

_LEAST_SCALE = 1e-12


def values(matrix: Codes) -> torch.Tensor:
    """Returns the dequantised values, float32 [rows, inputs]."""
    scale = matrix.scale.repeat_interleave(matrix.block_rows, 0)[: len(matrix.codes)]
    spread = scale.repeat_interleave(matrix.group, 1)[:, : matrix.inputs]
    if matrix.zeros is None:
        return numbers(matrix.codes) * spread
    halves = matrix.codes.unflatten(1, (-1, matrix.fold // 2))
    codes = torch.stack((halves & 15, halves >> 4), dim=2).flatten(1)
    return (codes.float() - matrix.zeros.float().repeat_interleave(matrix.group, 1)) * spread


def product(x: torch.Tensor, matrix: Codes, bias: torch.Tensor | None) -> torch.Tensor:
    """See `interface.Quantised`."""
    return F.linear(x.float(), values(matrix), None if bias is None else bias.float()).to(x.dtype)


def expand(matrix: Codes, dtype: torch.dtype) -> torch.Tensor:
    """See `interface.Quantised`."""
    return values(matrix).to(dtype)


def experts_of_codes(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: Codes, down: Codes
) -> torch.Tensor:
    """See `interface.Quantised`."""
    hidden = gate_up.inputs
    count = len(down.codes) // hidden
    both = values(gate_up).unflatten(0, (count, -1))
    return experts(x, ids, weights, both, values(down).unflatten(0, (count, hidden)))


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `interface.Quantised`."""
    scale = (x.float().abs().amax(dim=1, keepdim=True) / LARGEST).clamp(min=_LEAST_SCALE)
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale
