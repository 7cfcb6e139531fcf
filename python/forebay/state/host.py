"""The host tier: pages of keys and values in memory that outlives this process, and pages of other replicas.

The brain creates the memory, an anonymous file, and the hand sets its size. A host page contains all layers
contiguously: its main part, then its index part if it has one. The order of the bytes is that of the device, so a whole
page is copied without regard to its layout. The checksums of all pages follow. Then come state pages with the states of
recurrent layers, and a checksum and a position count for each of them. The number of state pages is last.
"""

from __future__ import annotations

import mmap
import os
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from forebay.state.config import ConfigError, RunnerConfig
from forebay.state.pages import KvPool

CHECKSUM_BYTES = 4
STATE_NOTE_WORDS = 2
"""The words per state besides its bytes: a checksum, and the number of positions that the state includes."""
COUNT_BYTES = 8
"""The bytes of the number of state pages, at the end of a file with state pages."""

Bytes = npt.NDArray[np.uint8]
_Words: TypeAlias = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class HostCounts:
    """The page counts of a host tier; both 0: there is no host tier."""

    pages: int = 0
    state_pages: int = 0

    def agreed(self, least: Callable[[int], int]) -> HostCounts:
        """Returns the page counts for all ranks of a group, because the brain uses the same pages on all ranks.

        `least` returns the minimum over all ranks.
        """
        return HostCounts(least(self.pages), least(self.state_pages))


@dataclass(frozen=True)
class PageSizes:
    """The bytes of a page over all layers, and of a state; 0: the model has no states."""

    page: int
    state: int = 0

    @property
    def of_page(self) -> int:
        """The bytes of a page with its checksum."""
        return self.page + CHECKSUM_BYTES

    @property
    def of_state(self) -> int:
        """The bytes of a state with its checksum and position count."""
        return self.state + 4 * STATE_NOTE_WORDS

    def file_bytes(self, counts: HostCounts) -> int:
        """Returns the length of a file with this many pages."""
        states = counts.state_pages * self.of_state + COUNT_BYTES if self.state else 0
        return counts.pages * self.of_page + states


def asked_pages(config: RunnerConfig, pages: int, page_bytes: int, device_bytes: int | None = None) -> int:
    """Returns the configured number of host pages for a device with `pages` pages; 0: no host tier.

    `device_bytes`: the bytes of all kinds of pages on the device; None: there is only one kind, and a configured
    size in bytes is for this kind. Raises `ConfigError` if the configured size is less than a page of `page_bytes`.
    """
    if config.host_pages is not None:
        # A restarted hand keeps the page count of its predecessor, whose blocks are still in the memory.
        return config.host_pages
    if config.host_bytes is not None and device_bytes is None:
        asked = config.host_bytes // page_bytes
    elif config.host_bytes is not None or config.host_ratio is not None:
        asked = _asked(config, pages, device_bytes or 0)
    else:
        return 0
    if asked < 1:
        raise ConfigError(f"a host tier of {_size_asked(config)} holds no page of {page_bytes} bytes")
    return asked


def host_counts(config: RunnerConfig, kv: KvPool, states: tuple[int, int], available_bytes: int) -> HostCounts:
    """Returns the page counts of the host tier.

    `states`: the number and the bytes of the device's state pages. KV pages and state pages share the tier in the same
    proportion as the device's memory. `available_bytes` is the free memory besides weights and pages of the device.
    Raises `ConfigError` if the configured size does not fit into that memory, or is less than a page.
    """
    if config.host_bytes is None and config.host_ratio is None and config.host_pages is None:
        return HostCounts()
    if not kv.layers:
        raise ConfigError("the model keeps no keys and values, so a host tier has nothing to hold: leave it off")
    if config.host_pages is not None:
        # A restarted hand keeps the page counts of its predecessor, whose blocks are still in the memory.
        return HostCounts(config.host_pages, config.host_state_pages or 0)
    state_pages, state_bytes = states
    device = kv.page_count * kv.page_bytes + state_pages * state_bytes
    most = int(config.host_share * available_bytes)
    if config.host_fits and config.host_ratio is not None and config.host_ratio * device > most:
        most = max(most, 0)
        print(
            f"the host tier has {most / device:.2f} pages for each page of the device: more do not fit into the "
            f"{most / 1e9:.1f} GB that it may take",
            file=sys.stderr,
        )
        config = replace(config, host_bytes=most)
    pages, wanted = asked_pages(config, kv.page_count, kv.page_bytes, device), 0
    if state_pages:
        wanted = _asked(config, state_pages, device)
        if wanted < 1:
            raise ConfigError(f"a host tier of {_size_asked(config)} holds no state of {state_bytes} bytes")
    size = pages * kv.page_bytes + wanted * state_bytes
    if size > most:
        raise ConfigError(
            f"a host tier of {size / 1e9:.1f} GB does not fit: {available_bytes / 1e9:.1f} GB are available "
            f"beside weights and KV pool, of which it may take {config.host_share:.0%}; choose --hicache-size "
            "or a smaller KV pool"
        )
    return HostCounts(pages, wanted)


