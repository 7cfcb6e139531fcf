"""The slot tables: what each slot's tokens, pages and sampling parameters are."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from forebay.device import Device
from forebay.runner.config import RunnerConfig
from forebay.worker.wire import Float32s, Int32s, Plan, SlotFloat, SlotWord

Int64s = npt.NDArray[np.int64]


class PlanError(ValueError):
    """A plan that names what does not exist: the brain and the hand disagree about the tables."""


class SlotTables:
    """Rows by slot. Tokens and pages lie on the device, sampling parameters on the host, where plans bring them."""

    def __init__(self, config: RunnerConfig, device: Device) -> None:
        self._device = device
        self.slots = config.slots
        self.context_length = config.context_length
        self.pages_per_slot = config.pages_per_slot
        self.stride = config.context_length + 1
        # One more than the context: the token sampled at its very end is stored too.
        self.token_pool = torch.zeros(config.slots, self.stride, dtype=torch.int32, device=device.torch_device)
        # -1 makes a page that the brain forgot to write an error instead of someone else's page.
        self.page_table = torch.full(
            (config.slots, self.pages_per_slot), -1, dtype=torch.int32, device=device.torch_device
        )
        self.prompt_len = np.zeros(config.slots, np.int32)
        self.segment = np.zeros(config.slots, np.int32)
        # Where a prompt's embeddings begin in the arena, in bytes; -1: its tokens have those of the model.
        self.embeds = np.full(config.slots, -1, np.int64)
        self.top_k = np.zeros(config.slots, np.int32)
        self.min_total = np.zeros(config.slots, np.int32)
        self.logprobs = np.full(config.slots, -1, np.int32)
        self.seed = np.zeros(config.slots, np.uint64)
        self.floats = np.zeros((config.slots, len(SlotFloat)), np.float32)  # by SlotFloat
        # Greedy and nothing else: what most rows of most servers ask for takes one comparison to recognise.
        self.plain = np.zeros(config.slots, np.bool_)
        self.stop_ids: dict[int, Int32s] = {}
        self.biases: dict[int, tuple[Int32s, Float32s]] = {}

    def apply(self, plan: Plan, arena: npt.NDArray[np.uint8]) -> None:
        """Overwrites the plan's new slots and page table entries."""
        if len(plan.slots):
            self._write_slots(plan, arena)
        if len(plan.page_writes):
            slot, index, page = plan.page_writes.T.astype(np.int64)
            _within(slot, self.slots, "page write: slot")
            _within(index, self.pages_per_slot, "page write: index")
            flat = self._device.upload(slot * self.pages_per_slot + index)
            self.page_table.view(-1).index_copy_(0, flat, self._device.upload(page.astype(np.int32)))

    def _write_slots(self, plan: Plan, arena: npt.NDArray[np.uint8]) -> None:
        records = plan.slots
        slot = records[:, SlotWord.SLOT].astype(np.int64)
        counts = records[:, SlotWord.TOKEN_COUNT].astype(np.int64)
        _within(slot, self.slots, "new slot: slot")
        _within(counts, self.stride + 1, "new slot: token count")

        self.prompt_len[slot] = records[:, SlotWord.PROMPT_LEN]
        self.segment[slot] = records[:, SlotWord.SEGMENT]
        self.embeds[slot] = records[:, SlotWord.EMBEDS_OFFSET]
        self.top_k[slot] = records[:, SlotWord.TOP_K]
        self.min_total[slot] = records[:, SlotWord.MIN_TOTAL]
        self.logprobs[slot] = records[:, SlotWord.LOGPROBS]
        halves = records[:, [SlotWord.SEED_LO, SlotWord.SEED_HI]].view(np.uint32).astype(np.uint64)
        self.seed[slot] = halves[:, 0] | halves[:, 1] << np.uint64(32)
        floats = plan.slot_floats
        self.floats[slot] = floats
        self.plain[slot] = (
            (floats[:, SlotFloat.TEMPERATURE] == 0)
            & ~penalised(floats)
            & (records[:, SlotWord.LOGPROBS] < 0)
            & (records[:, SlotWord.STOP_COUNT] == 0)
            & (records[:, SlotWord.BIAS_COUNT] == 0)
        )

        inline = records[:, SlotWord.ARENA_OFFSET] < 0
        flat = ragged(slot[inline] * self.stride, counts[inline])
        pool = self.token_pool.view(-1)
        pool.index_copy_(0, self._device.upload(flat), self._device.upload(plan.tokens))
        for at in np.flatnonzero(~inline):
            tokens = self._from_arena(arena, int(records[at, SlotWord.ARENA_OFFSET]), int(counts[at]))
            first = int(slot[at]) * self.stride
            pool[first : first + len(tokens)] = self._device.upload(tokens)
        self._write_ragged(plan, slot)

    def _write_ragged(self, plan: Plan, slot: Int64s) -> None:
        stops, biases = plan.slots[:, SlotWord.STOP_COUNT], plan.slots[:, SlotWord.BIAS_COUNT]
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

    @staticmethod
    def _from_arena(arena: npt.NDArray[np.uint8], offset: int, count: int) -> Int32s:
        end = offset + 4 * count
        if end > len(arena):
            raise PlanError(f"tokens at bytes {offset}..{end} of an arena of {len(arena)}")
        tokens: Int32s = arena[offset:end].copy().view(np.int32)
        return tokens


def ragged(first: Int64s, counts: Int64s) -> Int64s:
    """The concatenation of `first[i] .. first[i] + counts[i]`."""
    before = np.cumsum(counts) - counts
    return np.repeat(first - before, counts) + np.arange(counts.sum(), dtype=np.int64)


def penalised(floats: Float32s) -> npt.NDArray[np.bool_]:
    """Which rows of a table by `SlotFloat` have a penalty that is on."""
    on: npt.NDArray[np.bool_] = (
        (floats[:, SlotFloat.REPETITION_PENALTY] != 1)
        | (floats[:, SlotFloat.PRESENCE_PENALTY] != 0)
        | (floats[:, SlotFloat.FREQUENCY_PENALTY] != 0)
    )
    return on


def _within(values: Int64s, limit: int, what: str) -> None:
    if values.min() < 0 or values.max() >= limit:
        raise PlanError(f"{what} {int(values.min())}..{int(values.max())} is not within 0..{limit}")
