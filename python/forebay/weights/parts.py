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
    """Factors of states and logits; 1 has no effect."""

    embeddings: float = 1.0
    inputs: float = 1.0
    """The factor of inputs that a caller provides instead of token embeddings."""
    residuals: float = 1.0
    """The factor of an attention or feed-forward output before it is added to the residual stream."""
    logits: float = 1.0
    logit_cap: float | None = None
    """The bound of the logits' soft cap; None: no cap."""


@dataclass(frozen=True)
class Rope:
    """A rotary embedding."""

    dim: int
    """The number of leading elements of a head that RoPE rotates."""
    theta: float
    scaling: Mapping[str, Any] | None
    """None, or `{"rope_type": "linear" | "llama3" | "yarn" | "longrope" | "proportional", ...}`.

    The names are those of Transformers 4. `proportional` has the number of rotated pairs, `turned`.
    """


@dataclass(frozen=True)
class LayerKind:
    """The settings that differ between layers, for attention and norms."""

    rope: int | None = 0
    """The index of the rotary embedding; None: no rotation."""
    window: int | None = None
    """The number of last positions that a position attends to, itself included; None: all."""
    chunk: int | None = None
    """The length of a chunk, if positions attend only within their own chunk; None: there are no chunks."""
    norms: str = "before"
    """Where norms are: `before` each part, `after` it, `around` it, or one norm before both parts (`parallel`).

    `before_feed`: only before the feed-forward part.
    """
    heads: GroupedQuery | None = None
    """The layer's attention, if it differs from the model's; None: the model's."""
    keys_of: int | None = None
    """The layer whose keys and values this layer reads; None: its own."""
    scaled: bool = False
    """True if the layer's output is multiplied by a learned scalar."""


@dataclass(frozen=True)
class LayerInputs:
    """Inputs per layer besides the residual stream: a row per token, and the token's projected embedding (Gemma 3n)."""

    vocab_size: int
    """The number of tokens that have rows."""
    size: int
    """The number of elements of each layer's input."""


@dataclass(frozen=True)
class QueryScale:
    """A factor of queries that grows with their position: `1 + beta * ln(1 + (first + position) // every)`.

    From Llama 4 (2025).
    """

    beta: float
    every: int
    """The number of consecutive positions that share a factor."""
    first: int
    """The number that is added to each position."""


