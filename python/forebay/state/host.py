"""The host's tier: pages of keys and values in memory that outlives this process.

The brain makes the memory, an anonymous file, and the hand says how large it is to be. A page of all layers is one
piece: its main part, then its index part if it has one, as they lie on the device. Whoever copies whole pages need not
know the order inside of one. Behind the pages there is room for a checksum each.
"""

from __future__ import annotations

import mmap
import os
import zlib

import numpy as np
import numpy.typing as npt

from forebay.state.config import ConfigError, RunnerConfig
from forebay.state.pages import KvPool

CHECKSUM_BYTES = 4

Bytes = npt.NDArray[np.uint8]


def host_page_count(config: RunnerConfig, kv: KvPool, available_bytes: int) -> int:
    """Pages of the host's tier, 0 without one.

    `available_bytes` is what is free when weights and pages of the device have taken theirs. Raises `ConfigError` when
    there is not enough for what was asked for, or it is less than a page.
    """
    if config.host_bytes is None and config.host_ratio is None and config.host_pages is None:
        return 0
    if not kv.layers:
        raise ConfigError("the model keeps no keys and values, so a host tier has nothing to hold: leave it off")
    if config.host_pages is not None:
        # What an earlier hand was given: its blocks are there.
        return config.host_pages
    if config.host_bytes is not None:
        pages = config.host_bytes // kv.page_bytes
    else:
        assert config.host_ratio is not None
        pages = int(config.host_ratio * kv.page_count)
    size = pages * kv.page_bytes
    if pages < 1:
        wanted = f"{config.host_ratio} of the pages" if config.host_bytes is None else f"{config.host_bytes} bytes"
        raise ConfigError(f"a host tier of {wanted} holds no page of {kv.page_bytes} bytes")
    most = int(config.host_share * available_bytes)
    if size > most:
        raise ConfigError(
            f"a host tier of {size / 1e9:.1f} GB does not fit: {available_bytes / 1e9:.1f} GB are available "
            f"beside weights and KV pool, of which it may take {config.host_share:.0%}; choose --hicache-size "
            "or a smaller KV pool"
        )
    return pages


class HostPool:
    """The host's pages, `[pages, page_bytes]` of bytes, in the brain's memory."""

    def __init__(self, descriptor: int, pages: int, page_bytes: int) -> None:
        """Maps the file behind `descriptor`, which stays the caller's; it grows if it is too small."""
        size = pages * (page_bytes + CHECKSUM_BYTES)
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)
        mapped = np.frombuffer(mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED), np.uint8)
        self.pages: Bytes = mapped[: pages * page_bytes].reshape(pages, page_bytes)
        self._checksums = mapped[pages * page_bytes :].view(np.uint32)

    def seal(self, page: int) -> None:
        """Notes the checksum of a page."""
        self._checksums[page] = zlib.crc32(self.pages[page].data)

    def is_sealed(self, page: int) -> bool:
        """Whether a page is as it was when its checksum was noted."""
        return bool(self._checksums[page] == zlib.crc32(self.pages[page].data))
