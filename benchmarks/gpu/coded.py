"""Products with quantised weights compared with bfloat16, and mixtures of experts, with the shapes of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.clock import Operator, copies_of
from forebay.gpu.interface import Kernels
from forebay.gpu.products import GpuProducts, multiplies_floats

KINDS = {"8-bit floats by row": (0, 1, 0), "8-bit floats in blocks": (128, 128, 0), "4 bits": (128, 1, 128)}
"""For each kind: values per scale (0: a row), rows of a block, and codes that are folded together (0: floats)."""


@dataclass(frozen=True)
class Matrix:
    """Implements `gpu.products.Matrix`."""

    codes: torch.Tensor
    scale: torch.Tensor
    zeros: torch.Tensor | None
    inputs: int
    group: int
    block_rows: int
    fold: int
    order: torch.Tensor | None = None

    @classmethod
    def make(cls, rows: int, inputs: int, kind: str, device: torch.device) -> Matrix:
        """Makes a matrix of random codes."""
        group, block, fold = KINDS[kind]
        group = group or inputs
        groups = -(-inputs // group)
        scale = 0.01 + 0.01 * torch.rand(-(-rows // block), groups, device=device)
        if fold:
            codes = torch.randint(0, 256, (rows, inputs // 2), dtype=torch.uint8, device=device)
            zeros = torch.randint(0, 16, (rows, groups), dtype=torch.uint8, device=device)
            return cls(codes, scale, zeros, inputs, group, block, fold)
        floats = torch.randn(rows, inputs, device=device).to(torch.float8_e4m3fn)
        return cls(floats.view(torch.uint8), scale, None, inputs, group, block, fold)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points."""
        return sum(part.nbytes for part in (self.codes, self.scale, self.zeros) if part is not None)


def products(
    ops: Kernels, device: torch.device, rows: int, inputs: int, tokens: int
) -> Iterator[tuple[str, Callable[[], Operator]]]:
    """Products of a matrix in each kind, as a hand computes it on this device."""
    for kind in KINDS:
        # On a CPU these operators are for tests, and too slow for large numbers of tokens.
        if device.type == "cuda" or kind != "8-bit floats by row":
            yield kind, partial(_product, ops, device, rows, inputs, tokens, kind)


def _product(ops: Kernels, device: torch.device, rows: int, inputs: int, tokens: int, kind: str) -> Operator:
    whole = GpuProducts(ops, multiplies_floats(device))
    first = Matrix.make(rows, inputs, kind, device)
    bytes_ = first.nbytes + 2.0 * tokens * (rows + inputs)
    copies = copies_of(bytes_)
    matrices = [first, *(Matrix.make(rows, inputs, kind, device) for _ in range(copies - 1))]
    x = torch.randn(tokens, inputs, dtype=torch.bfloat16, device=device)
    return Operator(
        f"product {rows} x {inputs} in {kind}, {tokens} tokens",
        lambda at: whole.product(x, matrices[at], None),
        copies,
        bytes_,
        2.0 * tokens * rows * inputs,
    )


def experts(ops: Kernels, config: dict[str, Any], device: torch.device, tokens: int) -> Operator | None:
    """A layer's experts in bfloat16, with evenly spread tokens; None if the model has none."""
    if "num_experts" not in config:
        return None
    count, each = config["num_experts"], config["num_experts_per_tok"]
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    gate_up = torch.randn(count, 2 * inner, hidden, dtype=torch.bfloat16, device=device)
    down = torch.randn(count, hidden, inner, dtype=torch.bfloat16, device=device)
    ids = torch.stack([torch.randperm(count, device=device)[:each].sort().values for _ in range(tokens)])
    weights = torch.rand(tokens, each, device=device)
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device=device)
    read = len(ids.unique())
    return Operator(
        f"experts, {tokens} tokens, {read} of {count} read",
        lambda at: ops.experts(x, ids, weights, gate_up, down),
        1,
        2.0 * (read * 3 * inner * hidden + 2 * tokens * hidden),
        2.0 * tokens * each * 3 * inner * hidden,
    )
