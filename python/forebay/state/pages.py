"""The KV cache pages of all layers, and the pages of index keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from forebay.attention.backend import LayerKV
from forebay.device import Device
from forebay.state.config import ConfigError, RunnerConfig
from forebay.state.kv_format import KvFormat
from forebay.state.windows import WindowLayers, kept_in_window, window_numbers
from forebay.weights.called import CalledConfig
from forebay.weights.config import ModelConfig
from forebay.weights.parts import Latent

Shape: TypeAlias = tuple[int, ...]


def page_bytes(model: ModelConfig, page_size: int, dtype: torch.dtype, form: KvFormat = KvFormat.PLAIN) -> int:
    """Returns the bytes of a page over all layers, index keys included. `form`: the format of keys and values."""
    if isinstance(model, CalledConfig):
        return page_size * sum(shape.elements for shape in model.kept) * dtype.itemsize
    features = page_size * model.features * dtype.itemsize
    if form is not KvFormat.PLAIN:
        entries = [form.entry(heads, dtype) for heads in model.kept_heads]
        return features + 2 * page_size * sum(math.prod(shape) * kept.itemsize for shape, kept in entries)
    if isinstance(model.attention, Latent):
        elements = model.attending_layers * model.attention.position_elements
    else:
        elements = sum(heads.position_elements for heads in model.kept_heads)
    if model.indexer is not None:
        elements += model.indexer.position_elements
    return features + page_size * elements * dtype.itemsize


def part_bytes(config: RunnerConfig, model: ModelConfig, windows: WindowLayers) -> tuple[int, int]:
    """Returns the bytes of a page of the main part, with the index part, and of a page of the window part."""
    whole = page_bytes(model, config.page_size, config.dtype, config.kv_cache_dtype)
    if windows.ratio is None:
        return whole, 0
    heads = zip(model.kept_heads, kept_in_window(model, windows), strict=True)
    elements = sum(one.position_elements for one, in_window in heads if in_window)
    of_window = config.page_size * elements * config.dtype.itemsize
    return whole - of_window, of_window


def page_count(config: RunnerConfig, model: ModelConfig, available_bytes: int, weight_bytes: int) -> int:
    """Returns the number of pages to allocate: for the given number of tokens, or for the memory besides the weights.

    With a window part, it is the number of the main part's pages, with memory left for the window part.

    `available_bytes` is the free memory before the weights were allocated. `weight_bytes` is the memory of weights in
    steps, plus the memory of the steps themselves if it was measured. Loading may take more, but that memory is free
    again when the pool is allocated. The number derived from memory is at most what all slots can fill. A given number
    may be larger, if it fits into memory.
    """
    windows = WindowLayers.of(config, model)
    a_page, most = part_bytes(config, model, windows), _most_pages(config)
    if config.max_total_tokens is not None:
        count = config.max_total_tokens // config.page_size
        free, taken = max(available_bytes - weight_bytes, 0), windows.nbytes(count, a_page)
        if available_bytes and taken > free:
            raise ConfigError(
                f"max_total_tokens {config.max_total_tokens}: keys and values of so many tokens take "
                f"{taken / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free beside the weights: "
                f"at most {windows.fitting(free, count, a_page) * config.page_size} tokens"
            )
    else:
        # If all layers are recurrent, pages take no memory.
        budget = max(int(config.mem_fraction_static * available_bytes) - weight_bytes, 0)
        count = windows.fitting(budget, most, a_page)
    if count < 1:
        raise ConfigError(
            f"no memory for a single page of {config.page_size} tokens: "
            f"{weight_bytes >> 20} MiB of weights and of what a step takes, {available_bytes >> 20} MiB available, "
            f"mem_fraction_static {config.mem_fraction_static}, max_total_tokens {config.max_total_tokens}"
        )
    return count


def _most_pages(config: RunnerConfig) -> int:
    """Returns the number of pages that all slots can fill."""
    return config.slots * config.pages_per_slot


@dataclass(frozen=True)
class Part:
    """A part of the pages, with separate page numbers and a separate page table."""

    pools: tuple[torch.Tensor, ...]
    """The pools. In each pool, a page is contiguous."""
    page_count: int
    page_bytes: int
    """The bytes of a page over all layers."""
    page_stride: int
    """The number of a layer's entries from the first entry of a page to the first entry of the next page."""

    def pieces(self) -> list[torch.Tensor]:
        """Returns the bytes of each page, uint8 `[page_count, bytes]` per pool."""
        return [pool.view(torch.uint8).view(self.page_count, -1) for pool in self.pools]


