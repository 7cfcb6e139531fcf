"""Copies of pages between the device's memory and the host's, beside the steps."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections import deque

import numpy as np

from forebay.device import Event
from forebay.protocol.frames import Int32s
from forebay.protocol.plan import COPY_SAVE
from forebay.protocol.result import COPIED_WORDS, COPY_FAILED, COPY_OK
from forebay.state.host import Bytes, HostPool
from forebay.state.pages import KvPool


class Copier:
    """Copies pages on a thread of its own, in the order of the plans, and tells which are done.

    A save waits for the rows of the plan that names it. A restore waits for nothing: the brain names no page as its
    target that a plan in flight names.
    """

    def __init__(self, kv: KvPool, host: HostPool, gbps: float | None, checksums: bool) -> None:
        """`gbps`: at most so many GB a second in each direction, for tests. `checksums`: of every page, checked."""
        self._hot = kv.pieces()
        self._host = host
        self._rate = None if gbps is None else gbps * 1e9
        self._checksums = checksums
        self._bytes = kv.page_bytes
        self._changed = threading.Condition()
        self._planned: deque[tuple[Int32s, Event]] = deque()
        self._ended: list[tuple[int, int]] = []
        self._busy_us = [0.0, 0.0]
        self._outstanding = 0
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        threading.Thread(target=self._run, name="copier", daemon=True).start()

    def submit(self, copies: Int32s, after: Event) -> None:
        """Starts copies `[c, 4]` of a plan whose rows are computed when `after` is reached."""
        with self._changed:
            # A plan's body is received into again; these are few words.
            self._planned.append((copies.copy(), after))
            self._outstanding += len(copies)
            self._changed.notify()

    def wait(self, us: int, socket: int) -> None:
        """Returns when a copy has ended, at once if there is none, when `socket` can be read, or after `us`."""
        with self._changed:
            if self._ended or not self._outstanding:
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
            os.eventfd_read(self._news)
        return np.array(ended, np.int32), np.array(taken, np.int32)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._planned)
                copies, after = self._planned.popleft()
            for ticket, direction, hot, host in copies.tolist():
                begun = time.perf_counter()
                fine = self._copy(direction, hot, host, after)
                taken = time.perf_counter() - begun
                if self._rate is not None:
                    time.sleep(max(0.0, self._bytes / self._rate - taken))
                    taken = time.perf_counter() - begun
                with self._changed:
                    self._ended.append((ticket, COPY_OK if fine else COPY_FAILED))
                    self._busy_us[int(direction != COPY_SAVE)] += 1e6 * taken
                    os.eventfd_write(self._news, 1)

    def _copy(self, direction: int, hot: int, host: int, after: Event) -> bool:
        """Copies a page; False if that could not be done."""
        try:
            at_host = self._host.pages[host]
            if direction == COPY_SAVE:
                after.wait()
                _move([piece[hot] for piece in self._hot], at_host, save=True)
                if self._checksums:
                    self._host.seal(host)
            else:
                if self._checksums and not self._host.is_sealed(host):
                    print(f"host page {host} is not as it was saved", file=sys.stderr)
                    return False
                _move([piece[hot] for piece in self._hot], at_host, save=False)
        except Exception as error:
            # The brain computes what can't be copied; a device that is gone is found out by the next step.
            print(f"a page was not copied: {type(error).__name__}: {error}", file=sys.stderr)
            return False
        return True


def _move(pieces: list[Bytes], page: Bytes, *, save: bool) -> None:
    """Copies the pieces of a page to its one in the host's memory, or back."""
    at = 0
    for piece in pieces:
        other = page[at : at + piece.size]
        # NumPy lets other threads run while it copies.
        np.copyto(other, piece) if save else np.copyto(piece, other)
        at += piece.size
