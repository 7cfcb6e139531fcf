"""An NVIDIA GPU as a device: one stream for compute, pinned host memory, and additional streams for the host tier.

One thread launches all work, which runs in one stream, in order. The next step may reuse a step's memory without
waiting, since it runs after that step. Pinned memory comes from PyTorch's allocator, which reuses a block only after
all queued copies of the block are done.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from forebay.device.cpu import host_available
from forebay.device.cuda_open import require_gpu
from forebay.device.cuda_pages import PageCopies, pinned
from forebay.device.interface import Bytes, DeviceError, Event, Work

GPU = torch.device("cuda", 0)
"""The first visible GPU. The brain makes a different GPU visible to each hand."""
RESERVE = 256 << 20
"""Bytes that stay free besides weights, pages and a measured step, for libraries' later use and fragmentation."""
_ALIGNMENT = 16
_UPLOAD_BYTES = 16 << 20
"""Bytes of each of the two buffers through which weights are uploaded."""
_WARM_BLOCKS, _WARM_BYTES = 8, 1 << 16
"""The number per size, and the largest size, of the pinned blocks that are allocated before the first step. Later
allocations stall the GPU.
"""


class CudaEvent:
    """An event in a CUDA stream."""

    __slots__ = ("_event",)

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        try:
            self._event.synchronize()
        except RuntimeError as error:
            # CUDA reports errors of queued work at the next call, whichever call it is.
            what = str(error).splitlines()[0]
            raise DeviceError(
                f"the GPU has failed: {what}. A plan may have named what does not exist, or a kernel or the GPU is at "
                "fault; CUDA_LAUNCH_BLOCKING=1 shows where"
            ) from error

    def since(self, earlier: Event) -> int:
        assert isinstance(earlier, CudaEvent)
        return int(1000 * earlier._event.elapsed_time(self._event))


