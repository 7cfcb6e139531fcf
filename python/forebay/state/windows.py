"""The window part: separate pages for layers with a window, which read only the last positions of a request."""

from __future__ import annotations

import math
from dataclasses import dataclass

from forebay.state.config import RunnerConfig
from forebay.state.kv_format import KvFormat
from forebay.weights.called import CalledConfig
from forebay.weights.config import ModelConfig
from forebay.weights.parts import LayerKind


@dataclass(frozen=True)
class WindowLayers:
    """The layers of a model whose window is shorter than the context, and the size of the window part."""

    window: int
    """The longest window of these layers; 0: there are none."""
    ratio: float | None
    """Pages of the window part for each page of the main part; None: all layers share one pool."""
    one_pool: str
    """The reason why all layers share one pool although separate pages were requested; otherwise empty."""
    page_size: int
    context_length: int

    @classmethod
    def of(cls, config: RunnerConfig, model: ModelConfig | None) -> WindowLayers:
        """Finds the model's layers with a window, and sizes their part. `model` None: it keeps no keys and values."""
        kinds = () if model is None or isinstance(model, CalledConfig) else _attending(model)
        windows = [kind.window for kind in kinds if kind.window is not None and kind.window < config.context_length]
        asked, why = config.window_ratio, ""
        if windows and asked is not None:
            why = _why_one_pool(config, model)
        ratio = None if not windows or why else asked
        return cls(max(windows, default=0), ratio, why, config.page_size, config.context_length)

    def holds(self, kind: LayerKind) -> bool:
        """True if a layer of this kind has pages in the window part."""
        return self.ratio is not None and kind.window is not None and kind.window < self.context_length

    @property
    def least(self) -> int:
        """The fewest pages with which a request that runs alone can continue.

        These are the pages that a position reads, the page that it is written to, and a page that is no longer read but
        not free yet.
        """
        return -(-(self.window - 1) // self.page_size) + 2

    def count(self, pages: int) -> int:
        """Returns the page count of the window part for a page count of the main part; 0 without a window part."""
        return 0 if self.ratio is None else min(max(math.ceil(pages * self.ratio), self.least), pages)

    def nbytes(self, pages: int, a_page: tuple[int, int]) -> int:
        """Returns the bytes of this many main-part pages with the window part; `a_page`: bytes of one page of each."""
        return pages * a_page[0] + self.count(pages) * a_page[1]

    def fitting(self, free_bytes: int, most: int, a_page: tuple[int, int]) -> int:
        """Returns the most main-part pages, up to `most`, that fit into this many bytes with the window part."""
        fits, too_many = 0, most + 1
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self.nbytes(middle, a_page) <= free_bytes:
                fits = middle
            else:
                too_many = middle
        return fits


def _attending(model: ModelConfig) -> list[LayerKind]:
    """Returns the kinds of the layers with attention."""
    return [kind for layer, kind in enumerate(model.kinds) if not model.attends or model.attends[layer]]


def window_numbers(model: ModelConfig, windows: WindowLayers) -> frozenset[int]:
    """Returns the layers with pages in the window part, as indices among the layers with attention."""
    return frozenset(number for number, kind in enumerate(_attending(model)) if windows.holds(kind))


def kept_in_window(model: ModelConfig, windows: WindowLayers) -> list[bool]:
    """Returns, for each layer of `kept_heads`, in order: true if its keys and values are in the window part."""
    return [windows.holds(kind) for kind in _attending(model) if kind.keys_of is None]


def _why_one_pool(config: RunnerConfig, model: ModelConfig | None) -> str:
    """Returns the reason why layers with a window have no separate pages; empty if they have."""
    assert model is not None
    of_device = config.attention_backend or ("triton" if config.device == "cuda" else "torch")
    shared = [(kind, model.kinds[kind.keys_of]) for kind in model.kinds if kind.keys_of is not None]
    reasons = {
        f"the kernels of attention backend {of_device} read one table of pages": of_device != "torch",
        "there are several ranks": config.world_size > 1,
        "blocks of the host tier are whole pages": config.has_host_tier,
        "its recurrent layers keep states beside the pages": bool(model.recurrent),
        "it pools": config.pooling is not None,
        "positions of an image see each other": model.whole_images,
        "another model drafts, or a head does": config.draft is not None,
        "its keys and values have 8 bits": config.kv_cache_dtype is not KvFormat.PLAIN,
        "layers with a window share keys and values with others": any(
            (one.window is None) != (other.window is None) for one, other in shared
        ),
    }
    return next((why for why, holds in reasons.items() if holds), "")
