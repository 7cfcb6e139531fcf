"""Builds the layers of all families, with Hugging Face's parameter names."""

from __future__ import annotations

import torch

from forebay.layers.attention import Attention
from forebay.layers.beside import ExpertsBeside
from forebay.layers.decoder import Attends, Block, Feeds, ReadsBoth, norm_of
from forebay.layers.indexer import LayerIndexer
from forebay.layers.latent import LatentAttention
from forebay.layers.layer_inputs import InputOfLayer
from forebay.layers.mlp import DenseFeed
from forebay.layers.moe import MixtureOfExperts
from forebay.layers.norm import Norm
from forebay.layers.params import Parameters
from forebay.layers.ranks import Summed
from forebay.layers.recurrent import RecurrentLayer
from forebay.layers.step import Step
from forebay.weights.config import ModelConfig
from forebay.weights.parts import Experts, Latent


def grouped_attention(config: ModelConfig, params: Parameters, index: int) -> Attention:
    """Builds the grouped-query attention of layer `index`."""
    prefix = f"model.layers.{index}.self_attn"
    kind, eps, shape = config.kinds[index], config.rms_norm_eps, config.heads(index)
    return Attention(
        *(params, prefix, config.number(index), config.hidden_size, shape, eps, kind, config.wide_norms),
        keys_of=None if kind.keys_of is None else config.number(kind.keys_of),
        shares=any(other.keys_of == index for other in config.kinds),
    )


class Beside:
    """The sum of attention and a recurrent part, both computed from x [tokens, hidden]."""

    def __init__(self, attention: Attends, recurrent: RecurrentLayer) -> None:
        self._attention = attention
        self._recurrent = recurrent

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        return self._attention(x, step) + self._recurrent(x, step)


def mixer(config: ModelConfig, params: Parameters, index: int) -> Attends | None:
    """Builds the attention or recurrent part of layer `index`; None: the layer has neither."""
    attention: Attends | None = None
    if not config.attends or config.attends[index]:
        of_kind = latent_attention if isinstance(config.attention, Latent) else grouped_attention
        attention = of_kind(config, params, index)
    shape = config.recurrences[index] if config.recurrences else None
    if shape is None:
        return attention
    number = sum(one is not None for one in config.recurrences[:index])
    prefix = f"model.layers.{index}.linear_attn"
    recurrent = RecurrentLayer(params, prefix, number, config.hidden_size, shape, config.rms_norm_eps)
    return recurrent if attention is None else Beside(attention, recurrent)


def latent_attention(config: ModelConfig, params: Parameters, index: int) -> LatentAttention:
    """Builds the latent attention of layer `index`, with its indexer if the layer is indexed."""
    shape, prefix = config.attention, f"model.layers.{index}.self_attn"
    assert isinstance(shape, Latent)
    indexer = None
    if config.indexer is not None and index in config.indexer.layers:
        assert shape.query_rank is not None
        number = config.indexer.layers.index(index)
        at = f"{prefix}.indexer"
        indexer = LayerIndexer(params, at, number, config.hidden_size, shape.query_rank, config.indexer)
    number, rope = config.number(index), config.kinds[index].rope
    return LatentAttention(params, prefix, number, config.hidden_size, shape, indexer, rope)


def feed_forward(
    config: ModelConfig, params: Parameters, index: int
) -> DenseFeed | MixtureOfExperts | ExpertsBeside | None:
    """Builds the feed-forward part after the attention of layer `index`; None: the layer has none."""
    feed = config.feed(index)
    prefix, hidden, activation = f"model.layers.{index}.mlp", config.hidden_size, config.hidden_act
    if feed is None:
        return None
    if isinstance(feed, Experts) and feed.beside:
        return ExpertsBeside(config, params, prefix, feed)
    if isinstance(feed, Experts):
        return MixtureOfExperts(params, prefix, hidden, feed, activation)
    return DenseFeed(params, prefix, hidden, feed.intermediate_size, feed.bias, activation, gated=feed.gated)


_NORMS: dict[str, tuple[tuple[str | None, str | None], tuple[str, str] | None]] = {
    "before": (("input_layernorm", "post_attention_layernorm"), None),
    "before_feed": ((None, "post_attention_layernorm"), None),
    "after": ((None, None), ("post_attention_layernorm", "post_feedforward_layernorm")),
    "around": (
        ("input_layernorm", "pre_feedforward_layernorm"),
        ("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    "parallel": (("input_layernorm", None), None),
}
"""The names of the norms before and after the two parts of a layer, by `LayerKind.norms`."""


def block_of(
    config: ModelConfig, params: Parameters, index: int, attention: Attends | None, mlp: Feeds | ReadsBoth | None
) -> Block:
    """Builds layer `index` from its parts, one of which may be None, and its norms."""
    if params.ranks is not None and attention is not None and mlp is not None:
        assert not isinstance(mlp, ReadsBoth)
        attention, mlp = Summed(attention, params.ranks.group), Summed(mlp, params.ranks.group)

    def norm(name: str) -> Norm:
        return norm_of(config, params, f"model.layers.{index}.{name}")

    places = config.kinds[index].norms
    (first, second), outputs = _NORMS[places]
    before = (
        None if first is None or attention is None else norm(first),
        None if second is None or mlp is None else norm(second),
    )
    behind = None if outputs is None else (norm(outputs[0]), norm(outputs[1]))
    block = Block(attention, mlp, before, behind, config.scales.residuals, parallel=places == "parallel")
    if config.layer_inputs is not None:
        block.inputs = InputOfLayer(config, params, index)
    if config.kinds[index].scaled:
        block.factor = params.tensor((1,), {f"model.layers.{index}.layer_scalar": 1})
    return block


def decoder_blocks(config: ModelConfig, params: Parameters) -> list[Block]:
    """Builds all layers of a decoder."""
    return [
        block_of(config, params, index, mixer(config, params, index), feed_forward(config, params, index))
        for index in range(config.num_hidden_layers)
    ]
