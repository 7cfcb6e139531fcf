"""The number of pages of each part if slots may be sparse (HiSparse, SGLang #21932).

Every page of a request then also has a host page. The host page's number is also the number of the page with its index
keys. So the index part has as many pages as the host tier, and the main part gets the remaining memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from forebay.state.config import ConfigError, RunnerConfig
from forebay.state.host import asked_pages
from forebay.state.hot_rows import HotRows
from forebay.state.pages import page_bytes, page_count
from forebay.weights.config import ModelConfig

GROWTH_PAGES = 4
"""The pages of a sparse request besides those of its hot rows: its last pages, and room to grow."""


@dataclass(frozen=True)
class Sizes:
    """The page counts to allocate."""

    pages: int
    """The number of pages of the main part."""
    index_pages: int | None
    """The number of pages of the index part; None: the same pages as the main part."""

    @classmethod
    def of(cls, config: RunnerConfig, model: ModelConfig, available_bytes: int, weight_bytes: int) -> Sizes:
        """Returns the sizes for the arguments of `page_count`. Raises `ConfigError` if there is too little memory."""
        if not config.hot_rows:
            return cls(page_count(config, model, available_bytes, weight_bytes), None)
        assert model.indexer is not None
        whole = page_bytes(model, config.page_size, config.dtype)
        index = config.page_size * model.indexer.position_elements * config.dtype.itemsize
        main = whole - index
        if config.max_total_tokens is not None:
            pages = config.max_total_tokens // config.page_size
        else:
            # The null page is in addition to the count.
            taken = weight_bytes + HotRows.bytes_of(config, model) + main
            budget = int(config.mem_fraction_static * available_bytes) - taken
            fixed = config.host_pages is not None or config.host_bytes is not None
            if fixed:
                pages = (budget - index * asked_pages(config, 0, whole)) // main
            else:
                assert config.host_ratio is not None
                pages = int(budget / (main + config.host_ratio * index))
            pages = min(pages, config.slots * config.pages_per_slot)
        least = config.row_pages + GROWTH_PAGES
        if pages < least:
            raise ConfigError(
                f"{max(pages, 0)} pages of {config.page_size} tokens on the device are too few for sparse decoding: "
                f"a request with {config.hot_rows} hot rows needs {least}; choose fewer hot rows or a larger KV pool"
            )
        return cls(pages, asked_pages(config, pages, whole))
