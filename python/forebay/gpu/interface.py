"""The operators of `forebay.gpu`: their inputs and outputs, the same for all implementations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from forebay.gpu.hot import Found, HotRows, SparsePages
from forebay.gpu.low_rank import LowRankStack, PlacedTokens
from forebay.gpu.recurrent import StateHeads, StateRows, StateWeights
from forebay.gpu.sampling import Wishes
from forebay.gpu.tables import Received, StepBuffers, Tables


@dataclass(frozen=True)
class PagedRows:
    """The rows of one step for attention; `r` rows, which may be padding, of `n` tokens.

    Tensors are on the device, so that a graph can run again with new values. The other fields affect launches, and are
    the same for all steps of a graph.
    """

    slots: torch.Tensor  # int32 [r]
    ends: torch.Tensor  # int32 [r]: positions in the row's pages, its own tokens included
    first: torch.Tensor  # int32 [r + 1]: the row's first token; tokens after the last row belong to no row
    page_table: torch.Tensor  # int32 [slots, pages per slot]
    page_size: int
    page_stride: int
    """The number of a layer's entries from the first entry of a page to that of the next page."""
    null_page: int
    """The page that is read if a table entry is -1. The preparation of the step reports such entries as errors."""
    decodes: bool = True
    """True if rows may have one token."""
    chunks: bool = True
    """True if rows may have several tokens, or if tokens may belong to no row."""
    works: dict[Any, object] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Values that operators derive from the rows on the device, shared by all layers of the step."""


class Attention(Protocol):
    """Attention over pages of keys and values."""

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: PagedRows,
        scale: float,
        window: int = 0,
        cap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns attention [n, heads, value_dim] of q [n, heads, head_dim]; last dimensions are dense.

        A query attends to its last `window` positions, its own included; 0: all positions. `cap` is the soft cap of
        scores; 0: no cap. `sinks` [heads] are additional logits, which take weight but have no value; None: no sinks.

        `keys` [entries, kv_heads, head_dim] and `values` [entries, kv_heads, value_dim] include the rows' own tokens.
        They have q's type, or are uint8: 8-bit floats (e4m3). The values of latent rows are the first elements of the
        keys, in the same memory. The result is 0 for tokens of no row.
        """


