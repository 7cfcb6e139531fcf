"""The indexer of DeepSeek Sparse Attention (DeepSeek-V3.2, 2025), in the model's dtype, as in Transformers.

DeepSeek's own code first multiplies queries and keys by a Hadamard matrix, and rounds them to 8-bit floats. The matrix
is orthogonal and changes no dot product. The rounding only saves memory, so both are omitted here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from forebay.layers.linear import Linear
from forebay.layers.norm import LayerNorm
from forebay.layers.params import Parameters
from forebay.layers.rotary import rotate, rotate_pairs
from forebay.layers.step import Step
from forebay.weights.parts import Indexer

_NORM_EPS = 1e-6


class LayerIndexer:
    """The indexer of a layer.

    It stores a small key for each position, and chooses the positions of the layer's queries.
    """

    def __init__(
        self, params: Parameters, prefix: str, number: int, hidden: int, query_rank: int, shape: Indexer
    ) -> None:
        """Allocates the indexer's weights. `number` is the number of indexed layers before this one."""
        self._number = number
        self._shape = shape
        self._rotate = rotate_pairs if shape.interleaved else rotate
        self._query = Linear(params, prefix, query_rank, {"wq_b": shape.heads * shape.head_dim})
        self._key = Linear(params, prefix, hidden, {"wk": shape.head_dim})
        self._key_norm = LayerNorm(params, f"{prefix}.k_norm", shape.head_dim, _NORM_EPS)
        name = f"{prefix}.weights_proj.weight"
        # Rounding would change the choice, and the matrix is small, so the weights are float32.
        self._weights = params.tensor((shape.heads, hidden), {name: shape.heads}, torch.float32)
        self._scale = shape.heads**-0.5 * shape.head_dim**-0.5

    def __call__(self, x: torch.Tensor, low: torch.Tensor, step: Step) -> None:
        """Stores the keys of x [tokens, hidden], and lets `step` choose positions for its queries.

        The queries are computed from the low-rank states `low` [tokens, query_rank].
        """
        index, shape = step.index, self._shape
        assert index is not None
        keys = self._key_norm(self._key(x))
        index.keys[self._number].index_copy_(0, index.writes, self._rotate(keys[:, None], step.rotation)[:, 0])
        if index.first is None:
            return
        choosing = slice(index.first, None)
        q = self._query(low[choosing]).unflatten(1, (shape.heads, shape.head_dim))
        weights = F.linear(x[choosing].float(), self._weights) * self._scale
        step.choose(self._number, self._rotate(q, step.rotation.of(choosing)), weights)
