"""The data of a step that all layers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from forebay.attention.backend import CAUSAL, AttentionBackend, How, LatentHeads, LayerKV
from forebay.attention.hot_rows import Chosen
from forebay.attention.states import PlannedStates, StepStates
from forebay.layers.norm import RMSNorm
from forebay.layers.ops import Heads, Ops
from forebay.layers.rotary import Rotation, rotate, unrotated


@dataclass
class Index:
    """The data of a step that its indexed layers share, and the most recent choice of positions."""

    keys: Sequence[torch.Tensor]  # one per indexed layer: [entries, head_dim]
    writes: torch.Tensor  # int64 [n]: the entry to which each token's key is written
    first: int | None
    """The index of the first token that chooses positions; None: all tokens attend to their whole context."""
    prepared: Any  # prepared by the backend for the layers that choose
    find: Callable[[int, torch.Tensor], Chosen]
    """Finds the pool rows of the positions [queries, top_k] that an indexed layer has chosen."""
    chosen: Chosen | None = None
    """The chosen positions for the current layer, and for the later layers that share its choice."""


@dataclass(frozen=True)
class WindowRows:
    """The data of a step for layers with separate window pages; replaces `Step.writes` and `Step.prepared`."""

    layers: frozenset[int]
    """The layers with window pages, by their indices among the layers with attention."""
    writes: torch.Tensor  # int64 [n]: the entry of `LayerKV` to which each token is written
    prepared: Any  # prepared by the backend for these rows


@dataclass(frozen=True)
class Step:
    """The data of one step that its layers use; `n` tokens. Layers are identified by index."""

    rotations: Sequence[Rotation]
    """The rotation of each rotary embedding of the model."""
    writes: torch.Tensor  # int64 [n]: the entry of `LayerKV` to which each token is written
    kv: Sequence[LayerKV]  # one per layer
    backend: AttentionBackend
    prepared: Any  # prepared by the backend for this step
    ops: Ops
    index: Index | None
    query_factors: torch.Tensor | None = None  # [n, 1, 1] of the model's dtype; None: queries have no such factor
    states: StepStates | PlannedStates | None = None
    """The recurrent states of the rows; None: no layer is recurrent."""
    inputs: torch.Tensor | None = None
    """The additional inputs of each layer [n, layers, size]; None: there are none."""
    window: WindowRows | None = None
    """The data for layers with separate window pages; None: all layers share one pool."""
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """The step's keys and values that other layers also read, by layer index."""

    @property
    def rotation(self) -> Rotation:
        """The rotation of a model with a single rotary embedding."""
        return self.rotations[0]

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        heads: Heads,
        norms: tuple[RMSNorm, RMSNorm] | None,
        rope: int | None,
        how: How = CAUSAL,
        *,
        is_shared: bool = False,
        is_scaled: bool = True,
    ) -> torch.Tensor:
        """Returns attention [n, query heads * dim] for a layer's projections; keys and values are written to its pages.

        `rope` is the index of the layer's rotary embedding; None: no rotation. `is_shared`: other layers call
        `attend_kept` for this layer. `is_scaled`: queries are multiplied by the step's factors, if there are any.
        """
        kv = self.kv[layer]
        writes, prepared = self._rows(layer)
        q, k, v = self.ops.rotate_and_keep(qkv, heads, norms, self._rotation(rope), kv, writes)
        if is_shared:
            self.kept[layer] = k, v
        if self.query_factors is not None and is_scaled:
            q = q * self.query_factors
        return self.backend.attend(q, k, v, kv, prepared, how)

    def _rows(self, layer: int) -> tuple[torch.Tensor, Any]:
        """Returns the entries that a layer writes to, and the backend's prepared data for the layer."""
        if self.window is not None and layer in self.window.layers:
            return self.window.writes, self.window.prepared
        return self.writes, self.prepared

    def attend_kept(self, layer: int, source: int, q: torch.Tensor, rope: int | None, how: How) -> torch.Tensor:
        """Returns attention [n, query heads * dim] of queries [n, query heads, dim] to another layer's keys and values.

        `layer` and `source` must use the same pages.
        """
        k, v = self.kept[source]
        _, prepared = self._rows(layer)
        return self.backend.attend(rotate(q, self._rotation(rope)), k, v, self.kv[layer], prepared, how)

    def _rotation(self, rope: int | None) -> Rotation:
        return unrotated(self.rotations[0]) if rope is None else self.rotations[rope]

    def attend_latent(
        self, layer: int, q: torch.Tensor, rows: torch.Tensor, up: torch.Tensor, heads: LatentHeads
    ) -> torch.Tensor:
        """Returns attention [n, heads * value_dim] for queries q; `rows` [n, row] are stored in the layer's pages."""
        kv = self.kv[layer]
        kv.keys.index_copy_(0, self.writes, rows[:, None])
        if self.query_factors is not None:
            q = q * self.query_factors
        chosen = None if self.index is None else self.index.chosen
        if chosen is None:
            return self.backend.attend_latent(q, rows, up, kv, heads, self.prepared, None)
        if chosen.missing is not None:
            chosen.missing.copy(layer, kv.keys[:, 0])
        return self.backend.attend_latent(q, rows, up, kv, heads, self.prepared, chosen.rows)

    def choose(self, number: int, q: torch.Tensor, weights: torch.Tensor) -> None:
        """Chooses positions for queries [queries, index heads, head_dim] by the keys of an indexed layer.

        `weights` are the weights of the index heads.
        """
        assert self.index is not None
        positions = self.backend.choose(q, weights, self.index.keys[number], self.index.prepared)
        self.index.chosen = self.index.find(number, positions)
