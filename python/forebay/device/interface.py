"""The interface that hides the differences between devices.

A device executes *work* in the order in which it was queued, like a CUDA stream. Work is a function that calls
PyTorch's operators. It may run long after `queue` has returned, so:

- it refers to no host memory that may change before it runs, except memory that is guaranteed to stay (a plan's body,
  the arena);
- nobody reads a tensor that it writes, or host memory that it copies to, before waiting for an event recorded after it;
- it never waits for the device: it reads no value of a tensor, and no shape depends on such a value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Work: TypeAlias = Callable[[], None]
Bytes: TypeAlias = npt.NDArray[np.uint8]


class DeviceError(ValueError):
    """A device is missing, out of memory, or has failed. The message is one line with advice."""


class Event(Protocol):
    """A point in a device's queue. It is reached when all earlier work is done."""

    def wait(self) -> None:
        """Waits for the event. Raises the errors of work before it."""

    def since(self, earlier: Event) -> int:
        """Returns the microseconds from an `earlier` event of the device to this one. Both must have been reached."""


class Device(Protocol):
    """One accelerator, or the CPU, as the runner uses it."""

    @property
    def name(self) -> str:
        """The device's name, for `ready`."""

    @property
    def torch_device(self) -> torch.device:
        """The PyTorch device of its tensors."""

    @property
    def beside_host(self) -> bool:
        """True if work runs asynchronously: it may still run after `queue` has returned."""

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raises `ValueError` if the device can't compute in `dtype`."""

    def available_bytes(self) -> int:
        """Returns the bytes of device memory that can still be allocated."""

    def host_bytes(self, taken: int) -> int:
        """Returns the bytes of host memory that stay free if `taken` more bytes of device memory are allocated."""

    def measure(self, run: Callable[[], object]) -> int:
        """Returns the bytes to leave free for steps: the memory that `run` took, and a reserve.

        On a device whose memory is not divided in advance, this does not call `run`, and returns 0.
        """

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocates zeroed memory for permanent use. If possible, physical memory is only taken when it is written."""

    def fill(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies a host tensor into a device tensor and converts its type, before all later work."""

    def host_memory(self, size: int) -> npt.NDArray[np.uint8]:
        """Allocates host memory, uint8 `[size]`, for asynchronous copies to and from the device."""

    def reuse(self, memory: npt.NDArray[Any]) -> None:
        """Notes that no queued work reads this host memory any more, so it may be overwritten."""

    def launching(self) -> AbstractContextManager[object]:
        """Returns the context in which a step's work is prepared and queued."""

    def queue(self, work: Work) -> None:
        """Runs `work` after all earlier work."""

    def event(self) -> Event:
        """Records an event after all work queued so far."""

    def copy_in(self, *arrays: npt.NDArray[Any]) -> tuple[torch.Tensor, ...]:
        """Copies host arrays to tensors of the device, in one copy. The tensors may share memory.

        Runs as queued work. The arrays keep their content until the step's last event is reached.
        """

    def copy_into(self, target: torch.Tensor, *arrays: npt.NDArray[Any]) -> None:
        """Copies host arrays, one after the other, to the beginning of `target` [elements], which has the same type.

        Runs as queued work. The arrays keep their content until the step's last event is reached.
        """

    def capture(self, work: Work) -> Work:
        """Runs work once, then records it. Returns work that replays the recording. Runs as queued work.

        The recording consists of operators and the addresses of their memory. Host code in `work` is not repeated, so
        it must copy nothing to or from the host. All captures share the memory that they allocate, so its content is
        lost after each run. Inputs and outputs must be in memory that the caller keeps. Raises `DeviceError`.
        """

    def finish_start(self) -> None:
        """Prepares for steps. Called after the last capture."""

    def copy_out(self, tensor: torch.Tensor, to: npt.NDArray[Any]) -> None:
        """Copies a tensor to host memory, which is complete at the next event. Runs as queued work."""

    def share(self, memory: Bytes) -> None:
        """Prepares shared host memory for `move`. Raises `DeviceError`."""

    def move(self, moves: Sequence[tuple[torch.Tensor, Bytes]], *, save: bool) -> None:
        """Copies bytes of device memory, uint8, to shared host memory, or back. The copies are done on return.

        Called by a separate thread, while steps run.
        """


def host_array(device: Device, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Allocates host memory of a device as an array."""
    type_ = np.dtype(dtype)
    return device.host_memory(math.prod(shape) * type_.itemsize).view(type_).reshape(shape)
