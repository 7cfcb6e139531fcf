"""A device for tests: the CPU with a queue that delays all work as long as any accelerator may.

Work runs on a separate thread, in order, and only when a caller waits for a later event. Copies to the device are made
when the work runs. Host memory that the caller may reuse is filled with garbage immediately, and so is memory for
results. So a buffer that is reused too early gives wrong tokens, on any machine and every time. The same holds for a
result that is read before its event. Work that waits for the device raises `HiddenWaitError`.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from forebay.device.cpu import CpuDevice
from forebay.device.interface import Event, Work
from forebay.device.recorded import Recording
from forebay.device.watch import NoOperators, NoWaits

GARBAGE = 0x5C
"""The value of every byte that must not be read. It is no valid token, position or slot, whatever the type."""


class DeferredEvent:
    """An event in the queue of a `DeferredDevice`."""

    __slots__ = ("_device", "ns", "number")

    def __init__(self, device: DeferredDevice, number: int) -> None:
        self._device = device
        self.number = number
        """The index in the queue, from 1."""
        self.ns = 0
        """The time at which the event was reached, in nanoseconds."""

    def wait(self) -> None:
        self._device.wait_for(self)

    def since(self, earlier: Event) -> int:
        assert isinstance(earlier, DeferredEvent)
        return (self.ns - earlier.ns) // 1000


class DeferredDevice(CpuDevice):
    """Implements `Device` like an accelerator that finishes all work as late as possible."""

    name = "deferred"
    beside_host = True

    def __init__(self, threads: int | None) -> None:
        super().__init__(threads)
        self.waits = 0
        """The number of waits for an event."""
        self._changed = threading.Condition()
        self._queue: deque[Work | DeferredEvent] = deque()
        self._wanted = 0
        """The largest index in the queue for which a caller waits."""
        self._reached = 0
        self._stopped = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="deferred", daemon=True)
        self._thread.start()
        # A thread that still runs when the interpreter exits keeps libraries from cleaning up.
        atexit.register(self._stop)

    def host_memory(self, size: int) -> npt.NDArray[np.uint8]:
        return np.full(size, GARBAGE, np.uint8)

    def reuse(self, memory: npt.NDArray[Any]) -> None:
        memory.view(np.uint8).fill(GARBAGE)

    def launching(self) -> AbstractContextManager[object]:
        return NoOperators()  # type: ignore[no-untyped-call]

    def queue(self, work: Work) -> None:
        with self._changed:
            self._queue.append(work)

    def event(self) -> Event:
        with self._changed:
            event = DeferredEvent(self, self._reached + len(self._queue) + 1)
            self._queue.append(event)
        return event

    def copy_in(self, *arrays: npt.NDArray[Any]) -> tuple[torch.Tensor, ...]:
        return tuple(torch.from_numpy(array.copy()) for array in arrays)

    def capture(self, work: Work) -> Work:
        work()
        return Recording(work).replay

    def copy_out(self, tensor: torch.Tensor, to: npt.NDArray[Any]) -> None:
        torch.from_numpy(to).copy_(tensor)

    def wait_for(self, event: DeferredEvent) -> None:
        """Runs the queue up to an event. Raises the errors of that work, and of earlier work."""
        with self._changed:
            self.waits += 1
            self._wanted = max(self._wanted, event.number)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._error is not None or self._reached >= event.number)
            if self._error is not None:
                raise self._error

    def _stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        with torch.inference_mode():
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped or self._reached < self._wanted)
                    if self._stopped:
                        return
                    # Work stays at the head of the queue until it is done, so that new events get the right numbers.
                    head = self._queue[0]
                try:
                    if isinstance(head, DeferredEvent):
                        head.ns = time.perf_counter_ns()
                    else:
                        with NoWaits():
                            head()
                except BaseException as error:
                    with self._changed:
                        self._error = error
                        self._changed.notify_all()
                    return
                with self._changed:
                    self._queue.popleft()
                    self._reached += 1
                    self._changed.notify_all()
