"""The pages of keys and values of all layers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from forebay.attention.backend import LayerKV
from forebay.device import Device
from forebay.state.config import ConfigError, RunnerConfig
from forebay.weights.config import ModelConfig


def page_bytes(model: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page over all layers."""
    return 2 * model.num_hidden_layers * page_size * model.num_key_value_heads * model.head_dim * dtype.itemsize


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
    """Keys and values `[page_count, page_size, kv_heads, head_dim]` of every layer, zero until written."""

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
        if model is None:
            return
        shape = (pages * page_size, model.num_key_value_heads, model.head_dim)
        self.layers = [
            LayerKV(device.zeros(shape, dtype), device.zeros(shape, dtype)) for _ in range(model.num_hidden_layers)
        ]
        self.page_bytes = page_bytes(model, page_size, dtype)
        self.nbytes = pages * self.page_bytes

    def pieces(self) -> list[npt.NDArray[np.uint8]]:
        """The bytes of each page, `[page_count, bytes]` for each layer's keys and values in turn, in host memory."""
        tensors = [tensor for layer in self.layers for tensor in (layer.keys, layer.values)]
        return [tensor.view(torch.uint8).view(self.page_count, -1).numpy() for tensor in tensors]
