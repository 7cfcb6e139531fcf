"""Draft heads: one layer reads a model's features and the tokens after them, and proposes the next token.

The *entry* of a position is computed from the feature of the previous position and the position's own token. So it
depends only on the tokens up to the position, like all content of a page, and is stored together with the keys and
values of the model's layers. At position 0, zeros replace the previous feature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F

from forebay.layers.attention import Attention
from forebay.layers.blocks import block_of, feed_forward, mixer
from forebay.layers.decoder import HEAD, Decoder, Forward, normalised
from forebay.layers.linear import Linear
from forebay.layers.mlp import DenseFeed
from forebay.layers.norm import RMSNorm
from forebay.layers.params import Parameters, WeightError
from forebay.layers.rotary import Rotary
from forebay.layers.step import Step
from forebay.weights.errors import UnsupportedModelError
from forebay.weights.heads import EAGLE3, HeadConfig
from forebay.weights.parts import Dense


class HeadLayer(Protocol):
    """The layer of a draft head; `n` tokens."""

    @property
    def rotaries(self) -> Sequence[Rotary]:
        """The rotary embeddings that the head needs in addition to the model's."""

    def features(self, tapped: Sequence[torch.Tensor]) -> torch.Tensor:
        """Computes features [n, hidden] from the model's states [n, hidden] at the taps."""

    def keep(self, embedded: torch.Tensor, before: torch.Tensor, step: Step) -> None:
        """Writes the keys and values of entries, computed from embeddings and previous features, [n, hidden] each."""

    def __call__(self, embedded: torch.Tensor, before: torch.Tensor, step: Step) -> torch.Tensor:
        """Does `keep`, and returns states [n, hidden], used as features of tokens that the model has not computed."""

    def final(self, states: torch.Tensor) -> torch.Tensor:
        """Returns the states [m, hidden] that the output head reads."""


