"""Memory for what steps read."""

import mmap
import os

import pytest
import torch

from forebay.device.cpu import AVAILABLE, host_available
from forebay.device.memory import HugePages, fresh


def test_tensors_of_an_arena_are_zeros_and_do_not_overlap() -> None:
    shapes = [((3, 5), torch.bfloat16), ((7,), torch.uint8), ((2, 2), torch.float32), ((0,), torch.float32)]
    arena = HugePages(torch.empty(shape, dtype=dtype).nbytes for shape, dtype in shapes)
    taken = [arena.take(shape, dtype) for shape, dtype in shapes]
    for number, (tensor, (shape, dtype)) in enumerate(zip(taken, shapes, strict=True), 1):
        assert tensor.shape == shape
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0 or tensor.nbytes == 0
        assert not tensor.any()
        tensor.fill_(number)
    for number, tensor in enumerate(taken, 1):
        assert (tensor == number).all()


def test_an_arena_does_not_give_what_it_was_not_asked_for() -> None:
    arena = HugePages([64])
    with pytest.raises(ValueError, match="no room for 68 bytes: 64 are left"):
        arena.take((17,), torch.float32)
    assert fresh(0).nbytes == 0


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
