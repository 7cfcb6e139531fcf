"""The tables of sparse slots: the positions that their hot rows contain (HiSparse, SGLang #21932)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from forebay.attention.hot_rows import NEVER, GroupRows
from forebay.device import Device
from forebay.protocol.constants import NO_PAGE, PAGE_WRITE_WORDS, SLOT_WORDS, SlotRecord
from forebay.protocol.frames import Int32s
from forebay.protocol.plan import Plan
from forebay.state.checks import PlanError, within
from forebay.state.config import RunnerConfig
from forebay.state.staging import StepInputs
from forebay.weights.config import ModelConfig


class HotRows:
    """The state of the hot rows of sparse slots, on the device, and which slots are sparse, on the host.

    An indexed layer and the layers that share its choice are a *group*. They have hot rows for the same positions. The
    last column of each table of a group is a dummy: it is written, but never read.
    """

    def __init__(
        self, config: RunnerConfig, model: ModelConfig, pages: int, host: Sequence[torch.Tensor], device: Device
    ) -> None:
        """`pages`: hot pages. `host`: each layer's rows in the host tier, `[host pages, page_size, width]`."""
        assert model.indexer is not None
        self._limits = config.slots, config.pages_per_slot, config.row_pages
        self._pages = pages
        self.host = host
        self.count = config.row_pages * config.page_size
        """The number of hot rows per slot."""
        shapes = self._shapes(config, model)
        place = device.torch_device
        self.host_table = torch.full(shapes["host_table"], NO_PAGE, dtype=torch.int32, device=place)
        self.table = torch.full(shapes["table"], NO_PAGE, dtype=torch.int32, device=place)
        self._row_of = device.zeros(shapes["row_of"], torch.int16)
        self._owner = device.zeros(shapes["owner"], torch.int32)
        self._stamp = device.zeros(shapes["owner"], torch.int32)
        self.clock = torch.zeros(config.slots, dtype=torch.int32, device=place)
        """The number of steps of each slot since it became sparse."""
        self.sparse = np.zeros(config.slots, np.bool_)
        """True for sparse slots. Used on the host."""

    @staticmethod
    def _shapes(config: RunnerConfig, model: ModelConfig) -> dict[str, tuple[int, ...]]:
        assert model.indexer is not None
        groups, slots = len(model.indexer.layers), config.slots
        return {
            "host_table": (slots, config.pages_per_slot),
            "table": (slots, config.row_pages),
            "row_of": (groups, slots, config.context_length + 1),
            "owner": (groups, slots, config.row_pages * config.page_size + 1),
        }

    @classmethod
    def bytes_of(cls, config: RunnerConfig, model: ModelConfig) -> int:
        """Bytes of the tables of all slots."""
        elements = {"host_table": 4, "table": 4, "row_of": 2, "owner": 4 + 4}
        shapes = cls._shapes(config, model)
        return sum(int(np.prod(shapes[name])) * size for name, size in elements.items())

    def group(self, number: int) -> GroupRows:
        """Returns the tables of an indexed layer and of the layers that share its choice. Runs as queued work."""
        return GroupRows(self._row_of[number], self._owner[number], self._stamp[number])

    def read(self, plan: Plan) -> None:
        """Checks the plan's writes to these tables, after its new slots have been checked. Raises `PlanError`."""
        slots, indices, row_pages = self._limits
        if len(plan.slots):
            self.sparse[plan.slots[:, SlotRecord.SLOT]] = False
        if len(plan.page_writes):
            within(plan.page_writes[:, 2] + 1, self._pages + 1, "page write: page + 1")
        if len(plan.host_writes):
            _check(plan.host_writes, (slots, indices, len(self.host[0])), "host write")
        if len(plan.hot_rows):
            _check(plan.hot_rows, (slots, row_pages, self._pages), "hot rows")
            self._become_sparse(plan.hot_rows)

    def check_rows(self, slot: npt.NDArray[np.int64], length: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_] | None:
        """Returns bool [r], true for sparse slots; None: there are none.

        Raises `PlanError` if a row of a sparse slot has several positions.
        """
        sparse = self.sparse[slot]
        if not sparse.any():
            return None
        if (length[sparse] > 1).any():
            raise PlanError(f"rows of sparse slots with {length[sparse].tolist()} positions, and not one")
        return sparse

    def clear(self, inputs: StepInputs, page_table: torch.Tensor) -> None:
        """Removes all pages of new slots from these tables and from `page_table`. Runs as queued work."""
        new = inputs.records("slots", SLOT_WORDS)[:, SlotRecord.SLOT]
        for table in (page_table, self.host_table, self.table):
            table.index_fill_(0, new, NO_PAGE)

    def write(self, inputs: StepInputs) -> None:
        """Writes table entries of host pages and of pages for hot rows, whose rows then contain no position.

        Runs as queued work.
        """
        for table, name in ((self.host_table, "host_writes"), (self.table, "hot_rows")):
            slot, index, page = inputs.column(name).view(-1, PAGE_WRITE_WORDS).unbind(1)
            table.view(-1).index_copy_(0, slot.long() * table.shape[1] + index, page)
        begun = inputs.records("hot_rows", PAGE_WRITE_WORDS)[:, 0]
        self._owner.index_fill_(1, begun, NEVER)
        self._stamp.index_fill_(1, begun, 0)
        self.clock.index_fill_(0, begun, 0)

    def forget_pages(self) -> None:
        """Removes all pages of all slots. Runs as queued work."""
        self.host_table.fill_(NO_PAGE)
        self.table.fill_(NO_PAGE)

    def _become_sparse(self, writes: Int32s) -> None:
        named = np.unique(writes[:, 0])
        entries = np.unique(writes[:, 0].astype(np.int64) * self._limits[2] + writes[:, 1])
        if not len(entries) == len(writes) == len(named) * self._limits[2]:
            raise PlanError(f"{len(writes)} pages for the hot rows of {len(named)} slots, which need {self._limits[2]}")
        self.sparse[named] = True


def _check(writes: Int32s, limits: tuple[int, int, int], what: str) -> None:
    for column, (limit, name) in enumerate(zip(limits, ("slot", "index", "page"), strict=True)):
        within(writes[:, column], limit, f"{what}: {name}")
