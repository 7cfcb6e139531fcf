"""The parts of a decoder's shape: the attention of its layers, and the feed-forward parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

__all__ = [
    "Dense",
    "Experts",
    "GroupedQuery",
    "Indexer",
    "Latent",
    "LayerInputs",
    "LayerKind",
    "QueryScale",
    "Recurrence",
    "Rope",
    "Routing",
    "Scales",
]


@dataclass(frozen=True)
class Scales:
    """Factors of states and logits; 1: there is none."""

    embeddings: float = 1.0
    inputs: float = 1.0
    """The factor of inputs that a caller provides in place of embeddings."""
    residuals: float = 1.0
    """The factor of a part's output before it is added."""
    logits: float = 1.0
    logit_cap: float | None = None
    """The bound that logits approach; None: no bound."""


@dataclass(frozen=True)
class Rope:
    """A rotary embedding."""

    dim: int
    """The number of first elements of a head that are rotated."""
    theta: float
    scaling: Mapping[str, Any] | None
    """None, or `{"rope_type": "linear" | "llama3" | "yarn" | "longrope" | "proportional", ...}`.

    The names are those of transformers 4. `proportional` has the number of `turned` pairs.
    """


@dataclass(frozen=True)
class LayerKind:
    """The properties that differ between layers, in their attention and around it."""

    rope: int | None = 0
    """The number of the rotary embedding; None: no rotation."""
    window: int | None = None
    """The number of positions that a position sees, itself included; None: all."""
    chunk: int | None = None
    """The length of a chunk, if positions attend only within their own chunk; None: there are no chunks."""
    norms: str = "before"
    """The places of norms: `before` each part, `after` it, `around` it, or one before both (`parallel`).

    `before_feed`: before the second part.
    """
    heads: GroupedQuery | None = None
    """The layer's own attention; None: the model's."""
    keys_of: int | None = None
    """The layer whose keys and values this one reads; None: it has its own."""
    scaled: bool = False
    """True if the layer's output is multiplied by a learned number."""


@dataclass(frozen=True)
class LayerInputs:
    """Inputs of each layer beside the residual stream: rows of the token, and its embedding (Gemma 3n, 2025)."""

    vocab_size: int
    """The number of tokens that have rows."""
    size: int
    """Elements of a layer's input."""


@dataclass(frozen=True)
class QueryScale:
    """A factor of queries that grows with their position: `1 + beta * ln(1 + (first + position) // every)`.

    From Llama 4 (2025).
    """

    beta: float
    every: int
    """The number of positions with one factor."""
    first: int
    """The number of the first position."""


