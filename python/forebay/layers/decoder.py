"""Decoder-only models: embedding, blocks, final norm, output head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F

from forebay.attention.backend import AttentionBackend, LayerKV
from forebay.layers.adapted import StepAdapters
from forebay.layers.layer_inputs import LayerRows
from forebay.layers.norm import MeanNorm, Norm, RMSNorm
from forebay.layers.ops import Ops
from forebay.layers.params import Parameters, Report, ignore
from forebay.layers.rotary import Rotary, SectionedRotary
from forebay.layers.step import Index, Step, WindowRows
from forebay.layers.vocabulary import SharedEmbedding, embed_whole
from forebay.weights.codes import Raw
from forebay.weights.config import ModelConfig

HEAD = "lm_head.weight"
"""The name of the output head's weight, even if it is tied to the embedding."""


@dataclass(frozen=True)
class ImageRows:
    """The rows that replace embeddings at a step's `m` image positions, and the rows that later layers add there."""

    at: torch.Tensor  # int64 [m]: indices among the step's tokens
    rows: torch.Tensor  # [m, 1 + deepstack, hidden]: inputs, then the terms that are added after layers 0, 1, ...


@dataclass(frozen=True)
class FeatureRows:
    """The cached features from which a head drafts, for a step of `n` tokens."""

    pool: torch.Tensor  # [entries, hidden]
    writes: torch.Tensor  # int64 [n]: the entry of each token's feature
    before: torch.Tensor  # int64 [n]: the entry of the previous position; any entry at position 0


@dataclass(frozen=True)
class Forward:
    """The model's input for one step; `n` tokens, `s` sampled positions."""

    tokens: torch.Tensor  # int32 [n]
    given: Sequence[
        tuple[int, torch.Tensor]
    ]  # (first of the n tokens, their inputs [m, hidden] in place of embeddings)
    positions: torch.Tensor  # int64 [n], or [3, n] if the model's positions have three numbers
    sampled: torch.Tensor  # int64 [s]: indices of the tokens that get logits
    writes: torch.Tensor  # int64 [n]: the entry of `LayerKV` to which each token is written
    prepared: Any  # prepared by the backend for this step
    kv: Sequence[LayerKV]  # one per layer
    index: Index | None = None
    """The index keys, and the choice of positions; None: the model has no index."""
    images: ImageRows | None = None
    """The rows at image positions; None: the step has no image positions."""
    states: Any = None
    """The step's recurrent states (`StateStore.step`); None: the model has none."""
    adapted: StepAdapters | None = None
    """The adapters of the tokens; None: all tokens use the base model."""
    logits: torch.Tensor | None = None
    """Memory for the logits, float32 [s, vocabulary]; None: new memory is allocated."""
    features: FeatureRows | None = None
    """Where features are read and written; None: no head drafts from them."""
    window: WindowRows | None = None
    """The data for layers with separate window pages; None: all layers share one pool."""


class Attends(Protocol):
    """The part of a layer that mixes tokens: attention or a recurrence."""

    def __call__(self, x: torch.Tensor, step: Step, /) -> torch.Tensor:
        """Computes the part for x [tokens, hidden]. The result has the same shape."""


class Feeds(Protocol):
    """The part of a layer that works on each token separately."""

    def __call__(self, x: torch.Tensor, ops: Ops, /) -> torch.Tensor:
        """Computes the part for x [tokens, hidden]. The result has the same shape."""


@runtime_checkable
class ReadsBoth(Protocol):
    """A part that works on each token separately, and also reads the states before its norm."""

    def beside(self, x: torch.Tensor, states: torch.Tensor, ops: Ops, /) -> torch.Tensor:
        """Computes the part from normalised states x and the states before the norm. All are [tokens, hidden]."""


class AddsInput(Protocol):
    """The part of a layer that adds a term computed from the per-layer input (Gemma 3n and Gemma 4)."""

    def __call__(self, x: torch.Tensor, step: Step, /) -> torch.Tensor:
        """Computes the term that is added for states x [tokens, hidden]. The result has the same shape."""


