"""The pages of keys and values of all layers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from forebay.attention.backend import LayerKV
from forebay.device import Device
from forebay.state.config import ConfigError, RunnerConfig
from forebay.weights.config import ModelConfig
from forebay.weights.parts import Latent


def page_bytes(model: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page over all layers."""
    return model.num_hidden_layers * page_size * model.attention.position_elements * dtype.itemsize


def page_count(config: RunnerConfig, model: ModelConfig, available_bytes: int, weight_bytes: int) -> int:
    """Pages to allocate: a fixed number of tokens, or what fits the share of memory that weights leave.

    `available_bytes` is what was free before the weights were allocated, `weight_bytes` what they take when steps are
    computed. While they are loaded and packed it may be more, but then the pool's memory is not taken yet. More than
    every slot can fill is never taken from memory; a fixed number is taken as it is.
    """
    if config.max_total_tokens is not None:
        count = config.max_total_tokens // config.page_size
    else:
        budget = int(config.mem_fraction_static * available_bytes) - weight_bytes
        fitting = budget // page_bytes(model, config.page_size, config.dtype)
        count = min(fitting, config.slots * config.pages_per_slot)
    if count < 1:
        raise ConfigError(
            f"no memory for a single page of {config.page_size} tokens: "
            f"{weight_bytes >> 20} MiB of weights, {available_bytes >> 20} MiB available, "
            f"mem_fraction_static {config.mem_fraction_static}, max_total_tokens {config.max_total_tokens}"
        )
    return count


class KvPool:
    """What all layers keep of positions, zero until written.

    Keys and values `[page_count, page_size, kv_heads, head_dim]` are a pool each, two a layer. Latent rows of all
    layers are one pool `[page_count, layers, page_size, row]`: a page is one contiguous piece.
    """

    def __init__(
        self, model: ModelConfig | None, pages: int, page_size: int, dtype: torch.dtype, device: Device
    ) -> None:
        """`model` None: a pool of nothing, for a model that keeps nothing."""
        self.page_count = pages
        self.page_size = page_size
        self.dtype = dtype
        self.layers: list[LayerKV] = []
        self.nbytes = 0
        self.page_bytes = 0
        """Bytes of a page over all layers."""
        self.page_stride = page_size
        """Entries of `LayerKV` from a page's first to that of the next."""
        self._pools: list[torch.Tensor] = []
        if model is None:
            return
        layers, attention = model.num_hidden_layers, model.attention
        if isinstance(attention, Latent):
            self._pools = [device.zeros((pages * layers * page_size, attention.position_elements), dtype)]
            self.layers = _of_rows(self._pools[0], layers, page_size, attention.rank)
            self.page_stride = layers * page_size
        else:
            shape = (pages * page_size, attention.kv_heads, attention.head_dim)
            self.layers = [LayerKV(device.zeros(shape, dtype), device.zeros(shape, dtype)) for _ in range(layers)]
            self._pools = [tensor for layer in self.layers for tensor in (layer.keys, layer.values)]
        self.page_bytes = page_bytes(model, page_size, dtype)
        self.nbytes = pages * self.page_bytes

    def pieces(self) -> list[npt.NDArray[np.uint8]]:
        """The bytes of each page, `[page_count, bytes]` for each pool in turn, in host memory."""
        return [pool.view(torch.uint8).view(self.page_count, -1).numpy() for pool in self._pools]


def _of_rows(pool: torch.Tensor, layers: int, page_size: int, rank: int) -> list[LayerKV]:
    """Each layer's part of a pool of rows: it begins at the layer's rows of page 0, so entries are those of page 0 too.

    Rows are one head's keys, and its values are their first `rank` elements (`LayerKV`).
    """
    rows = [pool[layer * page_size :, None] for layer in range(layers)]
    return [LayerKV(keys, keys[..., :rank]) for keys in rows]