@dataclass(frozen=True)
class GroupedQuery:
    """Grouped-query attention (Ainslie et al. 2023). Sizes count elements."""

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    """The number of leading elements of a head that RoPE rotates."""
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    """True if query and key heads are normalised before they are rotated."""
    query_scale: QueryScale | None = None
    """The factor of queries that grows with their position; None: no such factor."""
    scale: float | None = None
    """The factor of scores before the softmax; None: `head_dim` to the power of -1/2."""
    row_norms: bool = False
    """True if one norm covers all query heads of a position, and another all key heads."""
    cap: float | None = None
    """The bound of the scores' soft cap; None: no cap."""
    sinks: bool = False
    """True if each head has a sink: a logit that takes weight in the softmax but has no value."""
    gate: bool = False
    """True if the output is multiplied by the sigmoid of a gate."""
    plain_norms: bool = False
    """True if the norms of query and key heads have no weights."""
    value_norm: bool = False
    """True if each value head is normalised, without weights."""
    keys_are_values: bool = False
    """True if values are the same projection as keys."""
    both_ways: bool = False
    """True if a position also attends to later positions. A window then reaches equally far on both sides."""

    @property
    def position_elements(self) -> int:
        """The number of elements that a layer keeps per position."""
        return 2 * self.kv_heads * self.head_dim

    def of_rank(self, world: int) -> GroupedQuery:
        """Returns the attention of one of `world` ranks, with at least one key-value head."""
        return replace(self, heads=self.heads // world, kv_heads=max(1, self.kv_heads // world))


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2024). Keys and values are computed from one short row per position."""

    heads: int
    query_rank: int | None
    """Elements of the low-rank query; None: queries have a single projection."""
    rank: int
    """Elements of the latent part of a row."""
    nope_dim: int
    """Elements of a query or key head that are not rotated."""
    rotary_dim: int
    """Elements of a query or key head that are rotated. All heads share this part of a key."""
    value_dim: int
    bias: bool
    """True if the down-projections and the output projection have biases."""
    interleaved: bool
    """True if RoPE rotates pairs (2i, 2i + 1); False: pairs (i, i + rotary_dim / 2)."""
    scale: float
    """The factor of scores before the softmax."""
    query_scale: QueryScale | None = None
    """The factor of queries that grows with their position; None: no such factor."""

    @property
    def position_elements(self) -> int:
        """The number of elements that a layer keeps per position: a row."""
        return self.rank + self.rotary_dim

    def of_rank(self, world: int) -> Latent:
        """Returns the attention of one of `world` ranks, with a part of the heads. Each rank keeps whole rows."""
        return replace(self, heads=self.heads // world)


@dataclass(frozen=True)
class Indexer:
    """The choice of the positions that a query attends to (DeepSeek Sparse Attention, DeepSeek-V3.2, 2025).

    Each indexed layer has separate small keys, one per position, and scores them for every query. Sizes count elements.
    """

    heads: int
    """The number of query heads. They share one key per position."""
    head_dim: int
    """Elements of a head. As in `Latent`, the first `rotary_dim` of them are rotated."""
    interleaved: bool
    """True if RoPE rotates pairs (2i, 2i + 1); False: pairs (i, i + rotary_dim / 2)."""
    top_k: int
    """The largest number of positions that a query keeps."""
    layers: tuple[int, ...]
    """The indexed layers, ascending. Each other layer uses the choice of the last indexed layer before it."""

    @property
    def position_elements(self) -> int:
        """The number of elements that all indexed layers together keep per position."""
        return len(self.layers) * self.head_dim


@dataclass(frozen=True)
class Recurrence:
    """A recurrent part with a state per slot, instead of or parallel to attention. crates/weights describes it."""

    heads: int
    """The number of heads of the state; 0: the part has only a convolution."""
    key_heads: int
    """The number of key and query heads. Each is shared by the same number of value heads."""
    tiled: bool
    """True if value head h uses key head `h % key_heads`; False: consecutive value heads share a key head."""
    key_dim: int
    value_dim: int
    """Elements of a value head; without heads, channels of the convolution."""
    channel_decay: bool
    """True if each channel of a key head has a separate decay; False: each head has one decay."""
    delta: bool
    """True if the state's old value for a key is subtracted first (delta rule)."""
    taps: int
    conv_bias: bool
    bias: bool
    """True if the projections have biases."""
    norm: str
    """The norm of the output: `none`, `before_gate` or `after_gate`."""
    sigmoid_gate: bool
    """True if the gate is a sigmoid; False: it is `x * sigmoid(x)`."""
    low_rank: int
    """The low rank of the projections of gates and decays; 0: full-rank projections."""
    norm_size: int
    """The number of elements that are normalised together."""

    @property
    def keys(self) -> int:
        """The number of elements of all key heads."""
        return self.key_heads * self.key_dim

    @property
    def decays(self) -> int:
        """The number of decays per position."""
        return self.heads * (self.key_dim if self.channel_decay else 1)

    @property
    def values(self) -> int:
        """The number of elements of all value heads."""
        return max(self.heads, 1) * self.value_dim

    @property
    def channels(self) -> int:
        """The number of channels of the convolution."""
        return 2 * self.keys + self.values

    def state_bytes(self, element: int) -> int:
        """Returns the bytes of one slot's state, with inputs of the convolution of `element` bytes each."""
        return 4 * self.heads * self.key_dim * self.value_dim + self.channels * (self.taps - 1) * element


@dataclass(frozen=True)
class Dense:
    """A dense feed-forward part."""

    intermediate_size: int
    bias: bool
    gated: bool = True
    """True if the activated gate projection is multiplied with an up projection."""


@dataclass(frozen=True)
class Routing:
    """The rule that selects a token's experts and computes their weights."""

    scores: str
    """The scores: `softmax` over all experts, or `sigmoid` of each logit."""
    in_float32: bool
    """True if logits are computed in float32, for any dtype of the model."""
    corrected: bool
    """True if a bias is added to the scores, only for selecting experts."""
    groups: int
    """The number of groups of experts with consecutive ids; 1: experts are not grouped."""
    kept_groups: int
    """The number of best groups that are kept. Experts of other groups are not chosen."""
    best_of_group: int
    """The number of a group's best scores whose sum is the group's score."""
    normalise: bool
    """True if a token's weights are divided by their sum."""
    scaling: float
    """The factor of the weights, applied last."""


@dataclass(frozen=True)
class Experts:
    """A mixture of experts (Shazeer et al. 2017): many feed-forward parts, of which each token uses a few."""

    count: int
    per_token: int
    intermediate_size: int
    """The intermediate size of one expert."""
    shared_size: int
    """The intermediate size of the shared expert, which every token uses; 0: no shared expert."""
    routing: Routing
    shared_gate: bool = False
    """True if the shared expert's output is multiplied by a gate."""
    bias: bool = False
    """True if the experts' projections and the router have biases."""
    beside: bool = False
    """True if the shared expert and the routed experts run in parallel with separate norms before and after, and the
    router reads normalised states with learned factors (Gemma 4).
    """
    weighs_inputs: bool = False
    """True if a token's weight is multiplied with the expert's input instead of its output."""
    gated: bool = True
    """True if the activated gate projection is multiplied with an up projection, in the shared expert too."""
    latent_size: int = 0
    """The size of the experts' inputs and outputs, if shared projections before and after map the layer's states; 0:
    none.
    """