@dataclass(frozen=True)
class GroupedQuery:
    """Attention with keys and values of some heads each (Ainslie et al. 2023). Sizes are numbers of elements."""

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    """The number of first elements of a head that are rotated."""
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    """True if query and key heads are normalised before they are rotated."""
    query_scale: QueryScale | None = None
    """The factor of queries that grows with their position; None: there is none."""
    scale: float | None = None
    """The factor of scores before the softmax; None: `head_dim` to the power of -1/2."""
    row_norms: bool = False
    """True if the queries, and the keys, of all heads of a position are normalised together."""
    cap: float | None = None
    """The bound that scores approach; None: no bound."""
    sinks: bool = False
    """True if each head has a sink: a score that takes weight but has no value."""
    gate: bool = False
    """True if the output is multiplied by the sigmoid of a gate."""
    plain_norms: bool = False
    """True if query and key heads are normalised without weights."""
    value_norm: bool = False
    """True if each head of values is normalised, without weights."""
    keys_are_values: bool = False
    """True if values are the same product as keys."""
    both_ways: bool = False
    """True if a position also sees later ones. A window then reaches equally far on both sides."""

    @property
    def position_elements(self) -> int:
        """Elements of one position in a layer."""
        return 2 * self.kv_heads * self.head_dim

    def of_rank(self, world: int) -> GroupedQuery:
        """The heads of one of `world` ranks. It has at least one key-value head."""
        return replace(self, heads=self.heads // world, kv_heads=max(1, self.kv_heads // world))


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2024). Keys and values are computed from one short row per position."""

    heads: int
    query_rank: int | None
    """Elements of the low-rank query; None: queries have one projection."""
    rank: int
    """Elements of the latent part of a row."""
    nope_dim: int
    """Elements of a query or key head that are not rotated."""
    rotary_dim: int
    """Elements of a query or key head that are rotated. All heads share this part of a key."""
    value_dim: int
    bias: bool
    """True if the projections to the low ranks and of the output have biases."""
    interleaved: bool
    """True if rotation pairs neighbours (2i, 2i + 1); False: it pairs (i, i + rotary_dim / 2)."""
    scale: float
    """The factor of scores before the softmax."""
    query_scale: QueryScale | None = None
    """The factor of queries that grows with their position; None: there is none."""

    @property
    def position_elements(self) -> int:
        """Elements of one position in a layer: its row."""
        return self.rank + self.rotary_dim

    def of_rank(self, world: int) -> Latent:
        """The heads of one of `world` ranks. All ranks keep the whole row."""
        return replace(self, heads=self.heads // world)


@dataclass(frozen=True)
class Indexer:
    """The choice of the positions that a query attends to (DeepSeek Sparse Attention, DeepSeek-V3.2, 2025).

    Each indexed layer has its own small keys, one per position, and scores them for every query. Sizes are numbers of
    elements.
    """

    heads: int
    """The number of query heads. A key serves all of them."""
    head_dim: int
    """Elements of a head. The same number of first elements is rotated as in `Latent`."""
    interleaved: bool
    """True if rotation pairs neighbours (2i, 2i + 1); False: it pairs (i, i + rotary_dim / 2)."""
    top_k: int
    """The largest number of positions that a query keeps."""
    layers: tuple[int, ...]
    """The indexed layers, ascending. The other layers attend to the choice of the last indexed one before them."""

    @property
    def position_elements(self) -> int:
        """Elements of one position in all indexed layers together."""
        return len(self.layers) * self.head_dim


@dataclass(frozen=True)
class Recurrence:
    """A part with a state for each slot, in place of attention or beside it, as crates/weights describes it."""

    heads: int
    """The number of heads of the state; 0: there is only a convolution."""
    key_heads: int
    """The number of heads of keys and queries. Each serves the same number of value heads."""
    tiled: bool
    """True if heads that share a key head are as far apart as there are key heads; False: they are neighbours."""
    key_dim: int
    value_dim: int
    """Elements of a value head; without heads, of the convolution."""
    channel_decay: bool
    """True if each channel of a key head has its own decay; False: each head has one."""
    delta: bool
    """True if a state's old value for a key is subtracted first."""
    taps: int
    conv_bias: bool
    bias: bool
    """True if the projections have biases."""
    norm: str
    """The norm of the output: `none`, `before_gate` or `after_gate`."""
    sigmoid_gate: bool
    """True if the gate is a sigmoid; False: it is `x * sigmoid(x)`."""
    low_rank: int
    """The low rank of gates and of decays; 0: each has one product."""
    norm_size: int
    """The number of elements that are normalised together."""

    @property
    def keys(self) -> int:
        """Elements of all key heads."""
        return self.key_heads * self.key_dim

    @property
    def decays(self) -> int:
        """The number of decays."""
        return self.heads * (self.key_dim if self.channel_decay else 1)

    @property
    def values(self) -> int:
        """Elements of all value heads."""
        return max(self.heads, 1) * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return 2 * self.keys + self.values

    def state_bytes(self, element: int) -> int:
        """Bytes of one slot's state, with inputs of the convolution of `element` bytes."""
        return 4 * self.heads * self.key_dim * self.value_dim + self.channels * (self.taps - 1) * element


@dataclass(frozen=True)
class Dense:
    """One feed-forward part for every token."""

    intermediate_size: int
    bias: bool
    gated: bool = True
    """True if a second product is multiplied with the activation's result."""


@dataclass(frozen=True)
class Routing:
    """The rule for the choice and the weights of a token's experts."""

    scores: str
    """The scores: `softmax` over all experts, or `sigmoid` of each logit."""
    in_float32: bool
    """True if logits are computed in float32, for any dtype of the model."""
    corrected: bool
    """True if a bias is added to the scores, only for the choice."""
    groups: int
    """The number of groups of experts with neighbouring ids; 1: experts are not grouped."""
    kept_groups: int
    """The number of best groups. Experts of other groups are not chosen."""
    best_of_group: int
    """The number of a group's best scores that are summed for its score."""
    normalise: bool
    """True if a token's weights are divided by their sum."""
    scaling: float
    """The factor of weights, applied last."""


@dataclass(frozen=True)
class Experts:
    """A mixture of experts (Shazeer et al. 2017). It has many feed-forward parts, and each token uses some."""

    count: int
    per_token: int
    intermediate_size: int
    """The inner size of one expert."""
    shared_size: int
    """The inner size of the shared expert, which every token uses; 0: there is none."""
    routing: Routing
    shared_gate: bool = False
    """True if the shared expert's output is multiplied by a gate."""
    bias: bool = False
    """True if the products and the router have biases."""
    beside: bool = False
    """True if the shared expert and the others have separate norms on both sides, and the router reads normalised
    states with learned factors (Gemma 4).
    """
    weighs_inputs: bool = False
    """True if an expert's input is multiplied by its weight, and not its output."""
    gated: bool = True
    """True if a second product is multiplied with the activation's result, in the shared expert too."""
    latent_size: int = 0
    """The size of experts' inputs and outputs, between two products that they share; 0: experts use the layer's states.
    """
