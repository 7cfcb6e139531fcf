"""Memory for what steps read."""

import pytest
import torch

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
