"""Memory for what steps read."""

import mmap
import os

import pytest

from forebay.device.cpu import AVAILABLE, host_available
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
    # A tensor could lie in what the allocator kept of earlier tests, which this process has already.
    with mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as taken:
        for page in range(0, len(taken), mmap.PAGESIZE):
            taken[page] = 1
        assert host_available() <= before - (len(taken) - (8 << 20))
    monkeypatch.setenv(AVAILABLE, "1000")
    assert host_available() == 0


def test_alone_it_takes_what_nobody_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(AVAILABLE, raising=False)
    assert 0 < host_available() < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
