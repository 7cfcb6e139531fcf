"""Memory for the checks of operators: random inputs, pages that must not be read, and tolerances for rounding.

No module of this folder needs Triton or hypothesis. So the same checks run in the interpreter's tests, in tests on a
GPU, and, on the PyTorch reference operators, in tests on a CPU.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from forebay.gpu.interface import PagedRows

CPU = torch.device("cpu")
LAYERS = 2
"""The layers of a pool. The checks use the second one."""
SINGLE = 2.0**-16
"""The error of sums in float32, relative to the sum of absolute terms: 256 roundings.

Errors of up to 14336 products have random signs, so they grow with the square root of the count. The error of
TensorFloat-32, 2^-11, is larger.
"""
_ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


def rounding(dtype: torch.dtype) -> float:
    """The largest relative error of a stored number. Triton's interpreter truncates, which doubles it."""
    return _ROUNDING[dtype] * (2 if os.environ.get("TRITON_INTERPRET") == "1" else 1)


def within(given: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> None:
    """Fails if elements differ from float64 `expected` by more than `bound`, or are NaN."""
    assert given.shape == expected.shape
    error = (given.double() - expected).abs()
    wrong = ~(error <= bound)
    if wrong.any():
        ratio = (error / bound.clamp(min=1e-300)).nan_to_num(nan=torch.inf)
        at = int(ratio.argmax())
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} elements are wrong; element {at} is {given.flatten()[at]:.6g}, not "
            f"{expected.flatten()[at]:.6g}, where {bound.flatten()[at]:.2g} is allowed"
        )


def nan(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> torch.Tensor:
    """Memory that holds only NaN."""
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def spaced(x: torch.Tensor) -> torch.Tensor:
    """The same rows, with NaN between them."""
    return torch.cat((x, nan(*x.shape, dtype=x.dtype, device=x.device)), dim=1)[:, : x.shape[1]]


@contextmanager
def poisoned() -> Iterator[None]:
    """Fills memory that operators allocate with NaN, as PyTorch does for deterministic algorithms."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


class Numbers:
    """Random tensors on a device."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Normally distributed numbers."""
        return torch.randn(shape, generator=self._generator, device=self.device).to(dtype)

    def uniform(self, *shape: int) -> torch.Tensor:
        """float32 from 0 to 1."""
        return torch.rand(shape, generator=self._generator, device=self.device)

    def below(self, most: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Integers from 0 to `most` - 1."""
        return torch.randint(0, most, shape, generator=self._generator, device=self.device, dtype=dtype)

    def order(self, count: int) -> torch.Tensor:
        """A permutation, int64 [count]."""
        return torch.randperm(count, generator=self._generator, device=self.device)

    def bits(self, count: int) -> torch.Tensor:
        """Random int64 [count] in which any bit may be set."""
        high, low = self.below(1 << 32, 2, count).unbind(0)
        return (high << 32) + low


@dataclass(frozen=True)
class Paged:
    """Random histories of slots, on pages of a pool whose other entries are NaN."""

    histories: list[torch.Tensor]  # one for each row: [positions, kv_heads, width]
    pool: torch.Tensor  # [entries, kv_heads, width]
    page_table: torch.Tensor  # int32 [slots, pages of a slot]
    page_size: int
    page_stride: int
    null_page: int

    @classmethod
    def make(
        cls,
        ends: list[int],
        kv_heads: int,
        width: int,
        page_size: int,
        seed: int,
        dtype: torch.dtype,
        device: torch.device = CPU,
        distinct: int = 0,
    ) -> Paged:
        """Makes rows that end at these positions. Row i is in slot `len(ends) - 1 - i`.

        `distinct`: the number of different entries of which histories consist. 0: all entries differ.
        """
        numbers = Numbers(device, seed)
        wide = -(-max(ends, default=1) // page_size) + 1
        count = wide * len(ends) + 3
        stride = LAYERS * page_size
        # A layer is a view of a pool whose pages hold all layers.
        whole = nan(count + 1, LAYERS, page_size, kv_heads, width, dtype=dtype, device=device)
        pool = whole.view(-1, kv_heads, width)[page_size:]
        given = numbers.order(count)[: wide * len(ends)].view(-1, wide).int()
        table = torch.full((len(ends) + 1, wide), -1, dtype=torch.int32, device=device)
        table[-1] = count
        # The null page is allocated too. Its content may be anything, and must not affect results.
        whole[count] = 7.0
        known = numbers.normal(distinct, kv_heads, width, dtype=dtype)
        histories = []
        for row, end in enumerate(ends):
            slot = len(ends) - 1 - row
            used = -(-end // page_size)
            table[slot, :used] = given[row, :used]
            history = known[numbers.below(distinct, end)] if distinct else numbers.normal(end, kv_heads, width)
            history = history.to(dtype)
            positions = torch.arange(end, device=device)
            pool[table[slot].long()[positions // page_size] * stride + positions % page_size] = history
            histories.append(history)
        return cls(histories, pool, table, page_size, stride, count)

    def rows(self, lengths: list[int], padding: int = 0) -> PagedRows:
        """Returns the rows of a step with these numbers of tokens: the last ones of each history.

        Padded rows have no tokens.
        """
        device = self.pool.device
        ends = torch.tensor([len(history) for history in self.histories] + [0] * padding, device=device)
        slots = torch.tensor([*range(len(lengths) - 1, -1, -1), *[len(lengths)] * padding], device=device)
        first = torch.tensor([0, *lengths, *[0] * padding], device=device).cumsum(0)
        return PagedRows(
            slots.int(), ends.int(), first.int(), self.page_table, self.page_size, self.page_stride, self.null_page
        )
