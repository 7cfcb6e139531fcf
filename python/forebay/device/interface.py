"""The differences between devices, behind one interface.

A device executes *work* in the order in which it was queued, like a stream. Work is a function that calls PyTorch's
operators. It may run long after `queue` has returned, so:

- it refers to no host memory that anybody changes meanwhile, but for what it was promised (a plan's body, the arena);
- nobody reads a tensor that it writes, or host memory that it copies to, before an event after it has been waited for;
- it never waits for the device itself: it reads no value of a tensor, and no shape in it depends on one.
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
    """A device that is not there, has no memory left or has failed: one line that says what to do."""


class Event(Protocol):
    """A place in a device's queue: it is reached when all work before it is done."""

    def wait(self) -> None:
        """Returns when the event is reached; raises what work before it has raised."""

    def since(self, earlier: Event) -> int:
        """Microseconds from an `earlier` event of the device to this one; both are reached."""


class Device(Protocol):
    """One accelerator, or the host's processors, as the runner sees it."""

    @property
    def name(self) -> str:
        """The name that `ready` reports."""

    @property
    def torch_device(self) -> torch.device:
        """The device of tensors."""

    @property
    def beside_host(self) -> bool:
        """True if work may still run when `queue` has returned."""

    @property
    def runs_native(self) -> bool:
        """True if compiled kernels of the host may be called with addresses of the device's memory, as work."""

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raises `ValueError` when the device can't compute in `dtype`."""

    def available_bytes(self) -> int:
        """Memory that can still be allocated."""

    def host_bytes(self, taken: int) -> int:
        """Memory of the host that can still be allocated, once `taken` bytes of the device's are."""

    def measure(self, run: Callable[[], object]) -> int:
        """Bytes to leave free for steps: what the device's memory was short of while it did `run`, and a reserve.

        0, and nothing is run, where steps take what they need from memory that nobody divides.
        """

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed memory for a long life and of any size; where the device can, it is taken as it is written."""

    def fill(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies a tensor of the host into one of the device, in its type; before all that is queued later."""

    def host_memory(self, size: int) -> npt.NDArray[np.uint8]:
        """Host memory, uint8 `[size]`, that the device copies from and to while the host goes on."""

    def reuse(self, memory: npt.NDArray[Any]) -> None:
        """Says that no work reads this host memory any more: others may write to it now."""

    def launching(self) -> AbstractContextManager[object]:
        """Entered by whoever prepares and queues a step's work."""

    def queue(self, work: Work) -> None:
        """Has `work` run after all that was queued before."""

    def event(self) -> Event:
        """The place behind all that was queued so far."""

    def copy_in(self, *arrays: npt.NDArray[Any]) -> tuple[torch.Tensor, ...]:
        """Host arrays as tensors of the device, in one copy; they may share its memory. For work.

        The arrays keep their content until the step's last event is reached.
        """

    def copy_into(self, target: torch.Tensor, *arrays: npt.NDArray[Any]) -> None:
        """Copies host arrays, one after the other, to the beginning of `target` [elements], of whose type they are.

        For work. As for `copy_in`, the arrays keep their content until the step's last event is reached.
        """

    def capture(self, work: Work) -> Work:
        """Does work once, then records it; gives work that repeats it. For work.

        What is recorded are operators and the memory that they read and write. The host's part of `work` is not
        repeated, so it copies nothing in or out. Memory that the capture makes for itself is shared with all that is
        captured, and has no content for others. Inputs and outputs lie in memory that the caller keeps. Raises
        `DeviceError`.
        """

    def copy_out(self, tensor: torch.Tensor, to: npt.NDArray[Any]) -> None:
        """Copies to host memory, which has the content when the next event is reached. For work."""

    def share(self, memory: Bytes) -> None:
        """Makes memory of the host that others own ready for `move`. Raises `DeviceError`."""

    def move(self, moves: Sequence[tuple[torch.Tensor, Bytes]], *, save: bool) -> None:
        """Copies bytes of the device, uint8, each to its place in shared memory, or back; done when it returns.

        Beside the steps, by one thread that is not theirs.
        """


def host_array(device: Device, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Host memory of a device as an array."""
    type_ = np.dtype(dtype)
    return device.host_memory(math.prod(shape) * type_.itemsize).view(type_).reshape(shape)
