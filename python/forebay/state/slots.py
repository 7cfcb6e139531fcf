"""The slot tables: each slot's tokens, pages and sampling parameters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from forebay.device import Device
from forebay.protocol.constants import PAGE_WRITE_WORDS, SLOT_WORDS, SlotFloats, SlotRecord, SlotValue
from forebay.protocol.frames import Float32s, Int32s
from forebay.protocol.plan import Plan
from forebay.state.checks import PlanError, columns_within, within
from forebay.state.config import RunnerConfig
from forebay.state.counts import Int64s, Recount, TokenCounts, ragged
from forebay.state.hot_rows import HotRows
from forebay.state.staging import StepInputs

__all__ = ["Int64s", "PlanError", "SlotTables", "Writes", "penalised", "ragged"]


_NO_IDS = np.zeros(0, np.int32)


@dataclass(frozen=True)
class Writes:
    """The part of a plan's writes that goes to the device; the host's tables have already been written."""

    tokens: int  # the number of tokens of new slots in the plan itself
    from_arena: tuple[Int64s, Int32s] | None  # the entries of the token pool, and the tokens to write there
    pages: bool  # True if the plan writes to page tables
    recount: Recount | None
    slots: bool = False  # True if there are new slots
    backing: bool = False  # True if the plan writes host pages, or pages of hot rows
    window: bool = False  # True if the plan writes to the tables of the window part


class SlotTables:
    """Tables by slot. Tokens, pages and counts are on the device, sampling parameters are on the host.

    A plan is applied in two parts: `read` on the host, which may be one plan ahead of the device, and `write` as queued
    work. The host's decisions use the plans that it has read so far. Queued work uses no table of the host.
    """

    def __init__(
        self,
        config: RunnerConfig,
        vocabulary: int,
        device: Device,
        hot: HotRows | None = None,
        window_pages: int = 0,
    ) -> None:
        """`hot` None: slots are never sparse. `window_pages`: pages of the window part; 0: there is no window part."""
        self._device = device
        self.hot = hot
        self.slots = config.slots
        self.vocabulary = vocabulary
        self.context_length = config.context_length
        self.pages_per_slot = config.pages_per_slot
        self._page_limits = {"page write: slot": self.slots, "page write: index": self.pages_per_slot}
        self.stride = config.context_length + 1
        lines, place = config.slots + 1, device.torch_device
        # One more than the context, because the token that is sampled at the end of the context is stored too.
        self.all_tokens = torch.zeros(lines, self.stride, dtype=torch.int32, device=place)
        # Initially -1, so that a page which the brain forgot to write raises instead of being another request's page.
        self.all_pages = torch.full((lines, self.pages_per_slot), -1, dtype=torch.int32, device=place)
        # The lines that the brain writes. The last line belongs to the null slot, for padding rows.
        self.token_pool, self.page_table = self.all_tokens[: config.slots], self.all_pages[: config.slots]
        # If slots are never sparse, both parts of a page have the same page number.
        self.index_page_table = self.page_table if hot is None else hot.host_table
        self.window_table: torch.Tensor | None = None
        """The page table of the window part, int32 [slots, pages per slot]; None: there is no window part."""
        if window_pages:
            self.window_table = torch.full_like(self.page_table, -1)
        self._window_limits = {
            "window write: slot": self.slots,
            "window write: index": self.pages_per_slot if window_pages else 0,
        }
        self.counts = TokenCounts(config.slots, vocabulary, device)
        self.prompt_len = np.zeros(config.slots, np.int32)
        self._values: dict[str, tuple[Int64s, int]] = {}
        # Columns whose values affect logits.
        self._adjusting = ["allowed_counts"]
        self.segment = self.values("segments", 0)
        # The byte offset in the arena of a prompt's embeddings; -1: the prompt uses the model's embeddings.
        self.embeds = self.values("embeds", -1)
        self.top_k = np.zeros(config.slots, np.int32)
        self.min_total = np.zeros(config.slots, np.int32)
        self.logprobs = np.full(config.slots, -1, np.int32)
        self.seed = np.zeros(config.slots, np.uint64)
        self.floats = np.zeros((config.slots, len(SlotFloats)), np.float32)  # by SlotFloats
        # Flags for the common cases, so that one lookup recognises them: rows that need no adjustment and no
        # log-probabilities (`untouched`), and among these the greedy rows (`plain`).
        self.untouched = np.zeros(config.slots, np.bool_)
        self.plain = np.zeros(config.slots, np.bool_)
        self.stop_ids: dict[int, Int32s] = {}
        self.biases: dict[int, tuple[Int32s, Float32s]] = {}
        # The only ids that may be sampled, for slots with such a restriction.
        self.allowed: dict[int, Int32s] = {}
        # The slots in `allowed` that allow only stop ids. Stop ids are then not suppressed.
        self.only_stops: set[int] = set()

    def values(self, column: str, absent: int, *, change_logits: bool = False) -> Int64s:
        """Returns the values [slots] that new slots have in one of `SLOT_VALUES`; `absent` for slots without a value.

        The table is kept up to date. `change_logits`: whether the logits of slots with a value have to be adjusted.
        """
        table = np.full(self.slots, absent, np.int64)
        self._values[column] = table, absent
        if change_logits:
            self._adjusting.append(column)
        return table

    def read(self, plan: Plan, arena: npt.NDArray[np.uint8]) -> Writes | None:
        """Writes the host's tables of new slots. Returns the remaining writes for `write`; None: there are none.

        Raises `PlanError`.
        """
        slots, pages = len(plan.slots) > 0, len(plan.page_writes) > 0
        backing = len(plan.host_writes) > 0 or len(plan.hot_rows) > 0
        window = len(plan.window_writes) > 0
        if not slots and not pages and not backing and not window:
            return None
        if pages:
            columns_within(plan.page_writes, self._page_limits)
        if window:
            columns_within(plan.window_writes, self._window_limits)
        if not slots:
            self._read_backing(plan)
            return Writes(0, None, pages, None, backing=backing, window=window)
        slot = plan.slots[:, SlotRecord.SLOT].astype(np.int64)
        counts = plan.slots[:, SlotRecord.TOKEN_COUNT].astype(np.int64)
        within(slot, self.slots, "new slot: slot")
        if len(set(slot.tolist())) < len(slot):
            raise PlanError(f"new slots {slot.tolist()} are not distinct")
        within(counts, self.stride + 1, "new slot: token count")
        self._read_backing(plan)
        self._read_parameters(plan, slot)
        self._read_ragged(plan, slot)
        from_arena = self._from_arena(plan.slots, slot, counts, arena)
        recount = self._recount(slot, counts)
        return Writes(len(plan.tokens), from_arena, pages, recount, slots=True, backing=backing, window=window)

    def write(self, writes: Writes, inputs: StepInputs) -> None:
        """Writes the device's tables of new slots, and page table entries. Runs as queued work."""
        pool = self.token_pool.view(-1)
        if writes.tokens:
            pool.index_copy_(0, self._inline_entries(inputs, writes.tokens), inputs.column("tokens"))
        if writes.from_arena is not None:
            entries, tokens = self._device.copy_in(*writes.from_arena)
            pool.index_copy_(0, entries, tokens)
        if self.hot is not None and writes.slots:
            self.hot.clear(inputs, self.page_table)
        if writes.pages:
            slot, index, page = inputs.column("page_writes").view(-1, PAGE_WRITE_WORDS).unbind(1)
            self.page_table.view(-1).index_copy_(0, slot.long() * self.pages_per_slot + index, page)
        if self.hot is not None and writes.backing:
            self.hot.write(inputs)
        if self.window_table is not None:
            self._write_window(self.window_table, writes, inputs)
        if writes.recount is not None:
            self.counts.write(writes.recount, self.token_pool)

    def _write_window(self, table: torch.Tensor, writes: Writes, inputs: StepInputs) -> None:
        """Writes the table of the window part. Runs as queued work."""
        if writes.slots:
            # A page that the brain forgot to write must raise, and not be a page of the slot's former request.
            table.index_fill_(0, inputs.records("slots", SLOT_WORDS)[:, SlotRecord.SLOT], -1)
        if writes.window:
            slot, index, page = inputs.column("window_writes").view(-1, PAGE_WRITE_WORDS).unbind(1)
            table.view(-1).index_copy_(0, slot.long() * self.pages_per_slot + index, page)

    def write_pages(self, writes: Int32s) -> None:
        """Queues a plan's writes to page tables before the plan itself is read. Raises `PlanError`."""
        if len(writes):
            columns_within(writes, self._page_limits)
            slot, index, page = writes.T.astype(np.int64)
            entries, pages = slot * self.pages_per_slot + index, page.astype(np.int32)
            self._device.queue(partial(self._write_pages, entries, pages))

    def _write_pages(self, entries: Int64s, pages: Int32s) -> None:
        self.page_table.view(-1).index_copy_(0, *self._device.copy_in(entries, pages))

    def write_tokens(self, entries: Int64s, tokens: Int32s) -> None:
        """Overwrites entries [n] of the token pool. Runs as queued work."""
        self.token_pool.view(-1).index_copy_(0, *self._device.copy_in(entries, tokens))

    def forget_pages(self) -> None:
        """Removes all pages of all slots. Runs as queued work."""
        self.page_table.fill_(-1)
        if self.window_table is not None:
            self.window_table.fill_(-1)
        if self.hot is not None:
            self.hot.forget_pages()

    def _read_backing(self, plan: Plan) -> None:
        if self.hot is not None:
            self.hot.read(plan)
        elif len(plan.host_writes) or len(plan.hot_rows):
            raise PlanError("pages of the host's tier in a plan for slots that are never sparse")

    def _inline_entries(self, inputs: StepInputs, total: int) -> torch.Tensor:
        """Returns token pool entries, int64 [total], of the tokens in the plan itself. Runs as queued work."""
        records = inputs.records("slots", SLOT_WORDS)
        counts = records[:, SlotRecord.TOKEN_COUNT] * (records[:, SlotRecord.ARENA_OFFSET] < 0)
        first = records[:, SlotRecord.SLOT] * self.stride - (counts.cumsum(0) - counts)
        offsets = torch.arange(total, device=counts.device)
        return first.repeat_interleave(counts, output_size=total) + offsets

    def _read_parameters(self, plan: Plan, slot: Int64s) -> None:
        records, floats = plan.slots, plan.slot_floats
        self.prompt_len[slot] = records[:, SlotRecord.PROMPT_LEN]
        for column, (table, absent) in self._values.items():
            table[slot] = absent
            given: Int32s = getattr(plan, column)
            table[given[:, SlotValue.SLOT]] = given[:, SlotValue.VALUE]
        self.top_k[slot] = records[:, SlotRecord.TOP_K]
        self.min_total[slot] = records[:, SlotRecord.MIN_TOTAL]
        self.logprobs[slot] = records[:, SlotRecord.LOGPROBS]
        halves = records[:, [SlotRecord.SEED_LO, SlotRecord.SEED_HI]].view(np.uint32).astype(np.uint64)
        self.seed[slot] = halves[:, 0] | halves[:, 1] << np.uint64(32)
        self.floats[slot] = floats
        untouched = (
            ~penalised(floats)
            & (records[:, SlotRecord.LOGPROBS] < 0)
            & (records[:, SlotRecord.STOP_COUNT] == 0)
            & (records[:, SlotRecord.BIAS_COUNT] == 0)
        )
        self.untouched[slot] = untouched
        self.plain[slot] = untouched & (floats[:, SlotFloats.TEMPERATURE] == 0)
        for column in self._adjusting:
            changed = getattr(plan, column)[:, SlotValue.SLOT]
            self.untouched[changed] = self.plain[changed] = False

    def _read_ragged(self, plan: Plan, slot: Int64s) -> None:
        stops, biases = plan.slots[:, SlotRecord.STOP_COUNT], plan.slots[:, SlotRecord.BIAS_COUNT]
        if self.stop_ids or len(plan.stop_ids):
            for number, ids in zip(slot.tolist(), np.split(plan.stop_ids, np.cumsum(stops)[:-1]), strict=True):
                self.stop_ids.pop(number, None)
                if len(ids):
                    self.stop_ids[number] = ids.copy()
        if self.biases or len(plan.bias_ids):
            edges = np.cumsum(biases)[:-1]
            parts = zip(np.split(plan.bias_ids, edges), np.split(plan.bias_values, edges), strict=True)
            for number, (ids, values) in zip(slot.tolist(), parts, strict=True):
                self.biases.pop(number, None)
                if len(ids):
                    self.biases[number] = (ids.copy(), values.copy())
        if self.allowed or len(plan.allowed_counts):
            for number in slot.tolist():
                self.allowed.pop(number, None)
                self.only_stops.discard(number)
            edges = np.cumsum(plan.allowed_counts[:, 1])[:-1]
            for number, ids in zip(plan.allowed_counts[:, 0].tolist(), np.split(plan.allowed_ids, edges), strict=False):
                self.allowed[number] = ids.copy()
                if np.isin(ids, self.stop_ids.get(number, _NO_IDS)).all():
                    self.only_stops.add(number)

    def _from_arena(
        self, records: Int32s, slot: Int64s, counts: Int64s, arena: npt.NDArray[np.uint8]
    ) -> tuple[Int64s, Int32s] | None:
        """Returns `Writes.from_arena`, copied when the plan is read: nothing refers to the arena after the step."""
        offsets = records[:, SlotRecord.ARENA_OFFSET]
        there = np.flatnonzero(offsets >= 0)
        if not len(there):
            return None
        parts = [_tokens_at(arena, int(offsets[at]), int(counts[at])) for at in there]
        return ragged(slot[there] * self.stride, counts[there]), np.concatenate(parts)

    def _recount(self, slot: Int64s, counts: Int64s) -> Recount | None:
        on = penalised(self.floats[slot])
        lines = self.counts.renew(slot, on)
        if not len(lines):
            return None
        mine = slot[on]
        prompt_len = self.prompt_len[mine].astype(np.int64)
        # The token ids of embedded prompts are placeholders, so they are not counted.
        first = np.where(self.embeds[mine] >= 0, np.minimum(prompt_len, counts[on]), 0)
        return self.counts.recount(lines, mine * self.stride, first, prompt_len, counts[on])


def _tokens_at(arena: npt.NDArray[np.uint8], offset: int, count: int) -> Int32s:
    end = offset + 4 * count
    if end > len(arena):
        raise PlanError(f"tokens at bytes {offset}..{end} of an arena of {len(arena)}")
    tokens: Int32s = arena[offset:end].copy().view(np.int32)
    return tokens


def penalised(floats: Float32s) -> npt.NDArray[np.bool_]:
    """Returns bool [rows], true for rows with an active penalty. The columns of `floats` are those of `SlotFloats`."""
    on: npt.NDArray[np.bool_] = (
        (floats[:, SlotFloats.REPETITION_PENALTY] != 1)
        | (floats[:, SlotFloats.PRESENCE_PENALTY] != 0)
        | (floats[:, SlotFloats.FREQUENCY_PENALTY] != 0)
    )
    return on
