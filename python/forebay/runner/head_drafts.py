"""Drafts by a draft head: it continues from the features that the model's steps have written to pages.

In each step the head writes its entries for all tokens that the model computes (`Decoder.attach`). So a cached prefix
has entries too, and each draft takes only one pass of the head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from forebay.compute.eager import TorchCompute
from forebay.compute.rows import Compute, Launch, Rows
from forebay.device import Device, host_array
from forebay.layers.decoder import Decoder
from forebay.layers.draft_heads import DraftHead
from forebay.layers.params import Report
from forebay.protocol.frames import Int32s
from forebay.protocol.plan import Plan
from forebay.runner.draft_rows import with_drafts
from forebay.state.config import RunnerConfig
from forebay.state.slots import Int64s, SlotTables
from forebay.weights.load import iter_kept, weight_shapes


class HeadDrafts:
    """Proposes the next tokens of rows."""

    def __init__(
        self, config: RunnerConfig, device: Device, model: Callable[[], Decoder], compute: Callable[[], Compute]
    ) -> None:
        """`model` returns the model, which has the draft head once built. `compute` is called in queued work."""
        assert config.draft is not None
        self.most = config.draft.tokens
        """The number of drafts per row."""
        self._config, self._device, self._model, self._compute = config, device, model, compute

    @property
    def _head(self) -> DraftHead:
        head = self._model().draft_head
        assert isinstance(head, DraftHead)
        return head

    def load(self, report: Report) -> None:
        """Fills the weights."""
        config, head = self._config, self._head
        assert config.draft is not None
        assert config.head is not None
        model, shape = config.draft.model, config.head.shape
        if config.load_format == "dummy":
            head.params.randomise(config.seed, report)
        else:
            head.params.check(weight_shapes(model))
            head.params.load(iter_kept(model, shape, lambda name: False), report)
        head.loaded()

    def warm_up(self) -> None:
        """Does nothing: the model's warm-up has a decode row that may get drafts, so it runs the head too."""

    def propose(self, plan: Plan, tables: SlotTables, most_rows: int) -> Plan:
        """Returns the plan with drafts. All earlier work must have ended."""
        return with_drafts(plan, most_rows, self.most, partial(self._propose, plan, tables))

    def _propose(self, plan: Plan, tables: SlotTables, slot: Int64s, start: Int64s, wanted: Int64s) -> list[Int32s]:
        # The last position of a context has no draft after it.
        counts = np.minimum(wanted, tables.context_length - 1 - start)
        order = np.argsort(-counts, kind="stable")
        told: Int32s = host_array(self._device, (len(slot), self.most), np.int32)
        with self._device.launching():
            # A draft may be the first token of a page, so the plan's page writes are applied before drafting.
            tables.write_pages(plan.page_writes)
            self._device.queue(partial(self._draft, tables, slot[order], start[order], counts[order], told))
            done = self._device.event()
        done.wait()
        found: list[Int32s] = [np.zeros(0, np.int32)] * len(slot)
        for at, row in enumerate(order.tolist()):
            found[row] = told[at, : counts[row]].copy()
        return found

    def _draft(self, tables: SlotTables, slot: Int64s, start: Int64s, counts: Int64s, told: Int32s) -> None:
        """Computes drafts of rows, which are sorted by descending number of drafts. Runs as queued work."""
        compute, head, device = self._compute(), self._head, self._device
        assert isinstance(compute, TorchCompute)
        states = None
        tokens = tables.token_pool.new_zeros(told.shape)
        for nth in range(int(counts.max(initial=0))):
            rows = int((counts > nth).sum())
            at, ones = np.arange(rows), np.ones(rows, np.int64)
            position = start[:rows] + nth
            forward = compute.forward(Launch.of(Rows(slot[:rows], position, ones, at), device))
            states, found = head.draft(forward, None if states is None else states[:rows])
            (entries,) = device.copy_in(slot[:rows] * tables.stride + position + 1)
            tables.token_pool.view(-1).index_copy_(0, entries, found)
            tokens[:rows, nth] = found
        device.copy_out(tokens, told)
