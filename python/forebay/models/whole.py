"""Decoders with bidirectional attention, as embedders and as cross-encoders (EmbeddingGemma, ModernBERT)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from forebay.attention.backend import LayerKV
from forebay.layers.decoder import Decoder, Forward, norm_of
from forebay.layers.params import Report, ignore
from forebay.layers.vector import VectorLayer
from forebay.models.bert import Packed
from forebay.weights.parts import GroupedQuery
from forebay.weights.pooling import Pooling


class WholeDecoder:
    """The decoder, and the layers that compute a vector from a prompt's states."""

    def __init__(self, decoder: Decoder, pooling: Pooling) -> None:
        self.config = config = decoder.config
        self.params = params = decoder.params
        self.pooling = pooling
        self.size = pooling.size
        """The number of elements of the resulting vector."""
        self._decoder = decoder
        self._layers = [
            VectorLayer(params, layer, None if layer.norm is None else norm_of(config, params, layer.norm))
            for layer in pooling.layers
        ]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], report: Report = ignore) -> None:
        """Loads weights, by the names of the family. Raises `WeightError` if they do not fit."""
        self.params.load(weights, report)

    def __call__(self, packed: Packed) -> torch.Tensor:
        """Returns a vector per prompt, float32 [r, size]: pooled, after later layers; not normalised, or logits."""
        tokens = packed.tokens
        writes = torch.arange(len(tokens), device=tokens.device)
        first = self.pooling.kind == "cls"
        starts = [part.first + row * part.length for part in packed.groups for row in range(part.count)]
        states = self._decoder.states(
            Forward(
                tokens=tokens,
                given=(),
                positions=packed.positions,
                sampled=torch.tensor(starts, device=tokens.device) if first else writes,
                writes=writes,
                prepared=packed.groups,
                kv=self._rows(len(tokens)),
            )
        )
        vectors = states.float()
        if not first:
            means = [vectors[part.tokens].unflatten(0, (part.count, part.length)).mean(dim=1) for part in packed.groups]
            vectors = torch.cat(means)
        for layer in self._layers:
            vectors = layer(vectors.to(self.params.dtype)).float()
        return vectors

    def _rows(self, tokens: int) -> list[LayerKV]:
        """Allocates memory for one layer's keys and values. All layers share it, since none reads another layer's."""
        rows: dict[tuple[int, int], LayerKV] = {}

        def of(heads: GroupedQuery) -> LayerKV:
            size = heads.kv_heads, heads.head_dim
            if size not in rows:
                like = self._decoder.embedding
                rows[size] = LayerKV(like.new_empty(tokens, *size), like.new_empty(tokens, *size))
            return rows[size]

        return [of(heads) for heads in self.config.kept_heads]
