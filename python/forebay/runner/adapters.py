"""Adapters in places: a thread reads them from files, and the rows of slots with that place use them."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch

from forebay.compute.low_rank import PREFIX, AdapterStacks
from forebay.compute.rows import RowAdapters
from forebay.device import Event
from forebay.layers.adapted import AdaptedModules, Adapter, LowRank
from forebay.protocol.constants import (
    PLACE_END_WORDS,
    PLACE_FAILED_DIGEST,
    PLACE_FAILED_FILES,
    PLACE_FAILED_MEMORY,
    PLACE_OK,
    SlotRecord,
)
from forebay.protocol.frames import Int32s
from forebay.protocol.plan import Plan
from forebay.state.checks import PlanError, within
from forebay.state.config import PlaceConfig
from forebay.state.slots import Int64s
from forebay.weights.adapter import ChangedError, read_adapter
from forebay.weights.errors import ModelError
from forebay.weights.shards import Cut

NO_PLACES = np.zeros((0, PLACE_END_WORDS), np.int32)


class AdapterPlaces:
    """The places of adapters, the adapters that may be loaded there, and the place of each slot.

    `report` is called by the thread that collects results. All other public methods are called by the thread that
    launches steps.
    """

    def __init__(
        self,
        config: PlaceConfig,
        modules: AdaptedModules,
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
        stacks: AdapterStacks | None = None,
    ) -> None:
        """`stacks` have the matrices of all places; None: each adapter has separate memory on the device."""
        self._config, self._cuts, self._dtype, self._device = config, modules.cuts, dtype, device
        self._stacks = stacks
        self._place = np.full(slots, -1, np.int64)
        self._known: dict[int, Mapping[str, Any]] = {}
        self._lock = threading.Lock()
        self._adapters: dict[int, tuple[int, Adapter]] = {}
        """The adapters in places: for each place, the adapter's number and matrices."""
        self._coming: dict[int, tuple[int, int, Future[Adapter]]] = {}
        """The adapters that are being read for places, by ticket."""
        self._kept: OrderedDict[int, Adapter] = OrderedDict()
        """Adapters that were read into host memory; the last used one is at the end."""
        self._reader = ThreadPoolExecutor(1, "adapters")

    @property
    def nbytes(self) -> int:
        """Bytes of all places, if each contained the largest adapter."""
        cuts = [cut for name, cut in self._cuts.items() if name.startswith(PREFIX)]
        of_rank = sum(cut.rows.size + (0 if cut.columns is None else cut.columns.size) for cut in cuts)
        return self._config.places * self._config.rank * of_rank * self._dtype.itemsize

    def facts(self) -> dict[str, Any]:
        """The facts for `ready`."""
        names = {name.split(".", 3)[3] for name in self._cuts if name.startswith(PREFIX)}
        return {"lora_bytes": self.nbytes, "lora_modules": sorted(names)}

    def order(self, order: Mapping[str, Any]) -> None:
        """Executes an `adapter` frame."""
        number = order["id"]
        if order["op"] == "know":
            self._known[number] = order["manifest"]
            return
        self._known.pop(number, None)
        with self._lock:
            self._kept.pop(number, None)
            # No slot uses the place any more.
            self._adapters = {at: held for at, held in self._adapters.items() if held[0] != number}

    def read(self, plan: Plan, before: Event) -> None:
        """Starts the plan's writes to places, and records the places of new slots. Raises `PlanError`.

        `before` is reached after all steps that may use the former adapter of a place.
        """
        if len(plan.slots):
            self._place[plan.slots[:, SlotRecord.SLOT]] = -1
        if len(plan.slot_places):
            slot, place = plan.slot_places.T.astype(np.int64)
            within(place, self._config.places, "slot place: place")
            self._place[slot] = place
        for ticket, place, number in plan.place_writes.tolist():
            if place >= self._config.places or number not in self._known:
                raise PlanError(f"adapter {number} to place {place}: it is not known, or there is no such place")
            with self._lock:
                self._adapters.pop(place, None)
                kept = self._kept.get(number)
                if kept is not None:
                    self._kept.move_to_end(number)
            future = self._reader.submit(self._bring, place, number, self._known[number], kept, before)
            with self._lock:
                self._coming[ticket] = place, number, future

    def of_rows(self, slot: Int64s) -> RowAdapters | None:
        """Returns the adapters of rows of these slots; None: all rows use the base model. Raises `PlanError`."""
        place = self._place[slot]
        named = set(place[place >= 0].tolist())
        if not named:
            return None
        with self._lock:
            missing = named - self._adapters.keys()
            if missing:
                raise PlanError(f"rows of places {sorted(missing)}, which have no adapter")
            if self._stacks is not None:
                return RowAdapters(place, self._stacks)
            return RowAdapters(place, {at: self._adapters[at][1] for at in named})

    def report(self, wait_us: int) -> Int32s:
        """Returns the places whose adapters have been loaded since the last call, in the form of a result's column.

        If no load has ended, it waits for one, for at most `wait_us` microseconds.
        """
        with self._lock:
            coming = dict(self._coming)
        if not coming:
            return NO_PLACES
        if wait_us:
            wait([future for _, _, future in coming.values()], wait_us / 1e6, "FIRST_COMPLETED")
        ended = []
        for ticket, (place, number, future) in coming.items():
            if not future.done():
                continue
            error = _error(future.exception())
            with self._lock:
                del self._coming[ticket]
                if error == PLACE_OK:
                    self._adapters[place] = number, future.result()
            ended.append((ticket, error))
        return np.array(ended, np.int32).reshape(-1, PLACE_END_WORDS)

    def _bring(
        self, place: int, number: int, manifest: Mapping[str, Any], kept: Adapter | None, before: Event
    ) -> Adapter:
        """Copies an adapter to a place, once no step reads the former adapter. Called by the reading thread.

        Returns the adapter's matrices: with stacks those in host memory, otherwise those on the device.
        """
        adapter = self._load(number, manifest) if kept is None else kept
        before.wait()
        if self._stacks is None:
            return {name: LowRank(*(one.to(self._device) for one in pair)) for name, pair in adapter.items()}
        self._stacks.put(place, adapter)
        return adapter

    def _keep(self, matrix: torch.Tensor, cut: Cut) -> torch.Tensor:
        """Returns a part of a file's matrix as a copy, so that the whole matrix is freed."""
        return matrix.to(self._dtype, copy=not cut.is_whole, memory_format=torch.contiguous_format)

    def _load(self, number: int, manifest: Mapping[str, Any]) -> Adapter:
        """Reads an adapter into host memory."""
        adapter = {}
        for name, a, b in read_adapter(manifest):
            cut = self._cuts.get(name)
            if cut is None or cut.whole != (b.shape[0], a.shape[1]):
                raise ModelError(f"{name} is no module of {a.shape[1]} inputs and {b.shape[0]} outputs")
            outputs, inputs = cut.places
            adapter[name] = LowRank(self._keep(a[:, inputs], cut), self._keep(b[outputs], cut))
        with self._lock:
            self._kept[number] = adapter
            while len(self._kept) > self._config.places + self._config.kept:
                self._kept.popitem(last=False)
        return adapter


def _error(error: BaseException | None) -> int:
    if error is None:
        return PLACE_OK
    print(f"an adapter can't be read: {error}", file=sys.stderr)
    if isinstance(error, ChangedError):
        return PLACE_FAILED_DIGEST
    return PLACE_FAILED_MEMORY if isinstance(error, MemoryError | RuntimeError) else PLACE_FAILED_FILES