@runtime_checkable
class TakesPart(Protocol):
    """A part of a layer that ranks compute together, although each rank has separate tokens."""

    def take_part(self, none: torch.Tensor, ops: Ops, /) -> None:
        """Takes part in collectives as a rank without tokens; `none` is [0, hidden]."""


class AttachedHead(Protocol):
    """A head that drafts from the states of a model. `forebay.layers.draft_heads` implements it."""

    params: Parameters

    @property
    def taps(self) -> Sequence[int]:
        """The layers whose inputs the head reads. An index equal to the layer count means the final states."""

    @property
    def rotaries(self) -> Sequence[Rotary]:
        """The head's rotary embeddings in addition to the model's."""

    def keep(self, tapped: Mapping[int, torch.Tensor], forward: Forward, step: Step) -> None:
        """Stores the head's inputs for a step's tokens, computed from the states [n, hidden] at the taps."""


class Block:
    """One decoder layer: `x + attention(norm(x))`, then `x + mlp(norm(x))`, or with norms at other positions.

    A layer with a single part has only that part and the norm before it.
    """

    def __init__(
        self,
        attention: Attends | None,
        mlp: Feeds | ReadsBoth | None,
        before: tuple[Norm | None, Norm | None],
        behind: tuple[Norm, Norm] | None = None,
        scale: float = 1.0,
        *,
        parallel: bool = False,
    ) -> None:
        """`before`: the norms of the two parts' inputs. `behind`: the norms of their outputs before they are added.

        None: no norm. `scale`: the factor of both parts' outputs. `parallel`: both parts read the output of one norm.
        """
        self.inputs: AddsInput | None = None
        """Adds a term computed from the per-layer input, after both parts; None: the model has no per-layer inputs."""
        self.factor: torch.Tensor | None = None
        """The factor [1] of the layer's output; None: no factor."""
        self.parallel = parallel
        self._scale = scale
        self.behind = behind
        self.attention: Attends | None = attention
        self.mlp: Feeds | ReadsBoth | None = mlp
        self.input_norm, self.post_norm = before

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Computes the layer. Returns the last part's output and the residual stream. The next norm adds the two.

        The returned residual is None if the output already includes it.
        """
        x, residual = self._parts(x, residual, step)
        if self.inputs is None and self.factor is None:
            return x, residual
        x = residual.add_(x)
        if self.inputs is not None:
            x = x + self.inputs(x, step)
        return x if self.factor is None else x * self.factor, None

    def _parts(self, x: torch.Tensor, residual: torch.Tensor | None, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        attention, mlp = self.attention, self.mlp
        summed = residual
        if attention is not None:
            x, summed = self._input(self.input_norm, x, summed, step.ops)
            attended = self._output(0, attention(x, step), step.ops)
            if mlp is None:
                return attended, summed
            if self.parallel:
                assert not isinstance(mlp, ReadsBoth)
                return attended + self._output(1, mlp(x, step.ops), step.ops), summed
            x = attended
        assert mlp is not None
        x, summed = self._input(self.post_norm, x, summed, step.ops)
        fed = mlp.beside(x, summed, step.ops) if isinstance(mlp, ReadsBoth) else mlp(x, step.ops)
        return self._output(1, fed, step.ops), summed

    @staticmethod
    def _input(
        norm: Norm | None, x: torch.Tensor, residual: torch.Tensor | None, ops: Ops
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the input of a part, and the sum of x and the residual before the norm."""
        if norm is not None:
            return normalised(norm, x, residual, ops)
        summed = x if residual is None else residual.add_(x)
        return summed, summed

    def _output(self, part: int, x: torch.Tensor, ops: Ops) -> torch.Tensor:
        if self.behind is not None:
            x, _ = normalised(self.behind[part], x, None, ops)
        return x if self._scale == 1.0 else x * self._scale