def _asked(config: RunnerConfig, pages: int, device_bytes: int) -> int:
    """Returns the configured number of host pages for `pages` hot pages. All hot pages take `device_bytes`."""
    if config.host_bytes is not None:
        return config.host_bytes * pages // device_bytes
    return int((config.host_ratio or 0.0) * pages)


def _size_asked(config: RunnerConfig) -> str:
    return f"{config.host_ratio} of the pages" if config.host_bytes is None else f"{config.host_bytes} bytes"


class LentPages:
    """The pages of another replica's host tier, which this hand may only read."""

    def __init__(self, descriptor: int, sizes: PageSizes) -> None:
        """Maps the file of `descriptor`. The lending hand uses the same page sizes, and has set the file's length."""
        size = os.fstat(descriptor).st_size
        states, rest = 0, size
        if sizes.state and size > COUNT_BYTES:
            states = int.from_bytes(os.pread(descriptor, COUNT_BYTES, size - COUNT_BYTES), sys.byteorder)
            rest = size - COUNT_BYTES - states * sizes.of_state
        pages = rest // sizes.of_page
        if pages <= 0 or rest % sizes.of_page:
            raise ValueError(f"{size} bytes of a lender are no pages of {sizes.page} and {sizes.state}")
        mapped = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self.parts = HostParts(np.frombuffer(mapped, np.uint8), HostCounts(pages, states), sizes)


class HostParts:
    """The parts of a host tier in mapped memory."""

    def __init__(self, mapped: Bytes, counts: HostCounts, sizes: PageSizes) -> None:
        self.pages, end = _pages(mapped, counts.pages, sizes.page)
        """uint8 [pages, page_bytes]"""
        self.checksums, end = _notes(mapped[end:], counts.pages, 1), end + CHECKSUM_BYTES * counts.pages
        rest = mapped[end:]
        self.states, end = _pages(rest, counts.state_pages, sizes.state)
        """uint8 [state_pages, state_bytes]"""
        notes = _notes(rest[end:], counts.state_pages, STATE_NOTE_WORDS)
        self.state_checksums, self.seen = notes[:, 0], notes[:, 1]
        """`seen` [state_pages]: the number of positions that each state includes"""

    def is_sealed(self, page: int) -> bool:
        """True if a page matches its checksum."""
        return bool(self.checksums[page, 0] == zlib.crc32(self.pages[page].data))

    def is_state_sealed(self, page: int) -> bool:
        """True if a state page matches its checksum."""
        return bool(self.state_checksums[page] == zlib.crc32(self.states[page].data))


class HostPool:
    """The host pages of this hand, in the brain's memory."""

    def __init__(self, descriptor: int, counts: HostCounts, sizes: PageSizes, page_size: int) -> None:
        """Maps the file of `descriptor`, which the caller keeps, and enlarges the file if it is too small."""
        size = sizes.file_bytes(counts)
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)
        if sizes.state:
            end = os.fstat(descriptor).st_size - COUNT_BYTES
            os.pwrite(descriptor, counts.state_pages.to_bytes(COUNT_BYTES, sys.byteorder), end)
        self.mapped: Bytes = np.frombuffer(mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED), np.uint8)
        """The whole memory, uint8 [bytes]."""
        self.counts = counts
        self.parts = HostParts(self.mapped, counts, sizes)
        self._page_size = page_size
        self._saved: dict[int, set[int]] = {}

    @property
    def pages(self) -> Bytes:
        """The KV cache pages, uint8 [pages, page_bytes]."""
        return self.parts.pages

    def rows(self, kv: KvPool) -> list[torch.Tensor]:
        """Returns the main part, which must be one pool, of all pages as rows `[pages, page_size, width]` per layer."""
        (pool,) = kv.main.pools
        layers = kv.main.page_stride // kv.page_size
        elements = kv.main.page_bytes // pool.itemsize
        main = torch.from_numpy(self.pages).view(pool.dtype)[:, :elements]
        return list(main.unflatten(1, (layers, kv.page_size, -1)).unbind(1))

    def seal(self, page: int, first: int, count: int) -> None:
        """Notes that these positions of a page were saved. Once all positions are saved, stores the page's checksum."""
        if count < self._page_size:
            saved = self._saved.setdefault(page, set())
            if first == 0:
                saved.clear()
            saved.update(range(first, first + count))
            if len(saved) < self._page_size:
                return
        self._saved.pop(page, None)
        self.parts.checksums[page] = zlib.crc32(self.pages[page].data)

    def seal_state(self, page: int) -> None:
        """Stores the checksum of a state page."""
        self.parts.state_checksums[page] = zlib.crc32(self.parts.states[page].data)


def _pages(mapped: Bytes, count: int, size: int) -> tuple[Bytes, int]:
    """Returns the first `count` pages of `size` bytes in memory, [count, size], and the offset of their end."""
    end = count * size
    return mapped[:end].reshape(count, size), end


def _notes(mapped: Bytes, count: int, words: int) -> _Words:
    """Returns the note words of the pages, at the beginning of memory, [count, words]."""
    return mapped[: 4 * count * words].view(np.uint32).reshape(count, words)
