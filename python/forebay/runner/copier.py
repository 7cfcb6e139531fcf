"""Copies of pages between the device's memory and the host's, beside the steps."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections import deque
from contextlib import suppress

import numpy as np

from forebay.device import Device, Event
from forebay.protocol.frames import Int32s
from forebay.protocol.plan import COPY_SAVE
from forebay.protocol.result import COPIED_WORDS, COPY_FAILED, COPY_OK
from forebay.state.host import HostPool
from forebay.state.pages import KvPool


class Copier:
    """Copies pages on a thread of its own, and tells which are done.

    A save waits for the rows of the plan that names it. A restore waits for nothing, and goes before all saves: the
    brain names no page as its target that a plan in flight names, and somebody waits for it.
    """

    def __init__(self, device: Device, kv: KvPool, host: HostPool, gbps: float | None, checksums: bool) -> None:
        """`gbps`: at most so many GB a second, for tests. `checksums`: of every page, checked."""
        self._device = device
        self._hot = kv.pieces()
        self._host = host
        self._rate = None if gbps is None else gbps * 1e9
        self._checksums = checksums
        self._bytes = kv.page_bytes
        self._changed = threading.Condition()
        self._saves: deque[tuple[list[int], Event]] = deque()
        self._restores: deque[list[int]] = deque()
        self._ended: list[tuple[int, int]] = []
        self._busy_us = [0.0, 0.0]
        self._outstanding = 0
        self._plans = 0
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        threading.Thread(target=self._run, name="copier", daemon=True).start()

    def next_plan(self) -> int:
        """A plan is launched: whoever waits on behalf of an earlier one goes on. Its number."""
        with self._changed:
            self._plans += 1
            os.eventfd_write(self._news, 1)
            return self._plans

    def submit(self, copies: Int32s, after: Event) -> None:
        """Starts copies `[c, 4]` of a plan whose rows are computed when `after` is reached."""
        with self._changed:
            for copy in copies.tolist():
                if copy[1] == COPY_SAVE:
                    self._saves.append((copy, after))
                else:
                    self._restores.append(copy)
            self._outstanding += len(copies)
            self._changed.notify()

    def wait(self, us: int, socket: int, plan: int) -> None:
        """Returns when a copy has ended, or none is left, when another plan than `plan` has come, or after `us`.

        `socket` is where plans come from: one that nobody has read yet ends the wait too.
        """
        with suppress(BlockingIOError):
            os.eventfd_read(self._news)
        with self._changed:
            if self._ended or not self._outstanding or self._plans != plan:
                return
        select.select([self._news, socket], [], [], us / 1e6)

    def report(self) -> tuple[Int32s, Int32s]:
        """The copies that ended since the last call, `[c, 2]`, and what they took: `[2]`, or `[0]` if nothing."""
        with self._changed:
            if not self._ended:
                return np.zeros((0, COPIED_WORDS), np.int32), np.zeros(0, np.int32)
            ended, self._ended = self._ended, []
            taken = [int(us) for us in self._busy_us]
            self._busy_us = [us - whole for us, whole in zip(self._busy_us, taken, strict=True)]
            self._outstanding -= len(ended)
        return np.array(ended, np.int32), np.array(taken, np.int32)

    def _next(self) -> tuple[list[int], Event | None]:
        with self._changed:
            self._changed.wait_for(lambda: self._restores or self._saves)
            return (self._restores.popleft(), None) if self._restores else self._saves.popleft()

    def _run(self) -> None:
        while True:
            (ticket, direction, hot, host), after = self._next()
            fine = after is None or _reached(after)
            begun = time.perf_counter()
            fine = fine and self._copy(direction, hot, host)
            taken = time.perf_counter() - begun
            if self._rate is not None:
                time.sleep(max(0.0, self._bytes / self._rate - taken))
                taken = time.perf_counter() - begun
            with self._changed:
                self._ended.append((ticket, COPY_OK if fine else COPY_FAILED))
                self._busy_us[int(direction != COPY_SAVE)] += 1e6 * taken
                os.eventfd_write(self._news, 1)

    def _copy(self, direction: int, hot: int, host: int) -> bool:
        """Copies a page; False if that could not be done."""
        try:
            save = direction == COPY_SAVE
            if not save and self._checksums and not self._host.is_sealed(host):
                print(f"host page {host} is not as it was saved", file=sys.stderr)
                return False
            at_host = np.split(self._host.pages[host], np.cumsum([piece.shape[1] for piece in self._hot])[:-1])
            self._device.move([(piece[hot], part) for piece, part in zip(self._hot, at_host, strict=True)], save=save)
            if save and self._checksums:
                self._host.seal(host)
        except Exception as error:
            # The brain computes what can't be copied.
            print(f"a page was not copied: {type(error).__name__}: {error}", file=sys.stderr)
            return False
        return True


def _reached(event: Event) -> bool:
    """Waits for rows; False if they can't be computed any more, which the next step finds out too."""
    try:
        event.wait()
    except Exception as error:
        print(f"a page was not saved: {type(error).__name__}: {error}", file=sys.stderr)
        return False
    return True