class CudaDevice:
    """Implements `Device` with CUDA. The thread that creates it launches all steps, and the stream is current in it."""

    torch_device = GPU
    beside_host = True

    def __init__(self) -> None:
        """Opens the first visible GPU. Raises `DeviceError` if PyTorch can't compute on it."""
        require_gpu()
        torch.cuda.set_device(self.torch_device)
        self.name = f"cuda ({torch.cuda.get_device_name(self.torch_device)})"
        self._stream = torch.cuda.Stream(self.torch_device)
        torch.cuda.set_stream(self._stream)
        self._launching = nullcontext()
        self._upload = _Upload(self.torch_device)
        self._pages = PageCopies(self.torch_device)
        self._graph_pool: Any = None
        # Float32 arithmetic must give the same tokens as the CPU, and sums of bfloat16 products must stay in float32.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

    def check_dtype(self, dtype: torch.dtype) -> None:
        if dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"dtype {dtype} is not supported on CUDA: use bfloat16 or float32")
        if dtype == torch.bfloat16 and torch.cuda.get_device_capability(self.torch_device)[0] < 8:
            raise DeviceError(f"{self.name} has no arithmetic for bfloat16: use --dtype float32")

    def available_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def host_bytes(self, taken: int) -> int:
        return host_available()

    def measure(self, run: Callable[[], object]) -> int:
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()
        before = self.available_bytes()
        run()
        torch.cuda.synchronize(self.torch_device)
        # PyTorch's allocator keeps freed memory until it is told to release it, so the difference is the peak,
        # libraries included.
        taken = before - self.available_bytes()
        # The memory of the measured graphs has been released, and PyTorch refuses to reuse such a pool.
        self._graph_pool = None
        torch.cuda.empty_cache()
        return max(0, taken) + RESERVE

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.torch_device)

    def fill(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._upload.copy(target, source)

    def host_memory(self, size: int) -> npt.NDArray[np.uint8]:
        memory: npt.NDArray[np.uint8] = pinned(size).numpy()
        return memory

    def reuse(self, memory: npt.NDArray[Any]) -> None:
        pass

    def launching(self) -> AbstractContextManager[object]:
        return self._launching

    def queue(self, work: Work) -> None:
        work()

    def event(self) -> Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return CudaEvent(event)

    def copy_in(self, *arrays: npt.NDArray[Any]) -> tuple[torch.Tensor, ...]:
        if len(arrays) == 1 and arrays[0].flags.c_contiguous and arrays[0].flags.writeable:
            source = torch.from_numpy(arrays[0])
            if source.is_pinned():
                return (self._to_device(source),)
        places, end = [], 0
        for array in arrays:
            places.append(slice(end, end + array.nbytes))
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        source = pinned(end)
        bytes_ = source.numpy()
        for array, place in zip(arrays, places, strict=True):
            bytes_[place].view(array.dtype).reshape(array.shape)[...] = array
        there = self._to_device(source)
        return tuple(
            there[place].view(_torch_dtype(array.dtype)).view(array.shape)
            for array, place in zip(arrays, places, strict=True)
        )

    def copy_into(self, target: torch.Tensor, *arrays: npt.NDArray[Any]) -> None:
        source = pinned(sum(array.nbytes for array in arrays))
        bytes_, end = source.numpy(), 0
        for array in arrays:
            begin, end = end, end + array.nbytes
            bytes_[begin:end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        target.view(torch.uint8)[:end].copy_(source, non_blocking=True)

    def capture(self, work: Work) -> Work:
        # Run outside of the graph first: this initialises libraries and compiles kernels.
        work()
        if self._graph_pool is None:
            self._graph_pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, self._graph_pool, self._stream, capture_error_mode="thread_local"):
                work()
        except RuntimeError as error:
            # The error at the end of a capture hides the original error. The log gets both.
            traceback.print_exc()
            raise DeviceError(f"the GPU can't capture this: {_first_cause(error)}") from error
        # The first replay of a graph uploads it, so do it now rather than in a request.
        graph.replay()
        return graph.replay

    def finish_start(self) -> None:
        # A capture frees PyTorch's unused pinned blocks, so new ones are allocated after the last capture.
        sizes = [1 << power for power in range(_WARM_BYTES.bit_length())]
        _ = [pinned(size) for size in sizes for _ in range(_WARM_BLOCKS)]

    def copy_out(self, tensor: torch.Tensor, to: npt.NDArray[Any]) -> None:
        torch.from_numpy(to).copy_(tensor, non_blocking=True)

    def share(self, memory: Bytes) -> None:
        self._pages.register(memory)

    def move(self, moves: Sequence[tuple[torch.Tensor, Bytes]], *, save: bool) -> None:
        self._pages.move(moves, save=save)

    def _to_device(self, source: torch.Tensor) -> torch.Tensor:
        there = torch.empty(source.shape, dtype=source.dtype, device=self.torch_device)
        return there.copy_(source, non_blocking=True)


class _Upload:
    """Uploads weights through two pinned buffers: one is filled while the GPU reads the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[tuple[torch.Tensor, torch.cuda.Event]] = []

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies a host tensor to a device tensor, with a conversion if needed. On return the copy is only queued."""
        if not self._buffers:
            self._buffers = [(pinned(_UPLOAD_BYTES), torch.cuda.Event()) for _ in range(2)]
        same = source.dtype == target.dtype and target.is_contiguous()
        there = target if same else torch.empty(source.shape, dtype=source.dtype, device=self._device)
        bytes_, to = source.contiguous().view(-1).view(torch.uint8), there.view(-1).view(torch.uint8)
        for first in range(0, len(bytes_), _UPLOAD_BYTES):
            buffer, copied = self._buffers[0]
            self._buffers.reverse()
            # An event that was never recorded counts as reached.
            copied.synchronize()
            part = bytes_[first : first + _UPLOAD_BYTES]
            at_host = buffer[: len(part)].copy_(part)
            to[first : first + len(part)].copy_(at_host, non_blocking=True)
            copied.record()
        if not same:
            target.copy_(there)


def _first_cause(error: BaseException) -> str:
    """Returns the first line of the original error in a chain of errors."""
    while error.__context__ is not None:
        error = error.__context__
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    found = _DTYPES.get(dtype)
    if found is None:
        found = _DTYPES[dtype] = torch.from_numpy(np.empty(0, dtype)).dtype
    return found


_DTYPES: dict[np.dtype[Any], torch.dtype] = {}
