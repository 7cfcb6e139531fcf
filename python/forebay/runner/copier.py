"""Asynchronous copies of pages between the device's memory and the host's."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch

from forebay.device import Device, Event
from forebay.protocol.constants import (
    COPY_END_WORDS,
    COPY_FAILED,
    COPY_OK,
    COPY_RESTORE_INDEX,
    COPY_SAVE,
    COPY_SAVE_STATE,
)
from forebay.protocol.frames import Int32s
from forebay.state.host import Bytes, HostParts, HostPool, LentPages, PageSizes
from forebay.state.pages import KvPool, Part
from forebay.state.recurrent import StatePages

_Page = TypeVar("_Page", torch.Tensor, Bytes)


class Copier:
    """Copies pages on a separate thread, and reports finished copies.

    A save waits for the rows of its plan. A restore waits for nothing, because no plan in flight uses its target.
    Restores run before all saves, because a request waits for each.

    Copies of states have separate directions, and use state pages instead of hot and host pages.

    If index keys have separate pages with the numbers of host pages, a save reads the main part of page `hot` and the
    index part of page `host`. Each part is then restored separately.
    """

    def __init__(
        self,
        device: Device,
        kv: KvPool,
        host: HostPool,
        gbps: float | None,
        checksums: bool,
        lenders: Sequence[int | None] = (),
        writes: bool = True,
        states: StatePages | None = None,
    ) -> None:
        """`gbps`: a limit of the copies' speed in GB/s, for tests. `checksums`: restores check a checksum of the save.

        `lenders`: the descriptors of other replicas' host memory, which is mapped when a page is first borrowed.
        `writes` False: the first rank saves the same pages to the same memory, so a save here only waits for its rows.
        `states`: None if the model has no recurrent states.
        """
        self._device = device
        self._kv = kv
        self._parts = [(part, list(zip(part.pieces(), self._layers(part), strict=True))) for part in kv.parts]
        self._host = host
        self._states = states
        self._lenders = lenders
        self._writes = writes
        self._lent: dict[int, LentPages] = {}
        self._rate = None if gbps is None else gbps * 1e9
        self._checksums = checksums
        self._changed = threading.Condition()
        self._saves: deque[tuple[_Copy, Event]] = deque()
        self._restores: deque[_Copy] = deque()
        self.saves = 0
        """The number of submitted saves, which is also the number of the last one."""
        self._saved = 0
        self._waited_us = 0.0
        self._ended: list[tuple[int, int]] = []
        self._busy_us = [0.0, 0.0]
        self._outstanding = 0
        self._plans = 0
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        threading.Thread(target=self._run, name="copier", daemon=True).start()

    def next_plan(self) -> int:
        """Records the launch of a plan, so that `wait` calls for earlier plans return. Returns the plan's number."""
        with self._changed:
            self._plans += 1
            os.eventfd_write(self._news, 1)
            return self._plans

    def submit(self, copies: Int32s, spans: Int32s, sources: Int32s, after: Event) -> None:
        """Starts copies `[c, 4]` of a plan whose rows are computed when `after` is reached.

        `spans` `[c, 2]`: the first position and the number of positions of each page, 0 for all. `[0, 2]`: all
        positions of each page. `sources` `[c]`: the lender of each page, from 1, or 0 for this replica. `[0]`: no page
        is borrowed.
        """
        with self._changed:
            for number, words in enumerate(copies.tolist()):
                span = spans[number].tolist() if len(spans) else [0, 0]
                source = sources[number].tolist() if len(sources) else 0
                copy = _Copy(*words, *span, *[source])
                if copy.direction == COPY_SAVE_STATE and self._states is not None:
                    # When this copy runs, a later plan may have put another state on the page.
                    copy = replace(copy, seen=self._states.seen(copy.hot))
                if copy.is_save:
                    self._saves.append((copy, after))
                    self.saves += 1
                else:
                    self._restores.append(copy)
            self._outstanding += len(copies)
            self._changed.notify()

    def wait_for_saves(self, number: int) -> None:
        """Waits until the save with this number and all earlier saves have ended. Counted as a wait of rows."""
        begun = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._saved >= number)
            self._waited_us += 1e6 * (time.perf_counter() - begun)

    def wait(self, us: int, socket: int, plan: int) -> None:
        """Waits until a copy ends, no copy is left, a plan after `plan` is launched, or `us` microseconds have passed.

        `socket` receives plans: an unread plan there also finishes the wait.
        """
        with suppress(BlockingIOError):
            os.eventfd_read(self._news)
        with self._changed:
            if self._ended or not self._outstanding or self._plans != plan:
                return
        select.select([self._news, socket], [], [], us / 1e6)

    def report(self) -> tuple[Int32s, Int32s, Int32s]:
        """Returns the copies that ended since the last call, `[c, 2]`, their time, `[2]`, and the rows' wait, `[1]`.

        The times are `[0]` if there is nothing to report.
        """
        with self._changed:
            waited = int(self._waited_us)
            self._waited_us -= waited
            waits = np.array([waited] if waited else [], np.int32)
            if not self._ended:
                return np.zeros((0, COPY_END_WORDS), np.int32), np.zeros(0, np.int32), waits
            ended, self._ended = self._ended, []
            taken = [int(us) for us in self._busy_us]
            self._busy_us = [us - whole for us, whole in zip(self._busy_us, taken, strict=True)]
            self._outstanding -= len(ended)
        return np.array(ended, np.int32), np.array(taken, np.int32), waits

    def _next(self) -> tuple[_Copy, Event | None]:
        with self._changed:
            self._changed.wait_for(lambda: self._restores or self._saves)
            return (self._restores.popleft(), None) if self._restores else self._saves.popleft()

    def _run(self) -> None:
        while True:
            copy, after = self._next()
            fine = after is None or _reached(after)
            begun = time.perf_counter()
            moves: list[tuple[torch.Tensor, Bytes]] = []
            try:
                if self._writes or copy.direction != COPY_SAVE:
                    pages = self._pages(copy)
                    moves = self._moves(copy, pages)
                    fine = fine and self._copy(copy, moves, pages)
            except Exception as error:
                # The brain recomputes blocks that can't be copied.
                print(f"a page was not copied: {type(error).__name__}: {error}", file=sys.stderr)
                fine = False
            taken = time.perf_counter() - begun
            if self._rate is not None:
                size = sum(there.nbytes for there, _ in moves)
                time.sleep(max(0.0, size / self._rate - taken))
                taken = time.perf_counter() - begun
            with self._changed:
                self._ended.append((copy.ticket, COPY_OK if fine else COPY_FAILED))
                self._busy_us[int(not copy.is_save)] += 1e6 * taken
                self._saved += copy.is_save
                self._changed.notify_all()
                os.eventfd_write(self._news, 1)

    def _pages(self, copy: _Copy) -> HostParts:
        """Returns the host tier that contains a copy's page. A lender's tier is mapped when it is first read."""
        if not copy.source:
            return self._host.parts
        if copy.source not in self._lent:
            descriptor = self._lenders[copy.source - 1]
            if descriptor is None:
                raise ValueError(f"replica {copy.source - 1} lends nothing to this one")
            sizes = PageSizes(self._kv.page_bytes, 0 if self._states is None else self._states.nbytes)
            self._lent[copy.source] = LentPages(descriptor, sizes)
        return self._lent[copy.source].parts

    def _copy(self, copy: _Copy, moves: list[tuple[torch.Tensor, Bytes]], parts: HostParts) -> bool:
        """Copies a page or a state. Returns false if the content differs from what was saved."""
        if copy.is_of_state:
            return self._copy_state(copy, moves, parts)
        save = copy.is_save
        if not save and self._checksums and not parts.is_sealed(copy.host):
            print(f"host page {copy.host} is not as it was saved", file=sys.stderr)
            return False
        self._device.move(moves, save=save)
        if save and self._checksums:
            self._host.seal(copy.host, copy.first, copy.count or self._kv.page_size)
        return True

    def _copy_state(self, copy: _Copy, moves: list[tuple[torch.Tensor, Bytes]], parts: HostParts) -> bool:
        """Copies a state and its number of positions. Returns false if the content differs from what was saved."""
        assert self._states is not None
        if not copy.is_save and self._checksums and not parts.is_state_sealed(copy.host):
            print(f"host state page {copy.host} is not as it was saved", file=sys.stderr)
            return False
        self._device.move(moves, save=copy.is_save)
        if not copy.is_save:
            self._states.has_come(copy.hot, int(parts.seen[copy.host]))
            return True
        parts.seen[copy.host] = copy.seen
        if self._checksums:
            self._host.seal_state(copy.host)
        return True

    def _moves(self, copy: _Copy, parts: HostParts) -> list[tuple[torch.Tensor, Bytes]]:
        """Returns the moves of a copy: pairs of bytes in device memory and in host memory."""
        if copy.is_of_state:
            return self._moves_of_state(copy, parts.states)
        pages = parts.pages
        kv, moves, at = self._kv, [], 0
        for part, pieces in self._parts:
            is_index = part is kv.index
            number = copy.host if is_index and kv.backed else copy.hot
            restored = not kv.backed or is_index == (copy.direction == COPY_RESTORE_INDEX)
            for piece, layers in pieces:
                at_host = pages[copy.host, at : at + piece.shape[1]]
                at += len(at_host)
                if copy.direction == COPY_SAVE or restored:
                    moves.append((self._rows(piece[number], layers, copy), self._rows(at_host, layers, copy)))
        return moves

    def _moves_of_state(self, copy: _Copy, pages: Bytes) -> list[tuple[torch.Tensor, Bytes]]:
        if self._states is None:
            raise ValueError("the model has no states")
        moves, at = [], 0
        for piece in self._states.page(copy.hot):
            moves.append((piece, pages[copy.host, at : at + len(piece)]))
            at += len(piece)
        return moves

    def _layers(self, part: Part) -> list[int]:
        """Returns the number of layers in each pool of a part."""
        return [len(pool) // (part.page_count * self._kv.page_size) for pool in part.pools]

    def _rows(self, page: _Page, layers: int, copy: _Copy) -> _Page:
        """Returns the bytes of a page that a copy includes: a range of positions in each layer."""
        if not copy.count:
            return page
        positions = slice(copy.first, copy.first + copy.count)
        return page.reshape(layers, self._kv.page_size, -1)[:, positions]


@dataclass(frozen=True)
class _Copy:
    """A copy, with the fields of a plan."""

    ticket: int
    direction: int
    hot: int
    host: int
    first: int
    count: int
    source: int
    seen: int = 0
    """The number of positions that a saved state includes."""

    @property
    def is_save(self) -> bool:
        return self.direction in (COPY_SAVE, COPY_SAVE_STATE)

    @property
    def is_of_state(self) -> bool:
        return self.direction >= COPY_SAVE_STATE


def _reached(event: Event) -> bool:
    """Waits for rows. Returns false if they can no longer be computed; the next step raises that error."""
    try:
        event.wait()
    except Exception as error:
        print(f"a page was not saved: {type(error).__name__}: {error}", file=sys.stderr)
        return False
    return True
