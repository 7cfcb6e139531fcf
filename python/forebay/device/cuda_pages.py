"""Asynchronous copies of pages between a GPU and shared host memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from forebay.device.interface import Bytes, DeviceError

_PORTABLE_AND_MAPPED = 3
"""cudaHostRegisterPortable and cudaHostRegisterMapped: pinned for all CUDA contexts of this process, and readable by
kernels.
"""


def pinned(size: int) -> torch.Tensor:
    """Allocates pinned host memory, which the GPU reads and writes directly, uint8 `[size]`."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class PageCopies:
    """Copies pages, with a stream for each direction. Copies and steps do not wait for each other.

    On the device, a page often consists of many parts in different layers. A kernel gathers them on the device, so that
    a single copy crosses the bus instead of one per layer.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {save: torch.cuda.Stream(device) for save in (False, True)}

    def register(self, memory: Bytes) -> None:
        """Pins all of the host memory, until the process exits. Raises `DeviceError`."""
        cudart = torch.cuda.cudart()
        status = cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, _PORTABLE_AND_MAPPED)
        if status != cudart.cudaError.success:
            raise DeviceError(
                f"the host tier of {memory.nbytes / 1e9:.1f} GB can't be pinned for the GPU: "
                f"{cudart.cudaGetErrorString(status)}; choose a smaller --hicache-size, or raise `ulimit -l`"
            )

    def move(self, moves: Sequence[tuple[torch.Tensor, Bytes]], *, save: bool) -> None:
        """Copies bytes as `Device.move` does. May be called by any thread."""
        stream, whole = self._streams[save], joined([at_host for _, at_host in moves])
        if whole is not None and not whole.flags.writeable:
            # Other replicas' memory is not pinned.
            whole = None
        there = [piece for piece, _ in moves]
        with torch.inference_mode(), torch.cuda.stream(stream):
            if save:
                staged = torch.cat([piece.reshape(-1) for piece in there])
                at_host = torch.from_numpy(whole) if whole is not None else pinned(len(staged))
                at_host.copy_(staged, non_blocking=True)
            else:
                if whole is not None:
                    at_host = torch.from_numpy(whole)
                else:
                    at_host = pinned(sum(piece.nbytes for piece in there))
                    _scatter(moves, at_host.numpy(), save=False)
                staged = torch.empty(len(at_host), dtype=torch.uint8, device=self._device)
                staged.copy_(at_host, non_blocking=True)
                parts = staged.split([piece.nbytes for piece in there])
                torch._foreach_copy_(there, [part.view(piece.shape) for part, piece in zip(parts, there, strict=True)])
        stream.synchronize()
        if save and whole is None:
            _scatter(moves, at_host.numpy(), save=True)


def joined(pieces: Sequence[Bytes]) -> Bytes | None:
    """Returns adjacent ranges of memory as one range; None if a range does not begin where the previous one ends."""
    end = pieces[0].ctypes.data
    for piece in pieces:
        if piece.ctypes.data != end or not piece.flags.c_contiguous:
            return None
        end += piece.nbytes
    first = pieces[0].reshape(-1)
    return np.lib.stride_tricks.as_strided(first, (end - first.ctypes.data,), (1,))


def _scatter(moves: Sequence[tuple[torch.Tensor, Bytes]], all_: Bytes, *, save: bool) -> None:
    """Copies consecutive memory to several ranges of host memory, or back."""
    at = 0
    for _, piece in moves:
        part = all_[at : at + piece.size].reshape(piece.shape)
        at += piece.size
        np.copyto(piece, part) if save else np.copyto(part, piece)
