"""The parts of a decoder's shape: how its layers attend, to what, and what follows in each of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["Dense", "Experts", "GroupedQuery", "Indexer", "Latent", "Routing"]


@dataclass(frozen=True)
class GroupedQuery:
    """Attention with keys and values of some heads each (Ainslie et al. 2023). Sizes are numbers of elements."""

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    """The first elements of a head, those that positions rotate."""
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    """Query and key heads are normalised before they are rotated."""

    @property
    def position_elements(self) -> int:
        """Elements that a layer keeps of one position."""
        return 2 * self.kv_heads * self.head_dim

    def of_rank(self, world: int) -> GroupedQuery:
        """The heads of one of so many ranks; of key-value heads it has one at least."""
        return replace(self, heads=self.heads // world, kv_heads=max(1, self.kv_heads // world))


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2024): keys and values are made of one short row a position."""

    heads: int
    query_rank: int | None
    """Elements of the low-rank query; None: queries are projected at once."""
    rank: int
    """Elements of the latent part of a row."""
    nope_dim: int
    """Elements of a query or key head that positions do not rotate."""
    rotary_dim: int
    """Those that they do; of a key one part serves all heads."""
    value_dim: int
    bias: bool
    """Of the projections to the low ranks and of the output."""
    interleaved: bool
    """Positions rotate neighbours (2i, 2i + 1), not (i, i + rotary_dim / 2)."""
    scale: float
    """The factor of scores before the softmax."""

    @property
    def position_elements(self) -> int:
        """Elements that a layer keeps of one position: its row."""
        return self.rank + self.rotary_dim

    def of_rank(self, world: int) -> Latent:
        """The heads of one of so many ranks; all of them keep the whole row."""
        return replace(self, heads=self.heads // world)


@dataclass(frozen=True)
class Indexer:
    """The choice of the positions that a query attends to (DeepSeek Sparse Attention, DeepSeek-V3.2, 2025).

    Each indexed layer has small keys of its own, one a position, and scores them for every query. Sizes are numbers of
    elements.
    """

    heads: int
    """Of queries; a key serves all of them."""
    head_dim: int
    """Its first elements are rotated, as many as of `Latent`."""
    interleaved: bool
    """Positions rotate neighbours (2i, 2i + 1), not (i, i + rotary_dim / 2)."""
    top_k: int
    """Most positions that a query keeps."""
    layers: tuple[int, ...]
    """Those that are indexed, ascending. The others attend to what the last of these before them has chosen."""

    @property
    def position_elements(self) -> int:
        """Elements that all indexed layers together keep of one position."""
        return len(self.layers) * self.head_dim


@dataclass(frozen=True)
class Dense:
    """One gated feed-forward part for every token."""

    intermediate_size: int
    bias: bool


@dataclass(frozen=True)
class Routing:
    """The rule by which a token's experts are chosen and weighed."""

    scores: str
    """`softmax` over all experts, or `sigmoid` of each logit."""
    in_float32: bool
    """Logits are computed in float32, whatever the model's dtype."""
    corrected: bool
    """A bias is added to the scores for the choice, and only for it."""
    groups: int
    """Groups of experts of neighbouring ids; 1: there are none."""
    kept_groups: int
    """Best groups, outside of which nothing is chosen."""
    best_of_group: int
    """The number of its best scores whose sum is a group's score."""
    normalise: bool
    """A token's weights are divided by their sum."""
    scaling: float
    """The factor of weights, applied last."""


@dataclass(frozen=True)
class Experts:
    """A mixture of experts (Shazeer et al. 2017): each token has some gated feed-forward parts of many."""

    count: int
    per_token: int
    intermediate_size: int
    """Of one expert."""
    shared_size: int
    """Inner size of the part that every token has beside its experts; 0: there is none."""
    routing: Routing