def norm_of(config: ModelConfig, params: Parameters, name: str) -> Norm:
    """Creates a norm of states, with the weight `name`."""
    if config.mean_norms:
        return MeanNorm(params, name, config.hidden_size, config.rms_norm_eps)
    return RMSNorm(params, name, config.hidden_size, config.rms_norm_eps, config.wide_norms)


def normalised(
    norm: Norm, x: torch.Tensor, residual: torch.Tensor | None, ops: Ops
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the norm of x plus the residual, and the sum, which overwrites the residual."""
    if isinstance(norm, RMSNorm):
        return ops.norm(norm, x, residual)
    summed = x if residual is None else residual.add_(x)
    return norm(summed), summed


class Decoder:
    """A decoder-only language model."""

    def __init__(
        self, config: ModelConfig, params: Parameters, blocks: Sequence[Block], backend: AttentionBackend, ops: Ops
    ) -> None:
        hidden, vocabulary = config.hidden_size, config.vocab_size
        self.config = config
        self.params = params
        self.backend = backend
        self.ops = ops
        self.blocks = blocks
        rows = params.shard.of(vocabulary)
        self.embedding = params.tensor((rows.size, hidden), {"model.embed_tokens.weight": rows})
        """The embedding. With several ranks, each rank has the rows of some tokens, both in the embedding and in the
        output head.
        """
        self.embedding_norm = norm_of(config, params, "model.embed_norm") if config.embedding_norm else None
        """The norm of embeddings; None: embeddings are not normalised."""
        self._embed = embed_whole if params.ranks is None else SharedEmbedding(rows, params.ranks.group)
        self.norm = norm_of(config, params, "model.norm")
        self.head = self.embedding
        if config.headless or config.tie_word_embeddings:
            # Some checkpoints of tied models store the same matrix twice.
            params.skip(HEAD)
        else:
            self.head = params.matrix(hidden, {HEAD: rows})
        self._layer_inputs = None if config.layer_inputs is None else LayerRows(config, params)
        self.rotaries = self.rotaries_of(config, params)
        """The rotary embeddings, which layers refer to by index."""
        self.draft_head: AttachedHead | None = None
        """The draft head that reads the model's states; None: there is none."""

    @property
    def rotary(self) -> Rotary:
        """The rotary embedding of a model that has only one."""
        return self.rotaries[0]

    @staticmethod
    def rotaries_of(config: ModelConfig, params: Parameters) -> list[Rotary]:
        """Creates the rotary embeddings of a model."""
        longest = config.max_position_embeddings
        shapes = [(rope.dim, rope.theta, rope.scaling, longest, params.dtype, params.device) for rope in config.ropes]
        if config.sections is None:
            return [Rotary(*shape) for shape in shapes]
        return [SectionedRotary(config.sections, *shape) for shape in shapes]

    def attach(self, head: AttachedHead) -> None:
        """Attaches a draft head, which then stores its inputs in each step."""
        self.draft_head = head
        self.rotaries += head.rotaries

    def query_factors(self, positions: torch.Tensor) -> torch.Tensor | None:
        """Returns the factors [n, 1, 1] of queries at positions [n], or [3, n]; then only the first line counts."""
        scale = self.config.query_scale
        if scale is None:
            return None
        numbers = (positions if positions.dim() == 1 else positions[0]) + scale.first
        steps = numbers.div(scale.every, rounding_mode="floor")
        return (1 + scale.beta * torch.log1p(steps.float())).to(self.params.dtype)[:, None, None]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor | Raw]], report: Report = ignore) -> None:
        """Loads weights, by the names of the family. Raises `WeightError` if they do not fit."""
        self.params.load(weights, report)

    def keeps(self, name: str) -> bool:
        """True if a weight of a checkpoint is kept in its stored format."""
        return name in self.params.kept

    def check_weights(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises `WeightError` if a checkpoint with weights of these shapes does not fit."""
        self.params.check(shapes)

    def __call__(self, forward: Forward) -> torch.Tensor:
        """Computes the step's positions. Returns float32 logits [s, vocabulary] of the sampled positions.

        With several ranks, each rank returns the logits of its own tokens.
        """
        x = self.states(forward)
        return self.logits(x) if forward.logits is None else self._capped(forward.logits.copy_(F.linear(x, self.head)))

    def take_part(self) -> None:
        """Takes part in the collectives of a step group in a step in which this rank has no tokens."""
        none = self.embedding.new_empty(0, self.config.hidden_size)
        for block in self.blocks:
            part: object = block.mlp
            if isinstance(part, TakesPart):
                part.take_part(none, self.ops)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Returns float32 logits [m, vocabulary] of final states [m, hidden]."""
        return self._capped(F.linear(states, self.head).float())

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        """Applies the soft cap to logits in place, if there is one."""
        cap = self.config.scales.logit_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def states(self, forward: Forward) -> torch.Tensor:
        """Computes the step's positions. Returns the final states [s, hidden] of the sampled positions."""
        if forward.adapted is None:
            return self._states(forward)
        assert self.params.adapted is not None
        with self.params.adapted.of_step(forward.adapted):
            return self._states(forward)

    @staticmethod
    def _told(forward: Forward) -> torch.Tensor:
        """Returns the tokens, with 0 where a caller provides inputs, as Transformers does at image positions."""
        if not forward.given:
            return forward.tokens
        tokens = forward.tokens.clone()
        for first, rows in forward.given:
            tokens[first : first + len(rows)] = 0
        return tokens

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings [n, hidden] of tokens [n]."""
        x: torch.Tensor = self._embed(tokens, self.embedding)
        factor = self.config.scales.embeddings
        return x if factor == 1.0 else x * factor

    def step(self, forward: Forward, inputs: torch.Tensor | None = None) -> Step:
        """Creates the data of a step that layers share. `inputs`: the additional per-layer inputs."""
        factors = self.query_factors(forward.positions)
        rotations = [rotary(forward.positions) for rotary in self.rotaries]
        return Step(
            *(rotations, forward.writes, forward.kv, self.backend, forward.prepared, self.ops, forward.index, factors),
            forward.states,
            inputs,
            forward.window,
        )

    def _states(self, forward: Forward) -> torch.Tensor:
        x, scales = self.embed(forward.tokens), self.config.scales
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        for first, rows in forward.given:
            x[first : first + len(rows)] = rows if scales.inputs == 1.0 else rows * scales.inputs
        images = forward.images
        if images is not None:
            x.index_copy_(0, images.at, images.rows[:, 0])
        inputs = None if self._layer_inputs is None else self._layer_inputs(x, self._told(forward))
        step = self.step(forward, inputs)
        head = self.draft_head if forward.features is not None else None
        tapped: dict[int, torch.Tensor] = {}
        residual: torch.Tensor | None = None
        for number, block in enumerate(self.blocks, start=1):
            if head is not None and number - 1 in head.taps:
                # Later layers overwrite `x` and `residual`.
                tapped[number - 1] = x.clone() if residual is None else residual + x
            x, residual = block(x, residual, step)
            if images is not None and number < images.rows.shape[1]:
                assert residual is not None
                # The layer's output is `residual + x`: round this sum before the image's rows are added.
                output = residual.index_select(0, images.at) + x.index_select(0, images.at)
                residual.index_copy_(0, images.at, output)
                x.index_copy_(0, images.at, images.rows[:, number])
        if head is not None and len(self.blocks) in head.taps:
            x, _ = normalised(self.norm, x, residual, self.ops)
            tapped[len(self.blocks)] = x
            x = x.index_select(0, forward.sampled)
        else:
            x = x.index_select(0, forward.sampled)
            if residual is not None:
                residual = residual.index_select(0, forward.sampled)
            x, _ = normalised(self.norm, x, residual, self.ops)
        if head is not None:
            head.keep(tapped, forward, step)
        # Logits are a product with these states, so their factor is applied here. Pooled vectors have no factor.
        return x if self.config.headless or scales.logits == 1.0 else x * scales.logits
