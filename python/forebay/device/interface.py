"""The interface that hides the differences between devices.

A device executes *work* in the order in which it was queued, like a stream. Work is a function that calls PyTorch's
operators. It may run long after `queue` has returned, so:

- it refers to no host memory that may change meanwhile, except memory that is guaranteed to stay (a plan's body, the
  arena);
- nobody reads a tensor that it writes, or host memory that it copies to, before an event after it has been waited for;
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
    """A place in a device's queue. It is reached when all earlier work is done."""

    def wait(self) -> None:
        """Waits for the event. Raises the errors of work before it."""

    def since(self, earlier: Event) -> int:
        """Microseconds from an `earlier` event of the device to this one. Both must be reached."""


class Device(Protocol):
    """One accelerator, or the host's processors, for the runner."""

    @property
    def name(self) -> str:
        """The device's name in `ready`."""

    @property
    def torch_device(self) -> torch.device:
        """PyTorch's device, for tensors."""

    @property
    def beside_host(self) -> bool:
        """True if work may still run after `queue` has returned."""

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raises `ValueError` if the device can't compute in `dtype`."""

    def available_bytes(self) -> int:
        """Memory that can still be allocated."""

    def host_bytes(self, taken: int) -> int:
        """Host memory that can still be allocated after the device's memory has `taken` bytes more."""

    def measure(self, run: Callable[[], object]) -> int:
        """Bytes to leave free for steps: the memory that `run` took, and a reserve.

        0, and nothing is run, if the device's memory is not divided in advance.
        """

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed memory of any size for permanent use. If possible, memory is only taken as it is written."""

    def fill(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies a host tensor into a device tensor and converts its type, before all later work."""

    def host_memory(self, size: int) -> npt.NDArray[np.uint8]:
        """Host memory, uint8 `[size]`, that the device copies from and to while the host goes on."""

    def reuse(self, memory: npt.NDArray[Any]) -> None:
        """Notes that no work reads this host memory any more, so it may be overwritten."""

    def launching(self) -> AbstractContextManager[object]:
        """The context in which a step's work is prepared and queued."""

    def queue(self, work: Work) -> None:
        """Runs `work` after all earlier work."""

    def event(self) -> Event:
        """The place after all work so far."""

    def copy_in(self, *arrays: npt.NDArray[Any]) -> tuple[torch.Tensor, ...]:
        """Host arrays as tensors of the device, in one copy. They may share its memory. Runs as queued work.

        The arrays keep their content until the step's last event is reached.
        """

    def copy_into(self, target: torch.Tensor, *arrays: npt.NDArray[Any]) -> None:
        """Copies host arrays, one after the other, to the beginning of `target` [elements], which has their type.

        Runs as queued work. The arrays keep their content until the step's last event is reached.
        """

    def capture(self, work: Work) -> Work:
        """Runs work once, then records it. Returns work that repeats it. Runs as queued work.

        The record consists of operators and the addresses of their memory. Host code in `work` is not repeated, so it
        must copy nothing in or out. All captures share the memory that they allocate, so its content is lost after each
        run. Inputs and outputs lie in memory that the caller keeps. Raises `DeviceError`.
        """

    def finish_start(self) -> None:
        """Prepares for steps, after the last capture."""

    def copy_out(self, tensor: torch.Tensor, to: npt.NDArray[Any]) -> None:
        """Copies to host memory, which is complete at the next event. Runs as queued work."""

    def share(self, memory: Bytes) -> None:
        """Prepares shared host memory for `move`. Raises `DeviceError`."""

    def move(self, moves: Sequence[tuple[torch.Tensor, Bytes]], *, save: bool) -> None:
        """Copies bytes of the device, uint8, to their places in shared memory, or back. The copies are done on return.

        It runs at the same time as steps, on one thread of its own.
        """


def host_array(device: Device, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Host memory of a device as an array."""
    type_ = np.dtype(dtype)
    return device.host_memory(math.prod(shape) * type_.itemsize).view(type_).reshape(shape)
