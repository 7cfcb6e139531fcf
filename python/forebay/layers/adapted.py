"""LoRA: low-rank matrices in addition to a model's weights (Hu et al. 2021): `y = W x + B (A x)`.

Ranks divide A and B as they divide W. If a rank has a part of the outputs, it has all of A and the same rows of B. If
it has a part of the inputs, it has the same columns of A and all of B; its result is a term of the sum over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import torch
import torch.nn.functional as F

from forebay.weights.shards import Cut


class LowRank(NamedTuple):
    """The low-rank matrices of one module, in the model's dtype."""

    a: torch.Tensor  # [rank, inputs], the inputs of this rank
    b: torch.Tensor  # [outputs, rank], the outputs of this rank, multiplied by the adapter's scale

    @property
    def nbytes(self) -> int:
        """Bytes of both matrices."""
        return self.a.nbytes + self.b.nbytes


Adapter: TypeAlias = Mapping[str, LowRank]
"""The matrices of an adapter, by the names of modules, such as `model.layers.0.self_attn.q_proj`."""


class StepAdapters(Protocol):
    """The adapters of the tokens of one step."""

    def add(self, modules: Mapping[str, int], x: torch.Tensor, y: torch.Tensor) -> None:
        """Adds the adapters' terms to the product y [n, outputs] of x [n, inputs], in place.

        `modules` are the consecutive parts of y: names and widths.
        """


class AdaptedTokens(NamedTuple):
    """The tokens of a step that use one adapter."""

    tokens: torch.Tensor  # int64 [m], ascending
    adapter: Adapter


@dataclass(frozen=True)
class GatheredTokens:
    """Implements `StepAdapters`: gathers the tokens of each adapter."""

    adapted: Sequence[AdaptedTokens]
    """The tokens of each adapter, one entry per adapter."""

    def add(self, modules: Mapping[str, int], x: torch.Tensor, y: torch.Tensor) -> None:
        for tokens, adapter in self.adapted:
            first, chosen = 0, None
            for name, width in modules.items():
                pair = adapter.get(name)
                if pair is not None:
                    if chosen is None:
                        chosen = x.index_select(0, tokens)
                    # As in PEFT, sums are computed in float32, and rounded to the model's type.
                    y[:, first : first + width].index_add_(0, tokens, F.linear(F.linear(chosen, pair.a), pair.b))
                first += width


class AdaptedModules:
    """The modules of a model that adapters may modify, and the adapters of the current step."""

    def __init__(self) -> None:
        self.cuts: dict[str, Cut] = {}
        """The part of each module's matrix [outputs, inputs] that this rank has, by module name."""
        self.products: list[tuple[Mapping[str, int], int]] = []
        """For each matrix product: its modules with their output counts, and its input count, on this rank."""
        self._step: StepAdapters | None = None

    def register(self, cuts: Mapping[str, Cut]) -> None:
        """Registers a matrix product whose outputs are those of several modules, concatenated."""
        columns = next(iter(cuts.values())).columns
        assert columns is not None, "a module is a matrix"
        self.products.append(({name: cut.rows.size for name, cut in cuts.items()}, columns.size))
        self.cuts |= cuts

    @contextmanager
    def of_step(self, adapted: StepAdapters) -> Iterator[None]:
        """Within this context, the adapters' terms are added to products."""
        self._step = adapted
        try:
            yield
        finally:
            self._step = None

    def add(self, modules: Mapping[str, int], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Adds the terms of the step's adapters to the product y [n, outputs] of x [n, inputs], in place. Returns y.

        `modules` are those of a registered product.
        """
        if self._step is not None:
            self._step.add(modules, x, y)
        return y
