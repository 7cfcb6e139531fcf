"""The handshake's `config`, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

import torch

from forebay.state.kv_format import KvFormat
from forebay.weights.called import CalledConfig, Calls
from forebay.weights.config import ModelConfig, config_of
from forebay.weights.encoder_config import EncoderConfig
from forebay.weights.heads import HeadConfig
from forebay.weights.parts import GroupedQuery
from forebay.weights.pooling import Pooling
from forebay.weights.quantization import AUTO, INTEGERS, QUANTIZATIONS
from forebay.weights.ranks import why_not_group, why_not_ranks
from forebay.weights.vision import Preprocessing

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
LOAD_FORMATS = ("auto", "dummy")
ATTENTION_BACKENDS = ("triton", "torch", "fa3")
SAVE_ORDERS = ("behind", "fence", "inline")
MOST_HOT_ROWS = 32767
"""The largest number of hot rows, since row indices are stored as int16."""


class ConfigError(ValueError):
    """The hand does not support a configuration."""


@dataclass(frozen=True)
class PlaceConfig:
    """The memory for adapters."""

    places: int
    rank: int
    """The largest rank."""
    kept: int
    """The number of additional adapters that are kept in host memory."""


@dataclass(frozen=True)
class DraftConfig:
    """A draft model, or a draft head of the model."""

    model: Mapping[str, Any]
    tokens: int
    """The largest number of drafts per row."""


@dataclass(frozen=True)
class RunnerConfig:
    """The hand's configuration, fully resolved. `HandConfig` of crates/protocol describes the fields."""

    model: Mapping[str, Any]
    load_format: str
    device: str
    dtype: torch.dtype
    quantization: str | None
    kv_cache_dtype: KvFormat
    page_size: int
    slots: int
    context_length: int
    chunked_prefill_size: int
    max_running_requests: int
    attention_backend: str | None
    graph_rows: int
    mem_fraction_static: float
    max_total_tokens: int | None
    arena_bytes: int
    rank: int
    world_size: int
    expert_parallel: bool
    step_group: bool
    threads: int | None
    seed: int
    host_bytes: int | None
    host_ratio: float | None
    host_pages: int | None
    host_share: float
    copy_gbps: float | None
    kv_checksum: bool
    hot_row_tokens: int | None
    sparse_top_k: int | None
    image_pool_tokens: int | None
    """The number of positions of all image pages together; None: `image_page_count` chooses it."""
    kv_save_order: str
    state_pages: int | None = None
    """The number of state pages of a model with recurrent layers; None: chosen by the available memory."""
    window_ratio: float | None = None
    """Pages of the window part for each page of the main part; None: all layers share one pool."""
    lora: PlaceConfig | None = None
    """The memory for adapters; None: rows never use adapters."""
    host_lenders: tuple[int | None, ...] = ()
    """Per replica: the descriptor of its host memory if it lends pages to this hand, otherwise None."""
    host_shared: bool = False
    """True if pages are the same on all ranks. The ranks then share one host tier, which the first rank writes."""
    draft: DraftConfig | None = None
    """The draft model or head; None: the hand itself drafts no tokens."""
    host_fits: bool = False
    """True if `host_ratio` is an upper limit: the hand uses as many pages as fit."""
    host_state_pages: int | None = None
    """The number of state pages of the previous hand's host tier, besides `host_pages`."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunnerConfig:
        """Reads a `config` frame's object. Raises `ConfigError` for missing and invalid values."""
        missing = [field.name for field in fields(cls) if field.name not in values and field.default is MISSING]
        if missing:
            raise ConfigError(f"the config lacks {', '.join(missing)}")
        if values["dtype"] not in DTYPES:
            raise ConfigError(f"dtype {values['dtype']!r} is not supported: use {' or '.join(DTYPES)}")
        chosen = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        forms = {form.value: form for form in KvFormat}
        if values["kv_cache_dtype"] == "int8":
            raise ConfigError(
                "kv cache dtype int8 is for the Rust hand on a CPU, and this is PyTorch's hand: leave it off"
            )
        if values["kv_cache_dtype"] not in forms:
            known = " or ".join(name or "null" for name in forms)
            raise ConfigError(f"kv cache dtype {values['kv_cache_dtype']!r} is not supported: use {known}")
        resolved: dict[str, Any] = {"dtype": DTYPES[values["dtype"]], "kv_cache_dtype": forms[values["kv_cache_dtype"]]}
        if chosen.get("lora") is not None:
            resolved["lora"] = PlaceConfig(**chosen["lora"])
        if chosen.get("draft") is not None:
            resolved["draft"] = DraftConfig(**chosen["draft"])
        config = cls(**{**chosen, **resolved})
        if config.load_format not in LOAD_FORMATS:
            raise ConfigError(f"load format {config.load_format!r} is not supported: use {' or '.join(LOAD_FORMATS)}")
        config._check_quantization()
        config._check_kv_cache()
        if config.attention_backend not in (None, *ATTENTION_BACKENDS):
            known = " or ".join(ATTENTION_BACKENDS)
            raise ConfigError(f"attention backend {config.attention_backend!r} is not supported: use {known}")
        config._check_sparse()
        sizes = ("page_size", "slots", "context_length", "chunked_prefill_size", "max_running_requests")
        if min(values[name] for name in sizes) < 1:
            raise ConfigError(f"{', '.join(sizes)} must be at least 1")
        config._check_ranks()
        config._check_called()
        config._check_states()
        config._check_adapters()
        return config

    def _check_states(self) -> None:
        """Rejects options that recurrent layers do not support. The brain rejects them first."""
        model = self.model_config
        if isinstance(model, CalledConfig) and model.state_bytes(self.dtype) and self.has_host_tier:
            raise ConfigError(
                f"transformers' code computes {model.architecture}, for whose states there is no host tier"
            )

    def _check_adapters(self) -> None:
        """Rejects adapters with options that do not support them. The brain rejects these first."""
        if self.lora is None:
            return
        model = self.model_config
        lacks = {
            "a model that pools": self.pooling is not None or isinstance(model, EncoderConfig),
            "transformers' code": isinstance(model, CalledConfig),
            "whole experts by rank": self.expert_parallel,
            "sparse decoding": self.hot_row_tokens is not None,
        }
        for what, wanted in lacks.items():
            if wanted:
                raise ConfigError(f"adapters are not served with {what}")
        if min(self.lora.places, self.lora.rank) < 1 or self.lora.kept < 0:
            raise ConfigError(f"{self.lora}: places and ranks are at least 1")

    def _check_called(self) -> None:
        """Rejects options that models in Transformers' code do not support. The brain rejects them first."""
        model = self.model_config
        if not isinstance(model, CalledConfig):
            return
        lacks = {
            "several ranks": self.world_size > 1,
            f"quantization {self.quantization}": self.quantization not in (None, AUTO),
            f"attention backend {self.attention_backend}": self.attention_backend not in (None, "torch"),
            f"the model format {self.model['format']}": self.model["format"] != "safetensors",
        }
        for what, wanted in lacks.items():
            if wanted:
                raise ConfigError(f"transformers' code computes {model.architecture}, for which there is not {what}")

    def _check_ranks(self) -> None:
        world = self.world_size
        if not 0 <= self.rank < world:
            raise ConfigError(f"rank {self.rank} of {world}")
        if self.step_group and not self.expert_parallel:
            raise ConfigError("the ranks of a step group share experts: experts must be split by rank")
        if world == 1:
            if self.expert_parallel:
                raise ConfigError("experts of a single rank can't be split: leave --ep-size off, or use more ranks")
            return
        if self.quantization not in (None, AUTO):
            raise ConfigError(f"quantization {self.quantization} is for one rank, and there are {world}: leave it off")
        if self.step_group:
            missing = why_not_group(self.model_config, world)
        else:
            missing = why_not_ranks(self.model_config, world, self.expert_parallel)
        if missing is not None:
            raise ConfigError(missing)

    def _check_quantization(self) -> None:
        wanted = self.quantization
        if wanted in (None, AUTO):
            return
        if wanted not in QUANTIZATIONS:
            raise ConfigError(f"quantization {wanted!r} is not supported: use {' or '.join(QUANTIZATIONS)}")
        if wanted in INTEGERS:
            raise ConfigError(
                f"quantization {wanted} is computed by the Rust hand on a CPU, and this is PyTorch's hand: leave it off"
            )

    def _check_kv_cache(self) -> None:
        form = self.kv_cache_dtype
        if form is KvFormat.PLAIN:
            return
        wanted = f"kv cache dtype {form.value}"
        if self.device == "cpu":
            raise ConfigError(f"{wanted} is for a GPU's kernels, and the device is cpu: leave it off")
        model = self.kept_model
        if model is None:
            raise ConfigError(f"{wanted} is for keys and values, and the model keeps none: leave it off")
        heads = model.attention
        if not isinstance(heads, GroupedQuery):
            raise ConfigError(
                f"{wanted} is for keys and values, and {model.architecture} has latent rows: leave it off"
            )
        if self.pooling is not None:
            raise ConfigError(f"{wanted} is for models that generate, and this one pools: leave it off")

    def _check_sparse(self) -> None:
        if self.kv_save_order not in SAVE_ORDERS:
            raise ConfigError(f"save order {self.kv_save_order!r} is not supported: use {' or '.join(SAVE_ORDERS)}")
        if self.hot_row_tokens is None:
            return
        model = self.model_config
        if isinstance(model, EncoderConfig) or model.indexer is None:
            raise ConfigError(
                "sparse decoding from host memory is for models that choose positions by an index, "
                f"and {model.architecture} reads all of them"
            )
        top_k, wanted = model.indexer.top_k, self.sparse_top_k
        if wanted not in (None, top_k):
            raise ConfigError(f"sparse decoding with a top-k of {wanted}: the model chooses {top_k} positions")
        if not top_k <= self.hot_rows <= MOST_HOT_ROWS:
            raise ConfigError(
                f"{self.hot_rows} hot rows are not supported: use {top_k}, as many as the model chooses, "
                f"to {MOST_HOT_ROWS}"
            )
        if not self.has_host_tier:
            raise ConfigError("sparse decoding from host memory needs a host tier")

    @property
    def has_host_tier(self) -> bool:
        """True if the configuration has a host tier."""
        return not (self.host_bytes is None and self.host_ratio is None and self.host_pages is None)

    @property
    def hot_rows(self) -> int:
        """The smallest number of hot rows that a sparse slot needs; 0: slots are never sparse."""
        if self.hot_row_tokens is None:
            return 0
        model = self.model_config
        assert not isinstance(model, EncoderConfig)
        assert model.indexer is not None
        return self.hot_row_tokens or 2 * model.indexer.top_k

    @property
    def row_pages(self) -> int:
        """The number of pages of a sparse slot's hot rows."""
        return -(-self.hot_rows // self.page_size)

    @property
    def model_config(self) -> ModelConfig | EncoderConfig:
        """The configuration of the model."""
        calls, shape = self.model.get("called"), self.model.get("shape")
        if calls is not None:
            return CalledConfig.of(self.model["config"], Calls.from_dict(calls))
        if shape is None:
            raise ConfigError("the config has neither a shape of the model nor the findings of a probe")
        found = config_of(shape)
        if isinstance(found, EncoderConfig):
            return found
        return replace(found, headless=self.pooling is not None)

    @property
    def kept_model(self) -> ModelConfig | None:
        """The model whose KV cache this rank stores, with this rank's heads. None: the model has no KV cache."""
        model = self.model_config
        if isinstance(model, EncoderConfig) or model.both_ways:
            return None
        heads_of = 1 if self.step_group else self.world_size
        kept, head = replace(model, attention=model.attention.of_rank(heads_of)), self.head
        return kept if head is None else head.kept_with(kept)

    @property
    def head(self) -> HeadConfig | None:
        """The head that drafts from the model's features; None: there is none."""
        return None if self.draft is None else HeadConfig.of(self.draft.model)

    @property
    def pooling(self) -> Pooling | None:
        """How the model pools; None: it generates."""
        values = self.model.get("pooling")
        return None if values is None else Pooling.from_dict(values)

    @property
    def images(self) -> Preprocessing | None:
        """The conversion of images to patches; None: the model takes no images."""
        values = self.model.get("images")
        return None if values is None else Preprocessing.from_dict(values)

    @property
    def prompt_tokens(self) -> int:
        """The most prompt tokens of a step: a chunk, and the rest of an image that the chunk must not split."""
        model, images = self.model_config, self.images
        is_whole = isinstance(model, ModelConfig) and model.whole_images
        rest = images.most_positions - 1 if is_whole and images is not None else 0
        return self.chunked_prefill_size + rest

    @property
    def pages_per_slot(self) -> int:
        """The number of pages of a whole context."""
        return -(-self.context_length // self.page_size)