class DraftHead:
    """A draft head, attached to a model."""

    def __init__(self, config: HeadConfig, params: Parameters, model: Decoder) -> None:
        """Allocates the head's weights in `params`."""
        self.params = params
        self.taps = config.taps
        self._model = model
        self._layer: HeadLayer
        if config.kind == EAGLE3:
            self._layer = EagleLayer(config, params, model)
            of_tokens, of_logits = "embed_tokens.weight", HEAD
        else:
            self._layer = MtpLayer(config, params, model)
            at = f"model.layers.{model.config.num_hidden_layers}."
            of_tokens, of_logits = f"{at}embed_tokens.weight", f"{at}shared_head.head.weight"
        hidden, vocabulary, all_tokens = config.shape.hidden_size, config.vocab_size, model.config.vocab_size
        self._embedding: torch.Tensor | None = None
        """None: the head uses the model's embedding. Likewise, `_output` None: it uses the model's output matrix."""
        self._output: torch.Tensor | None = None
        if config.own_embedding:
            self._embedding = params.tensor((all_tokens, hidden), {of_tokens: all_tokens})
        if config.own_output:
            self._output = params.tensor((vocabulary, hidden), {of_logits: vocabulary})
        self._offsets: torch.Tensor | None = None
        if config.mapped:
            # Offsets are loaded as float32, which represents all token ids exactly.
            self._offsets = params.tensor((vocabulary,), {"d2t": vocabulary}, torch.float32)
        # Some checkpoints contain copies of the model's matrices.
        for name in (of_tokens, of_logits, "t2d"):
            params.skip(name)
        self._ids: torch.Tensor | None = None

    @property
    def rotaries(self) -> Sequence[Rotary]:
        """The rotary embeddings of the head's layer in addition to the model's."""
        return self._layer.rotaries

    def loaded(self) -> None:
        """Checks the weights. Raises `WeightError` if drafts could be tokens that the model does not have."""
        if self._offsets is None:
            return
        offsets = self._offsets.round().long()
        self._ids = torch.arange(len(offsets), device=offsets.device) + offsets
        if int(self._ids.min()) < 0 or int(self._ids.max()) >= self._model.config.vocab_size:
            raise WeightError(f"d2t names tokens outside of the model's vocabulary of {self._model.config.vocab_size}")

    def keep(self, tapped: Mapping[int, torch.Tensor], forward: Forward, step: Step) -> None:
        """Writes a step's features and its tokens' entries, from the model's states [n, hidden] at the taps."""
        rows = forward.features
        assert rows is not None
        rows.pool.index_copy_(0, rows.writes, self._layer.features([tapped[number] for number in self.taps]))
        before = rows.pool.index_select(0, rows.before)
        self._layer.keep(*self._inputs(forward, before), step)

    def draft(self, forward: Forward, before: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns states [r, hidden], and the drafted token [r], int32, after the single token of each of `r` rows.

        `before`: the states that the previous call returned for these rows; None: features are read from pages.
        """
        rows = forward.features
        assert rows is not None
        if before is None:
            before = rows.pool.index_select(0, rows.before)
        else:
            # The backend may compute rows in an order that differs from the rows' order in `before`.
            before = torch.empty_like(before).index_copy_(0, forward.sampled, before)
        states = self._layer(*self._inputs(forward, before), self._model.step(forward)).index_select(0, forward.sampled)
        output = self._model.head if self._output is None else self._output
        likely = F.linear(self._layer.final(states), output).argmax(dim=-1)
        return states, (likely if self._ids is None else self._ids.index_select(0, likely)).int()

    def _inputs(self, forward: Forward, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the tokens' embeddings, and the previous features. Both are zeros at position 0."""
        own = self._embedding
        embedded = self._model.embed(forward.tokens) if own is None else F.embedding(forward.tokens, own)
        first = (forward.positions == 0)[:, None]
        return embedded.masked_fill(first, 0), before.masked_fill(first, 0)


class EagleLayer:
    """The layer of EAGLE-3 (Li et al. 2025): its attention reads embeddings concatenated with features."""

    def __init__(self, config: HeadConfig, params: Parameters, model: Decoder) -> None:
        shape = config.shape
        hidden, eps, feed = shape.hidden_size, shape.rms_norm_eps, shape.feeds[0]
        if not isinstance(feed, Dense):
            raise UnsupportedModelError("a head that drafts with experts is not supported by PyTorch's hand")
        self.rotaries = Decoder.rotaries_of(shape, params)
        kind = shape.kinds[0]
        if kind.rope is not None:
            # The head's rotary embeddings come after those of the model.
            kind = replace(kind, rope=len(model.rotaries) + kind.rope)
        inputs = len(config.taps) * model.config.hidden_size
        self._features = Linear(params, "", inputs, {"fc": hidden})
        number = model.config.attending_layers
        self._attention = Attention(
            *(params, "midlayer.self_attn", number, hidden, shape.heads(0), eps, kind), inputs=2 * hidden
        )
        self._feed = DenseFeed(
            *(params, "midlayer.mlp", hidden, feed.intermediate_size, feed.bias, shape.hidden_act), gated=feed.gated
        )
        self._of_token, self._of_feature, self._behind, self._norm = (
            RMSNorm(params, name, hidden, eps)
            for name in (
                "midlayer.input_layernorm",
                "midlayer.hidden_norm",
                "midlayer.post_attention_layernorm",
                "norm",
            )
        )
        self._adds_normalised = config.norm_before_residual

    def features(self, tapped: Sequence[torch.Tensor]) -> torch.Tensor:
        return self._features(torch.cat(list(tapped), dim=1))

    def keep(self, embedded: torch.Tensor, before: torch.Tensor, step: Step) -> None:
        self._attention(torch.cat((self._of_token(embedded), self._of_feature(before)), dim=1), step)

    def __call__(self, embedded: torch.Tensor, before: torch.Tensor, step: Step) -> torch.Tensor:
        normal = self._of_feature(before)
        x = self._attention(torch.cat((self._of_token(embedded), normal), dim=1), step)
        x, residual = normalised(self._behind, x, normal if self._adds_normalised else before, step.ops)
        return residual + self._feed(x, step.ops)

    def final(self, states: torch.Tensor) -> torch.Tensor:
        return self._norm(states)


class MtpLayer:
    """A multi-token prediction layer (DeepSeek-V3, 2024), which follows the model's last layer."""

    def __init__(self, config: HeadConfig, params: Parameters, model: Decoder) -> None:
        shape, number = config.shape, model.config.num_hidden_layers
        hidden, eps, prefix = shape.hidden_size, shape.rms_norm_eps, f"model.layers.{number}"
        self.rotaries: Sequence[Rotary] = ()
        self._project = Linear(params, prefix, 2 * hidden, {"eh_proj": hidden})
        self._of_token, self._of_feature, self._norm = (
            RMSNorm(params, f"{prefix}.{name}", hidden, eps) for name in ("enorm", "hnorm", "shared_head.norm")
        )
        self._block = block_of(
            *(shape, params, number, mixer(shape, params, number), feed_forward(shape, params, number))
        )

    def features(self, tapped: Sequence[torch.Tensor]) -> torch.Tensor:
        return tapped[0]

    def keep(self, embedded: torch.Tensor, before: torch.Tensor, step: Step) -> None:
        block = self._block
        assert block.attention is not None
        assert block.input_norm is not None
        block.attention(block.input_norm(self._joined(embedded, before)), step)

    def __call__(self, embedded: torch.Tensor, before: torch.Tensor, step: Step) -> torch.Tensor:
        x, residual = self._block(self._joined(embedded, before), None, step)
        return x if residual is None else x + residual

    def final(self, states: torch.Tensor) -> torch.Tensor:
        return self._norm(states)

    def _joined(self, embedded: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return self._project(torch.cat((self._of_token(embedded), self._of_feature(before)), dim=1))
