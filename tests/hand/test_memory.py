"""Memory for the data that steps read, and the memory that a hand may use."""

import mmap
import os
from pathlib import Path

import pytest

from forebay.device.cpu import AVAILABLE, host_available, memory_available
from forebay.device.memory import fresh


def test_fresh_memory_is_zeros_of_any_size() -> None:
    for size in (0, 1, 5000):
        found = fresh(size)
        assert found.nbytes == size
        assert not found.any()
        found.fill_(1)


def test_a_hand_takes_what_its_starter_says_less_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AVAILABLE, str(64 << 30))
    before = host_available()
    assert 0 < before < 64 << 30
    # A tensor might reuse memory that the allocator kept from earlier tests. A new mapping is always new memory.
    with mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as taken:
        for page in range(0, len(taken), mmap.PAGESIZE):
            taken[page] = 1
        assert host_available() <= before - (len(taken) - (8 << 20))
    monkeypatch.setenv(AVAILABLE, "1000")
    assert host_available() == 0


def test_alone_it_takes_what_nobody_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(AVAILABLE, raising=False)
    assert 0 < host_available() < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_cached_files_count_as_available(tmp_path: Path) -> None:
    # A host that has read many files has almost no free memory, but the kernel can drop all cached files.
    (tmp_path / "meminfo").write_text("MemTotal: 2000 kB\nMemFree: 1 kB\nMemAvailable: 1500 kB\nCached: 1600 kB\n")
    assert memory_available(tmp_path) == 1500 * 1024
