"""Low-rank matrices beside a model's own (Hu et al. 2021): `y = W x + B (A x)`.

Ranks divide them as they divide W. Where a rank has some outputs, it has all of A, and those rows of B. Where it has
some inputs, it has those columns of A, and all of B: what it adds is part of its term of the sum over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F

from forebay.weights.shards import Cut


class LowRank(NamedTuple):
    """The matrices beside one module, in the model's dtype."""

    a: torch.Tensor  # [rank, inputs], those of this rank
    b: torch.Tensor  # [outputs, rank], those of this rank, with the adapter's factor

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.a.nbytes + self.b.nbytes


Adapter: TypeAlias = Mapping[str, LowRank]
"""The matrices of an adapter by the names of modules, such as `model.layers.0.self_attn.q_proj`."""


class AdaptedTokens(NamedTuple):
    """The tokens of a step that one adapter changes."""

    tokens: torch.Tensor  # int64 [m], ascending
    adapter: Adapter


class AdaptedModules:
    """The modules of a model that adapters may change, and the adapters of the step that is computed."""

    def __init__(self) -> None:
        self.cuts: dict[str, Cut] = {}
        """The part of each module's matrix [outputs, inputs] that is on this rank, by name."""
        self._step: Sequence[AdaptedTokens] = ()

    @contextmanager
    def of_step(self, adapted: Sequence[AdaptedTokens]) -> Iterator[None]:
        """Has products within it changed for these tokens."""
        self._step = adapted
        try:
            yield
        finally:
            self._step = ()

    def add(self, modules: Mapping[str, int], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Adds to the product y [n, outputs] of x [n, inputs]. `modules` are the parts of y, by name, with widths.

        It overwrites y.
        """
        for tokens, adapter in self._step:
            first, chosen = 0, None
            for name, width in modules.items():
                pair = adapter.get(name)
                if pair is not None:
                    if chosen is None:
                        chosen = x.index_select(0, tokens)
                    # As PEFT does: the sums are float32, and rounded to the model's type.
                    y[:, first : first + width].index_add_(0, tokens, F.linear(F.linear(chosen, pair.a), pair.b))
                first += width
        return y