class KvPool:
    """The keys and values of positions in all layers, zero at first.

    The main part has keys and values, or latent rows, and the null page after the other pages. Each layer with its own
    keys and values has two pools, `[page_count + 1, page_size, *entry]`; `KvFormat` defines the entry. The rows of all
    latent layers are in one pool, `[page_count + 1, layers, page_size, row]`, so a page is contiguous. The index keys,
    `[pages, indexed layers, page_size, head_dim]`, are the index part. The features from which a head drafts are a pool
    of the main part, `[page_count + 1, page_size, hidden]`. The pools of layers with a window may be a separate window
    part, `[window pages, page_size, *entry]`.
    """

    def __init__(
        self,
        model: ModelConfig | None,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: Device,
        index_pages: int | None = None,
        form: KvFormat = KvFormat.PLAIN,
        windows: WindowLayers | None = None,
    ) -> None:
        """`model` None: an empty pool, for a model without keys and values.

        `index_pages`: the number of pages of the index part, if they have separate numbers. The *null page* follows the
        pages of the main part and receives writes that are never read; it begins at entry `nowhere`. `form`: the format
        of keys and values. `dtype`: the model's type. `windows` None: no layer has a window.
        """
        self.page_size = page_size
        self.dtype = dtype
        self.form = form
        self.layers: list[LayerKV] = []
        self.index_keys: list[torch.Tensor] = []
        """The index keys of each indexed layer, [entries, head_dim]; none without an index."""
        self.features: torch.Tensor | None = None
        """The features of positions, [entries, hidden]; None: no head drafts from them."""
        self.main = Part((), pages, 0, page_size)
        self.backed = index_pages is not None
        """True if index pages have the numbers of host pages."""
        self.index: Part | None = None
        """The index part; None: queries attend to their whole context."""
        self.window: Part | None = None
        """The window part; None: all layers share one pool."""
        self.window_layers: frozenset[int] = frozenset()
        """The layers with pages in the window part, as indices into `layers`."""
        self.longest_window = 0
        """The largest number of positions that a query of `window_layers` attends to, its own included."""
        if model is None:
            return
        attention = model.attention
        if isinstance(model, CalledConfig):
            self._keep([((one.heads, one.key_size), (one.heads, one.value_size)) for one in model.kept], dtype, device)
        elif isinstance(attention, Latent):
            layers = model.attending_layers
            self.main, rows = _rows(pages, layers, page_size, attention.position_elements, dtype, device, one_more=True)
            # Each row is the key of a single head, and the first elements of the row are the value.
            keys = [of_layer[:, None] for of_layer in rows]
            self.layers = [LayerKV(of_layer, of_layer[..., : attention.rank]) for of_layer in keys]
        else:
            entries = [form.entry(heads, dtype) for heads in model.kept_heads]
            kept = entries[0][1] if entries else dtype
            if windows is None or windows.ratio is None:
                self._keep([(entry, entry) for entry, _ in entries], kept, device)
            else:
                self._keep_apart([entry for entry, _ in entries], kept, device, model, windows)
            self.layers = _shared(self.layers, model)
        if model.features:
            self._keep_features(model.features, dtype, device)
        if model.indexer is not None:
            indexed, width = len(model.indexer.layers), model.indexer.head_dim
            count = pages if index_pages is None else index_pages
            # Index pages with separate numbers have the numbers of host pages, and no host page is a null page.
            one_more = index_pages is None
            self.index, self.index_keys = _rows(count, indexed, page_size, width, dtype, device, one_more)

    def _keep(self, entries: Sequence[tuple[Shape, Shape]], dtype: torch.dtype, device: Device) -> None:
        """Allocates pools of keys and values per layer; `entries` are the shapes of a position's key and value."""
        pages, rows = self.main.page_count, (self.main.page_count + 1) * self.page_size
        self.layers = [LayerKV(*(device.zeros((rows, *entry), dtype) for entry in pair)) for pair in entries]
        pools = tuple(tensor[: pages * self.page_size] for layer in self.layers for tensor in layer)
        self.main = Part(pools, pages, sum(pool.nbytes for pool in pools) // pages, self.page_size)

    def _keep_apart(
        self, entries: Sequence[Shape], dtype: torch.dtype, device: Device, model: ModelConfig, windows: WindowLayers
    ) -> None:
        """Allocates pools of keys and values per layer. Pools of layers with a window go to the window part."""
        in_window = kept_in_window(model, windows)
        numbers = [at for at, inside in enumerate(in_window) if inside]
        others = [at for at, inside in enumerate(in_window) if not inside]
        self._keep([(entries[at], entries[at]) for at in others], dtype, device)
        pages = windows.count(self.page_count)
        rows = pages * self.page_size
        layers = dict(zip(others, self.layers, strict=True))
        for at in numbers:
            layers[at] = LayerKV(*(device.zeros((rows, *entries[at]), dtype) for _ in range(2)))
        pools = tuple(tensor for at in numbers for tensor in layers[at])
        self.window = Part(pools, pages, sum(pool.nbytes for pool in pools) // pages, self.page_size)
        self.window_layers = window_numbers(model, windows)
        self.longest_window = windows.window
        self.layers = [layers[at] for at in range(len(entries))]

    def _keep_features(self, width: int, dtype: torch.dtype, device: Device) -> None:
        """Allocates the pool of features with `width` elements, as an additional pool of the main part."""
        main, entries = self.main, self.page_count * self.page_size
        self.features = device.zeros((entries + self.page_size, width), dtype)
        pool = self.features[:entries]
        page_bytes = main.page_bytes + self.page_size * width * dtype.itemsize
        self.main = replace(main, pools=(*main.pools, pool), page_bytes=page_bytes)

    def feature_entries(self, entries: torch.Tensor) -> torch.Tensor:
        """Returns the entries of features for the entries of a layer, int64 [n]."""
        stride = self.main.page_stride
        if stride == self.page_size:
            return entries
        return entries // stride * self.page_size + entries % stride

    @property
    def nowhere(self) -> int:
        """The first entry of the null page, in each layer."""
        return self.page_count * self.main.page_stride

    @property
    def parts(self) -> list[Part]:
        """The parts of a page, in the order in which the host tier stores them."""
        return [self.main] if self.index is None else [self.main, self.index]

    @property
    def page_count(self) -> int:
        """The number of pages of the main part."""
        return self.main.page_count

    @property
    def page_bytes(self) -> int:
        """Bytes of a page over all layers and parts, except for the window part."""
        return sum(part.page_bytes for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        parts = self.parts if self.window is None else [*self.parts, self.window]
        return sum(part.page_count * part.page_bytes for part in parts)


def _shared(own: Sequence[LayerKV], model: ModelConfig) -> list[LayerKV]:
    """Returns the pages of each layer with attention, given those of the layers with separate keys and values."""
    of_layer: dict[int, LayerKV] = {}
    left = iter(own)
    for layer, kind in enumerate(model.kinds):
        if not model.attends or model.attends[layer]:
            of_layer[layer] = next(left) if kind.keys_of is None else of_layer[kind.keys_of]
    return list(of_layer.values())


def _rows(
    pages: int,
    layers: int,
    page_size: int,
    width: int,
    dtype: torch.dtype,
    device: Device,
    one_more: bool = False,
) -> tuple[Part, list[torch.Tensor]]:
    """Allocates a pool `[pages, layers, page_size, width]`. Returns it, and views of it per layer, [entries, width].

    A layer's view begins at its first row, so entries are the same for all layers. `one_more`: allocates an additional
    page at the end.
    """
    stride = layers * page_size
    pool = device.zeros(((pages + one_more) * stride, width), dtype)
    part = Part((pool[: pages * stride],), pages, stride * width * dtype.itemsize, stride)
    return part, [pool[layer * page_size :] for layer in range(layers)]
