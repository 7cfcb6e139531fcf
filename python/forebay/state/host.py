"""The host's tier: pages of keys and values in memory that outlives this process, and those of other replicas.

The brain makes the memory, an anonymous file, and the hand chooses its size. A page of all layers is one piece: its
main part, then its index part if it has one, in the device's order. So copies of whole pages need not know the order
inside. Behind the pages there is a checksum for each.
"""

from __future__ import annotations

import mmap
import os
import zlib

import numpy as np
import numpy.typing as npt
import torch

from forebay.state.config import ConfigError, RunnerConfig
from forebay.state.pages import KvPool

CHECKSUM_BYTES = 4

Bytes = npt.NDArray[np.uint8]


def asked_pages(config: RunnerConfig, pages: int, page_bytes: int) -> int:
    """The requested number of pages of the host's tier, beside so many of the device; 0: none.

    Raises `ConfigError` if the request is less than a page of `page_bytes`.
    """
    if config.host_pages is not None:
        # What an earlier hand was given: its blocks are there.
        return config.host_pages
    if config.host_bytes is not None:
        asked = config.host_bytes // page_bytes
    elif config.host_ratio is not None:
        asked = int(config.host_ratio * pages)
    else:
        return 0
    if asked < 1:
        wanted = f"{config.host_ratio} of the pages" if config.host_bytes is None else f"{config.host_bytes} bytes"
        raise ConfigError(f"a host tier of {wanted} holds no page of {page_bytes} bytes")
    return asked


def host_page_count(config: RunnerConfig, kv: KvPool, available_bytes: int) -> int:
    """The number of pages of the host's tier, 0 without one.

    `available_bytes` is the free memory beside weights and pages of the device. Raises `ConfigError` if it is not
    enough for the request, or the request is less than a page.
    """
    if config.host_bytes is None and config.host_ratio is None and config.host_pages is None:
        return 0
    if not kv.layers:
        raise ConfigError("the model keeps no keys and values, so a host tier has nothing to hold: leave it off")
    pages = asked_pages(config, kv.page_count, kv.page_bytes)
    if config.host_pages is not None:
        return pages
    size = pages * kv.page_bytes
    most = int(config.host_share * available_bytes)
    if size > most:
        raise ConfigError(
            f"a host tier of {size / 1e9:.1f} GB does not fit: {available_bytes / 1e9:.1f} GB are available "
            f"beside weights and KV pool, of which it may take {config.host_share:.0%}; choose --hicache-size "
            "or a smaller KV pool"
        )
    return pages


class LentPages:
    """The pages of another replica's host tier, `[pages, page_bytes]` of bytes, which are only read."""

    def __init__(self, descriptor: int, page_bytes: int) -> None:
        """Maps the file behind `descriptor`, which a hand with pages of the same form has made as long as they are."""
        size = os.fstat(descriptor).st_size
        pages = size // (page_bytes + CHECKSUM_BYTES)
        if not pages or size % (page_bytes + CHECKSUM_BYTES):
            raise ValueError(f"{size} bytes of a lender are no pages of {page_bytes}")
        mapped = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self.pages, self._checksums = _divided(np.frombuffer(mapped, np.uint8), pages, page_bytes)

    def is_sealed(self, page: int) -> bool:
        """True if a page has the content of its checksum."""
        return bool(self._checksums[page] == zlib.crc32(self.pages[page].data))


class HostPool:
    """The host's pages, `[pages, page_bytes]` of bytes, in the brain's memory."""

    def __init__(self, descriptor: int, pages: int, page_bytes: int, page_size: int) -> None:
        """Maps the file behind `descriptor`, which stays the caller's; it grows if it is too small."""
        size = pages * (page_bytes + CHECKSUM_BYTES)
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)
        mapped = np.frombuffer(mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED), np.uint8)
        self.pages, self._checksums = _divided(mapped, pages, page_bytes)
        self._page_size = page_size
        self._parts: dict[int, set[int]] = {}

    def rows(self, kv: KvPool) -> list[torch.Tensor]:
        """The main part of all pages as rows, `[pages, page_size, width]` for each layer, if it is one pool of rows."""
        (pool,) = kv.main.pools
        layers = kv.main.page_stride // kv.page_size
        elements = kv.main.page_bytes // pool.itemsize
        main = torch.from_numpy(self.pages).view(pool.dtype)[:, :elements]
        return list(main.unflatten(1, (layers, kv.page_size, -1)).unbind(1))

    def seal(self, page: int, first: int, count: int) -> None:
        """Notes the checksum of a page after a save of these positions, once all positions are saved."""
        if count < self._page_size:
            saved = self._parts.setdefault(page, set())
            if first == 0:
                saved.clear()
            saved.update(range(first, first + count))
            if len(saved) < self._page_size:
                return
        self._parts.pop(page, None)
        self._checksums[page] = zlib.crc32(self.pages[page].data)

    def is_sealed(self, page: int) -> bool:
        """True if a page has the content of its checksum."""
        return bool(self._checksums[page] == zlib.crc32(self.pages[page].data))


def _divided(mapped: Bytes, pages: int, page_bytes: int) -> tuple[Bytes, npt.NDArray[np.uint32]]:
    """The pages of a host tier, and their checksums."""
    end = pages * page_bytes
    return mapped[:end].reshape(pages, page_bytes), mapped[end:].view(np.uint32)
