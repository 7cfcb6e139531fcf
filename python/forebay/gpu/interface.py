"""The operators of `forebay.gpu`: their inputs and outputs, for all implementations."""

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

    Tensors are on the device, so that a graph may run again with other values in them. The other fields decide about
    launches, and are the same for all steps of a graph.
    """

    slots: torch.Tensor  # int32 [r]
    ends: torch.Tensor  # int32 [r]: positions that are in the row's pages once its tokens are
    first: torch.Tensor  # int32 [r + 1]: where the row's tokens begin; behind the last row are tokens of nobody
    page_table: torch.Tensor  # int32 [slots, pages a slot]
    page_size: int
    page_stride: int
    """Entries of a layer from the first entry of a page to that of the next."""
    null_page: int
    """The page that is read in place of page -1. Page -1 is reported elsewhere."""
    decodes: bool = True
    """True if any row may have one token."""
    chunks: bool = True
    """True if a row may have several tokens, or if some tokens may belong to no row."""
    works: dict[Any, object] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Values that operators have derived from the rows on the device, shared by all layers of the step."""


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
        """Attention [n, heads, value_dim] of q [n, heads, head_dim], the last dimensions dense.

        A query sees its last `window` positions, its own included; 0: all. Scores approach the bound `cap`; 0: no
        bound. `sinks` [heads] are further scores, which take weight but have no value; None: there are none.

        `keys` [entries, kv_heads, head_dim] and `values` [entries, kv_heads, value_dim] include the rows' own tokens.
        They have q's type, or are uint8: 8-bit floats (e4m3). The values of latent rows are the first elements of the
        keys, in the same memory. Tokens of no row get 0.
        """