class Layers(Protocol):
    """Operators of layers that work on each token separately. Last dimensions are dense."""

    def one_row(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Returns `x W^T + b` [1, outputs] of x [1, inputs] and `weight` [outputs, inputs], summed in float32."""

    def one_row_gated(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str = "silu"
    ) -> torch.Tensor:
        """Returns `gate` of `one_row` [1, outputs / 2], in a single kernel, rounded like the two operators."""

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the RMS norm of `x + residual`, scaled by `weight` [hidden], and the sum, both [n, hidden].

        The sum overwrites the residual. Without a residual the sum is x.
        """

    def gate(self, gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
        """Returns `activation(gate) * up` [n, inner] for `gate_up` [n, gates and then ups].

        The activation is `silu`, `gelu`, or `gelu_pytorch_tanh`. With `swigluoai`, gates are clamped to at most 7 and
        have the slope 1.702; ups are clamped to -7 .. 7, and 1 is added.
        """

    def rotate_and_keep(
        self,
        qkv: torch.Tensor,
        queries: int,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
        cos: torch.Tensor,
        signed_sin: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        writes: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns views q, k and v, [n, heads, dim] each, of qkv [n, all heads * dim], which is overwritten.

        Query and key heads are normalised with the weights `norms`, [dim] each, unless `norms` is None. Then RoPE
        rotates as many leading elements as there are angles: `cos` and `signed_sin` [n, 1, turned], as in
        `layers.rotary.Rotation`. Keys and values are written to the entries `writes` int64 [n] of `keys` and `values`
        [entries, heads, dim]. These have qkv's type, or are uint8: 8-bit floats (e4m3), rounded to nearest even from
        float32, with the largest value 448; NaN stays NaN.
        """

    def keep_latent(
        self,
        made: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        cos: torch.Tensor,
        signed_sin: torch.Tensor,
        pairs: bool,
        pool: torch.Tensor,
        writes: torch.Tensor,
    ) -> torch.Tensor:
        """Computes and stores the rows [n, rank + turned] of latent attention from projected states.

        The latent part is normalised and scaled by `weight` [rank]. The rest is rotated, as pairs of adjacent elements
        (`pairs`) or of halves, and stored as halves. Rows are written to the entries `writes` int64 [n] of `pool`
        [entries, rank + turned].
        """

    def keep_index_keys(
        self,
        made: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        cos: torch.Tensor,
        signed_sin: torch.Tensor,
        pairs: bool,
        pool: torch.Tensor,
        writes: torch.Tensor,
    ) -> None:
        """Normalises index keys [n, dim] (layer norm, `weight` and `bias` [dim]), and rotates their leading elements.

        The keys are written to the entries `writes` int64 [n] of `pool` [entries, dim]; `pairs` as in `keep_latent`.
        """


class Plans(Protocol):
    """Operators that read plans on the device. They set bits of `tables.ERROR_*` in `errors` int32 [1]."""

    def move_words(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies dense int32 words to the same number of words of `target`. Either may be pinned host memory."""

    def apply_slots(self, received: Received, tables: Tables, errors: torch.Tensor) -> None:
        """Writes new slots: their records, parameters and tokens. An invalid slot changes no other slot."""

    def write_table(
        self, received: Received, name: str, table: torch.Tensor, least: int, most: int, errors: torch.Tensor
    ) -> None:
        """Writes the triples (slot, index, value) of the column `name` to a table int32 [slots + 1, indices].

        Valid values are at least `least` and below `most`; others are written as -1. A triple outside the table is
        ignored.
        """

    def prepare(
        self,
        received: Received,
        tables: Tables,
        buffers: StepBuffers,
        errors: torch.Tensor,
        hot_rows: torch.Tensor | None,
    ) -> None:
        """Fills the buffers from the plan's rows and the tables.

        `hot_rows` int32 [slots + 1, pages] has -1 for no page. A slot with hot rows may lack pages that it reads.
        """


class Sampling(Protocol):
    """The operators from logits to tokens. They copy nothing to the host."""

    def greedy(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the first of each row's largest logits, int64 [r], and whether all are finite, bool [r].

        `logits` are [r, vocabulary].
        """

    def draw(self, logits: torch.Tensor, wishes: Wishes, tokens: torch.Tensor) -> None:
        """Draws tokens for rows with a temperature, by float32 logits [r, vocabulary].

        The drawn tokens overwrite `tokens` int64 [r], the result of `greedy`.

        The filters and their order are in `docs/protocol.md`. A row that is not finite may get any token.
        """

    def penalise(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        counts: torch.Tensor,
        lines: torch.Tensor,
        penalties: torch.Tensor,
    ) -> None:
        """Overwrites `rows` int64 [p] of float32 logits [r, vocabulary] with the result of `layers.ops.penalised`.

        `counts` int32 [lines, 2, vocabulary] count how often tokens occurred, and how often they were generated.
        `lines` int64 [p] are the lines of the rows. `penalties` float32 [p, 3] are repetition, presence and frequency.
        """

    def likely(self, logits: torch.Tensor, tokens: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ids int64 [r, 1 + most] and float32 log-probabilities of `tokens` int64 [r, 1] and of the likeliest.

        The likeliest tokens are in order. `most` is at most `MOST_LIKELY` and the vocabulary; logits are [r,
        vocabulary].
        """

    def adjust(
        self,
        logits: torch.Tensor,
        lines: torch.Tensor,
        counts: torch.Tensor,
        tables: Tables,
        buffers: StepBuffers,
    ) -> torch.Tensor:
        """Returns a copy of float32 logits [r, vocabulary], with the penalties of the rows' slots applied.

        `counts` as in `penalise`; `lines` int32 [r] are the rows' lines of `counts`; -1: the row has no penalty.
        """

    def count_tokens(self, tokens: torch.Tensor, lines: torch.Tensor, counts: torch.Tensor) -> None:
        """Counts tokens int32 [r], as occurred and as generated, in the rows' `lines`.

        No line may belong to two rows.
        """

    def tell_likely(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        tables: Tables,
        buffers: StepBuffers,
        told: torch.Tensor,
    ) -> None:
        """Writes the results of `likely` for tokens int32 [r] to `told` int32 [r, 2, 1 + MOST_LIKELY].

        The first half contains ids, the second the bits of float32 values. A row has as many entries as its slot
        requests, at most `MOST_LIKELY` and the vocabulary. Other entries are undefined.
        """

    def ask(self, tables: Tables, buffers: StepBuffers) -> Wishes:
        """Returns the sampling parameters of the step's rows. Rows that do not sample have no parameters for draws."""

    def keep(
        self,
        tokens: torch.Tensor,
        finite: torch.Tensor,
        tables: Tables,
        buffers: StepBuffers,
        errors: torch.Tensor,
        block: torch.Tensor,
    ) -> torch.Tensor:
        """Stores tokens int64 [r] in the token pool, and 0 where `finite` bool [r] is false.

        Tokens of rows that do not sample are written to the null slot. `block` int32 [1 + 2r] receives the error word,
        which is reset to 0, then the tokens, then 1 for each finite row. Returns the tokens, a view of `block`.
        """


class Experts(Protocol):
    """Mixtures of experts."""

    def experts(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        biases: tuple[torch.Tensor, torch.Tensor] | None = None,
        activation: str = "silu",
    ) -> torch.Tensor:
        """Returns the weighted sum [n, hidden] of the experts of each token of x [n, hidden], in order of their ids.

        Weights are float32 [n, experts per token], and ids int64 of that shape, ascending. Experts are `gate_up`
        [experts, gates and then ups, hidden] and `down` [experts, hidden, inner]. `biases` are those of both
        projections, [experts, gates and then ups] and [experts, hidden]. `activation` as in `gate`. The id `experts`
        means no expert; its weight must be 0.
        """


class Codes(Protocol):
    """A quantised matrix [rows, inputs]: 8-bit floats (e4m3), or 4-bit integers minus zero points, times scales."""

    @property
    def codes(self) -> torch.Tensor:
        """The codes, uint8 [rows, inputs] or [rows, inputs / 2].

        Of every `fold` 4-bit codes, the first half is in the low bits of the bytes, and the second half in the high
        bits.
        """

    @property
    def scale(self) -> torch.Tensor:
        """The scales, float32 [row blocks, groups]."""

    @property
    def zeros(self) -> torch.Tensor | None:
        """Zero points, uint8 [rows, groups]; None: codes are floats."""

    @property
    def inputs(self) -> int:
        """The number of values of a row."""

    @property
    def group(self) -> int:
        """The number of consecutive values of a row that share a scale. It is a multiple of `fold`."""

    @property
    def block_rows(self) -> int:
        """The number of rows that share a scale."""

    @property
    def fold(self) -> int:
        """The number of codes that are folded together: a power of 2 from 32 to 128; 0: codes are floats."""


class Quantised(Protocol):
    """Matrix products with quantised matrices."""

    def product(self, x: torch.Tensor, matrix: Codes, bias: torch.Tensor | None) -> torch.Tensor:
        """Returns `x W^T + b` [n, rows] in x's type. Each row of x [n, inputs] is contiguous."""

    def expand(self, matrix: Codes, dtype: torch.dtype) -> torch.Tensor:
        """Returns the dequantised matrix [rows, inputs], each value rounded once."""

    def experts_of_codes(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: Codes, down: Codes
    ) -> torch.Tensor:
        """Returns the weighted sum as in `Experts.experts`. Each matrix has the rows of all experts, concatenated."""

    def quantise(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantises x [n, inputs] to 8-bit floats (e4m3) [n, inputs], with a scale per row, float32 [n, 1].

        The largest magnitude of a row becomes 448, the largest of these floats.
        """


class Built(Protocol):
    """How the operators are built."""

    COMPILES: bool
    """True if the first launch of a kernel compiles it, which requires a C compiler on a GPU."""


class Sparse(Protocol):
    """Attention to chosen positions, some of which are only in host memory."""

    READS_HOST: bool
    """True if `gather` on a GPU reads pinned host memory."""

    def choose(
        self, q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, rows: PagedRows, top_k: int
    ) -> torch.Tensor:
        """Returns the positions int32 [n, top_k] that the rows' queries keep, ascending, padded with -1.

        A query q [n, index heads, dim] keeps the positions with the largest `sum over heads of weight * relu(q . key)`,
        up to its own position. Of equal scores, lower positions win. `weights` are float32 [n, index heads], and `keys`
        [entries, dim]. The rows' page table is that of index keys.
        """

    def clear_slots(self, received: Received, table: torch.Tensor, slots: int) -> None:
        """Sets the lines of the plan's new slots to -1 in a table int32 [slots or more, any].

        Slots from `slots` on are ignored.
        """

    def open_hot_rows(self, received: Received, pages: SparsePages, group: HotRows, slots: int) -> None:
        """Empties the hot rows that the plan assigns to slots, and resets the slots' step counts.

        The table of hot rows must already have been written. Slots from `slots` on are ignored.
        """

    def resolve(
        self, chosen: torch.Tensor, query_slots: torch.Tensor, pages: SparsePages, group: HotRows, errors: torch.Tensor
    ) -> Found:
        """Finds the entries of chosen positions int32 [n, top_k] of slots int32 [n]; a missing one gets a hot row.

        A sparse slot must have one query per step and at least `top_k` hot rows, and its clock must have been advanced.
        `attention.hot_rows.find` defines the result.
        """

    def gather(self, found: Found, host: torch.Tensor, host_stride: int, page_size: int, pool: torch.Tensor) -> None:
        """Copies missing rows from host pages to a layer's `pool` [entries, width].

        `host` [elements] begins with the layer's rows of host page 0; pages are `host_stride` elements apart.
        """

    def attend_chosen(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Returns attention [n, heads, value_dim] of q [n, heads, head_dim] to entries `rows` int32 [n, k]; -1: none.

        Keys and values are as in `Attention.attend`. The result is 0 for a query without rows.
        """


class Recurrences(Protocol):
    """Layers with a fixed-size state per slot. Last dimensions are dense."""

    def convolve(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        table: torch.Tensor,
        rows: StateRows,
        *,
        silu: bool = False,
        gates: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Returns the causal convolution [n, channels] of each channel of x [n, channels], continuing each row.

        `weight` is [channels, taps], oldest first. `table` [lines, taps - 1, channels] has the last inputs of slots,
        and is updated. With `silu` outputs are `y * sigmoid(y)`. With gates, [n, channels] each and with x's strides,
        inputs are multiplied by the first gate, and outputs by the second. The result is 0 for tokens of no row.
        """

    def recur(
        self,
        mixed: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor | None,
        weights: StateWeights,
        shape: StateHeads,
        table: torch.Tensor,
        rows: StateRows,
    ) -> torch.Tensor:
        """Runs the recurrence of `layers.recurrent`: returns float32 [n, heads * value_dim], and advances the states.

        `mixed` [n, queries, keys and values] are outputs of the convolution. Steps are `softplus(a + step_bias)`, with
        a [n, heads], or [n, heads * key_dim] for per-channel decays; decays are `exp(-exp(decay) * step)`. Strengths of
        the delta rule are `sigmoid(b)`, with b [n, heads]; None: no delta rule, and strengths are the steps. `table` is
        float32 [lines, heads, key_dim, value_dim]. Outputs for tokens of no row are undefined.
        """

    def gated_norm(
        self,
        y: torch.Tensor,
        gate: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        norm: str,
        size: int,
        sigmoid: bool,
        first: torch.Tensor,
    ) -> torch.Tensor:
        """Returns float32 y [n, values] normalised in groups of `size` and gated, in the type of `gate` [n, values].

        The gate is a sigmoid (`sigmoid`), or `x * sigmoid(x)`. `norm` is `none`, `before_gate` or `after_gate`, and
        `weight` is [size], for all groups, or [values]. The result is 0 for tokens from `first[-1]` on, which belong to
        no row.
        """


class LowRank(Protocol):
    """The LoRA operator, which is applied after matrix products."""

    def add_low_rank(self, x: torch.Tensor, y: torch.Tensor, stack: LowRankStack, tokens: PlacedTokens) -> None:
        """Adds `B (A x)` of each token's adapter to y [n, outputs], for x [n, inputs].

        `A x` is rounded to the type of x, and the product to the type of y before it is added.
        """


class Kernels(Built, Attention, Layers, Plans, Sampling, Experts, Quantised, Sparse, Recurrences, LowRank, Protocol):
    """All operators. A module of functions implements it."""
