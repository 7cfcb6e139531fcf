"""The CPU as a device."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from forebay.device.interface import Bytes, Event, Work
from forebay.device.memory import fresh

AVAILABLE = "FOREBAY_AVAILABLE_BYTES"
"""The environment variable with the bytes that a hand may allocate, set by the process that starts the hand."""


class CpuEvent:
    """An event on a device whose `queue` runs work at once, so the event is reached as soon as it is created."""

    __slots__ = ("_ns",)

    def __init__(self) -> None:
        self._ns = time.perf_counter_ns()

    def wait(self) -> None:
        pass

    def since(self, earlier: Event) -> int:
        assert isinstance(earlier, CpuEvent)
        return (self._ns - earlier._ns) // 1000


class CpuDevice:
    """Implements `Device` on the CPU. `queue` runs work at once, and `copy_in` returns views of the host's arrays."""

    name = "cpu"
    torch_device = torch.device("cpu")
    beside_host = False

    def __init__(self, threads: int | None) -> None:
        # Without this, OpenMP uses OMP_NUM_THREADS, which the parent process set.
        if threads is not None:
            torch.set_num_threads(threads)
        self._launching = nullcontext()

    def check_dtype(self, dtype: torch.dtype) -> None:
        if dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"dtype {dtype} is not supported on the CPU: use bfloat16 or float32")

    def available_bytes(self) -> int:
        return host_available()

    def host_bytes(self, taken: int) -> int:
        return self.available_bytes() - taken

    def measure(self, run: Callable[[], object]) -> int:
        return 0

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return fresh(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

    def fill(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def host_memory(self, size: int) -> npt.NDArray[np.uint8]:
        return np.empty(size, np.uint8)

    def reuse(self, memory: npt.NDArray[Any]) -> None:
        pass

    def launching(self) -> AbstractContextManager[object]:
        return self._launching

    def queue(self, work: Work) -> None:
        work()

    def event(self) -> Event:
        return CpuEvent()

    def copy_in(self, *arrays: npt.NDArray[Any]) -> tuple[torch.Tensor, ...]:
        return tuple(map(torch.from_numpy, arrays))

    def copy_into(self, target: torch.Tensor, *arrays: npt.NDArray[Any]) -> None:
        end = 0
        for array in arrays:
            begin, end = end, end + array.size
            target[begin:end] = torch.from_numpy(array.reshape(-1))

    def capture(self, work: Work) -> Work:
        # A capture would save nothing, since `queue` runs work at once.
        return work

    def finish_start(self) -> None:
        pass

    def copy_out(self, tensor: torch.Tensor, to: npt.NDArray[Any]) -> None:
        to[...] = tensor.numpy()

    def share(self, memory: Bytes) -> None:
        pass

    def move(self, moves: Sequence[tuple[torch.Tensor, Bytes]], *, save: bool) -> None:
        for there, at_host in moves:
            # NumPy releases the GIL while it copies.
            np.copyto(at_host, there.numpy()) if save else np.copyto(there.numpy(), at_host)


def host_available() -> int:
    """Returns the host memory that this process can still allocate.

    The process that starts a hand passes it the number of bytes that were free at that time, within the cgroup limits.
    Without this number, the kernel's estimate is used.
    """
    told = os.environ.get(AVAILABLE)
    if told is None:
        return memory_available()
    return max(0, int(told) - _taken())


def memory_available(proc: Path = Path("/proc")) -> int:
    """Returns the bytes that can be allocated without swapping, by the kernel's estimate: caches count as free."""
    # Free memory alone is near zero on a host that has read many files.
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _taken() -> int:
    """Returns the bytes of memory that this process uses, without pages of files and of shared memory."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
