"""The layers that families are built of, under Hugging Face's parameter names."""

from __future__ import annotations

from forebay.layers.attention import Attention
from forebay.layers.decoder import Attends, Block, Feeds
from forebay.layers.indexer import LayerIndexer
from forebay.layers.latent import LatentAttention
from forebay.layers.mlp import SwiGLU
from forebay.layers.moe import MixtureOfExperts
from forebay.layers.norm import RMSNorm
from forebay.layers.params import Parameters
from forebay.layers.ranks import Summed
from forebay.weights.config import ModelConfig
from forebay.weights.parts import Experts, GroupedQuery, Latent


def grouped_attention(config: ModelConfig, params: Parameters, index: int) -> Attention:
    """The attention of layer `index`, whose heads share keys and values."""
    assert isinstance(config.attention, GroupedQuery)
    prefix = f"model.layers.{index}.self_attn"
    rotated = index not in config.unrotated
    return Attention(params, prefix, index, config.hidden_size, config.attention, config.rms_norm_eps, rotated)


def latent_attention(config: ModelConfig, params: Parameters, index: int) -> LatentAttention:
    """The attention of layer `index`, with rows that all heads share. An indexer, if any, chooses the rows."""
    shape, prefix = config.attention, f"model.layers.{index}.self_attn"
    assert isinstance(shape, Latent)
    indexer = None
    if config.indexer is not None and index in config.indexer.layers:
        assert shape.query_rank is not None
        number = config.indexer.layers.index(index)
        at = f"{prefix}.indexer"
        indexer = LayerIndexer(params, at, number, config.hidden_size, shape.query_rank, config.indexer)
    return LatentAttention(params, prefix, index, config.hidden_size, shape, indexer)


def feed_forward(config: ModelConfig, params: Parameters, index: int) -> SwiGLU | MixtureOfExperts:
    """The feed-forward part behind the attention of layer `index`, by the config."""
    feed = config.feed(index)
    prefix = f"model.layers.{index}.mlp"
    if isinstance(feed, Experts):
        return MixtureOfExperts(params, prefix, config.hidden_size, feed)
    return SwiGLU(params, prefix, config.hidden_size, feed.intermediate_size, feed.bias)


def pre_norm(config: ModelConfig, params: Parameters, index: int, attention: Attends, mlp: Feeds) -> Block:
    """Layer `index` with a norm before each of its two parts."""
    prefix = f"model.layers.{index}"
    if params.ranks is not None:
        attention, mlp = Summed(attention, params.ranks.group), Summed(mlp, params.ranks.group)
    return Block(
        attention,
        mlp,
        RMSNorm(params, f"{prefix}.input_layernorm", config.hidden_size, config.rms_norm_eps),
        RMSNorm(params, f"{prefix}.post_attention_layernorm", config.hidden_size, config.rms_norm_eps),
        config.scales.residuals,
    )


def grouped_blocks(config: ModelConfig, params: Parameters) -> list[Block]:
    """All layers of a decoder with grouped-query attention."""
    return [
        pre_norm(config, params, index, grouped_attention(config, params, index), feed_forward(config, params, index))
        for index in range(config.num_hidden_layers)
    ]