class Layers(Protocol):
    """A layer's work on each token alone. Last dimensions are dense."""

    def one_row(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x W^T + b` [1, outputs] of x [1, inputs] and `weight` [outputs, inputs], summed in float32."""

    def one_row_gated(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str = "silu"
    ) -> torch.Tensor:
        """`gate` of `one_row` [1, outputs / 2], in one kernel, with the same roundings as both."""

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The root mean square norm of `x + residual`, scaled by `weight` [hidden], and the sum, both [n, hidden].

        The sum is written over the residual. Without a residual it is x.
        """

    def gate(self, gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
        """`activation(gate) * up` [n, inner] of `gate_up` [n, gates and then ups].

        The function is `silu`, `gelu`, or `gelu_pytorch_tanh`. With `swigluoai`, gates are clamped at 7 and have the
        slope 1.702; ups are clamped on both sides, and 1 is added.
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
        """Views q, k and v, [n, heads, dim] each, of qkv [n, all heads * dim], which is overwritten.

        Query and key heads are normalised by the weights `norms` [dim] each, unless these are None. Then the first
        elements are rotated, as many as there are angles: `cos` and `signed_sin` [n, 1, turned], as in
        `layers.rotary.Rotation`. Keys and values go to the entries `writes` int64 [n] of `keys` and `values` [entries,
        heads, dim]. These are of qkv's type, or uint8: 8-bit floats (e4m3), rounded to nearest from float32, ties to
        even. There the largest number is 448, and NaN stays NaN.
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
        """Makes and stores the rows [n, rank + turned] of latent attention from projected states.

        The latent part is normalised and scaled by `weight` [rank]. The rest is rotated, as pairs of neighbours
        (`pairs`) or of halves, and stored as halves. The rows go to the entries `writes` int64 [n] of `pool` [entries,
        rank + turned].
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
        """Normalises keys [n, dim] of an index (mean, `weight` and `bias` [dim]), and rotates their first elements.

        They go to the entries `writes` int64 [n] of `pool` [entries, dim]; `pairs` as in `keep_latent`.
        """


class Plans(Protocol):
    """Plans on the device. `errors` int32 [1] gets further bits of `tables.ERROR_*`."""

    def move_words(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies dense int32 words to the same number of words of another tensor. Either may be pinned host memory."""

    def apply_slots(self, received: Received, tables: Tables, errors: torch.Tensor) -> None:
        """Writes new slots: the records, the parameters and the tokens. A wrong slot changes no other slot."""

    def write_table(
        self, received: Received, name: str, table: torch.Tensor, least: int, most: int, errors: torch.Tensor
    ) -> None:
        """Writes the triples (slot, index, value) of the column `name` to a table int32 [slots + 1, indices].

        Values are at least `least` and below `most`. Others become -1. A triple without a cell is left out.
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

        `hot_rows` int32 [slots + 1, pages] has -1 for none. A slot with hot rows may read pages that it lacks.
        """


class Sampling(Protocol):
    """The computation from logits to tokens, without copies to the host."""

    def greedy(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The first largest of each row of logits [r, vocabulary], int64 [r]; and bool [r], true if all are finite."""

    def draw(self, logits: torch.Tensor, wishes: Wishes, tokens: torch.Tensor) -> None:
        """Overwrites `tokens` int64 [r], the result of `greedy`, in rows with a temperature.

        They are drawn by float32 logits [r, vocabulary].

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

        `counts` int32 [lines, 2, vocabulary] count how often tokens were seen and were generated, and `lines` int64 [p]
        are those of the rows. `penalties` float32 [p, 3] are of repetition, presence and frequency.
        """

    def likely(self, logits: torch.Tensor, tokens: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids int64 [r, 1 + most] and log-probabilities float32 of `tokens` int64 [r, 1] and of the likeliest ones.

        These are in order, and `most` is at most `MOST_LIKELY` and the vocabulary. logits are [r, vocabulary].
        """

    def adjust(
        self,
        logits: torch.Tensor,
        lines: torch.Tensor,
        counts: torch.Tensor,
        tables: Tables,
        buffers: StepBuffers,
    ) -> torch.Tensor:
        """A copy of float32 logits [r, vocabulary], with the penalties of the rows' slots.

        `counts` are those of `penalise`, and `lines` int32 [r] are the rows' lines of them. -1: the row has no penalty.
        """

    def count_tokens(self, tokens: torch.Tensor, lines: torch.Tensor, counts: torch.Tensor) -> None:
        """Counts tokens int32 [r], as seen and as generated, in the lines of `adjust`. No line has two rows."""

    def tell_likely(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        tables: Tables,
        buffers: StepBuffers,
        told: torch.Tensor,
    ) -> None:
        """Writes the results of `likely` for tokens int32 [r] to `told` int32 [r, 2, 1 + MOST_LIKELY].

        The first half has ids, the second the bits of float32. A row has as many as its slot requests, at most
        `MOST_LIKELY` and the vocabulary. Other entries are undefined.
        """

    def ask(self, tables: Tables, buffers: StepBuffers) -> Wishes:
        """The sampling parameters of the step's rows. Rows that do not sample have no parameters for draws."""

    def keep(
        self,
        tokens: torch.Tensor,
        finite: torch.Tensor,
        tables: Tables,
        buffers: StepBuffers,
        errors: torch.Tensor,
        block: torch.Tensor,
    ) -> torch.Tensor:
        """Stores int64 tokens [r] in the token pool. They are 0 where `finite` bool [r] is false.

        Tokens of rows that do not sample go to the null slot. `block` int32 [1 + 2r] gets the error word, which becomes
        0, then the tokens, then 1 for each that is finite. Returns the tokens, a view of it.
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
        """The weighted sum [n, hidden] of the experts of each token of x [n, hidden], in order of their ids.

        Weights are float32 [n, each], and ids int64 [n, each], ascending. Experts are `gate_up` [experts, gates and
        then ups, hidden] and `down` [experts, hidden, inner]. `biases` are of both products, [experts, gates and then
        ups] and [experts, hidden]. `activation` as in `gate`. The id `experts` stands for no expert; its weight must be
        0.
        """


class Codes(Protocol):
    """A matrix [rows, inputs] of 8-bit floats (e4m3), or of 4-bit integers less zero points. Both are times scales."""

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
        """The number of neighbouring values of a row that share a scale. `fold` divides it."""

    @property
    def block_rows(self) -> int:
        """The number of rows that share a scale."""

    @property
    def fold(self) -> int:
        """A power of 2 from 32 to 128; 0: codes are floats."""


class Quantised(Protocol):
    """Products with matrices in their stored bits."""

    def product(self, x: torch.Tensor, matrix: Codes, bias: torch.Tensor | None) -> torch.Tensor:
        """`x W^T + b` [n, rows] of x [n, inputs], whose rows are dense, in its type."""

    def expand(self, matrix: Codes, dtype: torch.dtype) -> torch.Tensor:
        """The values [rows, inputs] of a matrix, each rounded once."""

    def experts_of_codes(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: Codes, down: Codes
    ) -> torch.Tensor:
        """The weighted sum as in `Experts.experts`. The rows of all experts are one after the other."""

    def quantise(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """8-bit floats (e4m3) [n, inputs] of x [n, inputs], and a scale for each row, float32 [n, 1].

        The largest value of a row becomes 448, the largest of these floats.
        """


class Built(Protocol):
    """The way in which operators come to be."""

    COMPILES: bool
    """True if the first launch of a kernel compiles it, which requires a C compiler on a GPU."""


class Sparse(Protocol):
    """Attention to chosen positions, some of which are in the host's memory only."""

    READS_HOST: bool
    """True if `gather` on a GPU reads pinned memory of the host."""

    def choose(
        self, q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, rows: PagedRows, top_k: int
    ) -> torch.Tensor:
        """Positions int32 [n, top_k] that the rows' queries keep, ascending, -1 behind them.

        A query q [n, index heads, dim] keeps the positions with the largest `sum over heads of weight * relu(q . key)`,
        up to its own. Of equal scores the lower positions win. `weights` are float32 [n, index heads], and `keys`
        [entries, dim]. The rows' page table is that of index keys.
        """

    def clear_slots(self, received: Received, table: torch.Tensor, slots: int) -> None:
        """Removes all pages of the plan's new slots, below `slots`, from a table int32 [slots or more, any]."""

    def open_hot_rows(self, received: Received, pages: SparsePages, group: HotRows, slots: int) -> None:
        """Empties the hot rows that the plan gives to slots, and starts the slots' step counts.

        The table of hot rows is already written. Slots are below `slots`.
        """

    def resolve(
        self, chosen: torch.Tensor, query_slots: torch.Tensor, pages: SparsePages, group: HotRows, errors: torch.Tensor
    ) -> Found:
        """The places of chosen positions int32 [n, top_k] of slots int32 [n]; a missing one gets a hot row.

        A sparse slot has one query in a step and at least `top_k` hot rows, and its clock was advanced.
        `attention.hot_rows.find` defines the result.
        """

    def gather(self, found: Found, host: torch.Tensor, host_stride: int, page_size: int, pool: torch.Tensor) -> None:
        """Copies missing rows from the host's pages to a layer's `pool` [entries, width].

        `host` [elements] begins with the layer's rows of host page 0, and its pages are `host_stride` elements apart.
        """

    def attend_chosen(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attention [n, heads, value_dim] of q [n, heads, head_dim] to entries `rows` int32 [n, k]; -1 is none.

        Keys and values are as in `Attention.attend`. A query without any row gets 0.
        """


class Recurrences(Protocol):
    """Layers with a state of fixed size for each slot. Last dimensions are dense."""

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
        """The causal convolution [n, channels] of each channel of x [n, channels], behind the last inputs of its row.

        `weight` is [channels, taps], the oldest first. `table` [lines, taps - 1, channels] has the last inputs, which
        are advanced. With `silu` outputs are `y * sigmoid(y)`. With gates, [n, channels] each and as far apart as x,
        inputs are x times the first, and outputs are times the second. Tokens of no row get 0.
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
        """Outputs float32 [n, heads * value_dim] of the recurrence of `layers.recurrent`, and the advanced states.

        `mixed` [n, queries, keys and values] are outputs of the convolution. Steps are `softplus(a + step_bias)`, with
        a [n, heads], or [n, heads * key_dim] with decays of channels; decays are `exp(-exp(decay) * step)`. Strengths
        of the delta rule are `sigmoid(b)`, with b [n, heads]; None: there is no such rule, and they are the steps.
        `table` is float32 [lines, heads, key_dim, value_dim]. Outputs for tokens of no row are undefined.
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
        """float32 y [n, values], normalised in groups of `size` and gated, in the type of `gate` [n, values].

        The gate is a sigmoid (`sigmoid`), or `x * sigmoid(x)`. `norm` is `none`, `before_gate` or `after_gate`, and
        `weight` is [size], for all groups, or [values]. Tokens from `first[-1]` on, which are of no row, get 0.
        """


class LowRank(Protocol):
    """Adapters beside products."""

    def add_low_rank(self, x: torch.Tensor, y: torch.Tensor, stack: LowRankStack, tokens: PlacedTokens) -> None:
        """Adds `B (A x)` of each token's adapter to y [n, outputs], for x [n, inputs].

        `A x` is rounded to the type of x, and the product to that of y before it is added.
        """


class Kernels(Built, Attention, Layers, Plans, Sampling, Experts, Quantised, Sparse, Recurrences, LowRank, Protocol):
    """All operators. A module of functions implements it."""
