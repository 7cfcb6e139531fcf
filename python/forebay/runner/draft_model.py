"""A draft model: a smaller model of the same vocabulary proposes tokens, which the step then verifies as drafts.

It has a separate runner, with the same slot numbers and separate pages. Before each step it computes those known tokens
of a row that are not on its pages yet. These are a prompt that the model found in the prefix cache, or tokens after a
wrong draft. So its memory need not be kept consistent with the model's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np

from forebay.device import Device
from forebay.layers.params import Report
from forebay.models.registry import Model
from forebay.protocol.constants import FLAG_SAMPLE, SLOT_WORDS, SlotRecord
from forebay.protocol.frames import Int32s
from forebay.protocol.plan import Plan
from forebay.protocol.result import StepResult
from forebay.runner.draft_rows import with_drafts
from forebay.state.config import RunnerConfig
from forebay.state.pages import KvPool
from forebay.state.slots import Int64s, SlotTables
from forebay.weights.config import ModelConfig
from forebay.weights.encoder_config import EncoderConfig

MOST_TOKENS = 1 << 16
"""The most positions of all pages of the draft model; at least the context length."""
_NONE = np.zeros(0, np.int32)
_GREEDY = np.array([0, 1, 0, 1, 0, 0], np.float32)


class DraftRunner(Protocol):
    """The interface of a runner that a draft model uses."""

    config: RunnerConfig
    model: Model
    device: Device
    kv: KvPool
    tables: SlotTables
    model_config: ModelConfig | EncoderConfig

    def load(self, report: Report) -> None:
        """Fills the weights."""

    def warm_up(self) -> None:
        """Runs steps in advance, so that no request waits for initialisation."""

    def step(self, plan: Plan) -> StepResult:
        """Executes a plan and waits for its result."""


class DraftModel:
    """Proposes the next tokens of rows."""

    def __init__(self, runner: DraftRunner, most: int, vocabulary: int) -> None:
        """`runner` has a `config` of `config_of`. `most`: drafts per row. `vocabulary`: the model's vocabulary size."""
        config = runner.config
        self.runner = runner
        self.most = most
        self._vocabulary = min(vocabulary, runner.model_config.vocab_size)
        self._size, self._context = config.page_size, config.context_length
        self._budget = config.chunked_prefill_size
        # By slot, the tokens whose keys and values are in its pages.
        self._seen: dict[int, Int32s] = {}
        self._pages: dict[int, list[int]] = {}
        """The pages of each slot; the most recently used slot is last."""
        self._free = list(range(runner.kv.page_count))
        self._written: set[int] = set()
        self._step = 0

    @staticmethod
    def config_of(config: RunnerConfig) -> RunnerConfig:
        """Returns the configuration of the draft model's runner."""
        assert config.draft is not None
        tokens = max(min(config.max_total_tokens or MOST_TOKENS, MOST_TOKENS), config.context_length)
        return replace(
            config,
            model=config.draft.model,
            draft=None,
            max_total_tokens=-(-tokens // config.page_size) * config.page_size,
            quantization=None,
            host_bytes=None,
            host_ratio=None,
            host_pages=None,
        )

    def load(self, report: Report) -> None:
        """Fills the weights."""
        self.runner.load(report)

    def warm_up(self) -> None:
        """See `Runner.warm_up`."""
        self.runner.warm_up()

    def propose(self, plan: Plan, tables: SlotTables, most_rows: int) -> Plan:
        """Returns the plan with drafts, except for rows that do not fit into the draft model's pages.

        All earlier work on the device must have ended.
        """

        def propose(slot: Int64s, start: Int64s, _wanted: Int64s) -> list[Int32s]:
            tokens = tables.token_pool[slot].cpu().numpy()
            return self._propose(slot.tolist(), [row[: at + 1] for row, at in zip(tokens, start.tolist(), strict=True)])

        return with_drafts(plan, most_rows, self.most, propose)

    def _propose(self, slots: list[int], known: list[Int32s]) -> list[Int32s]:
        """Returns tokens after the `known` tokens of `slots`; no tokens for a slot without room."""
        found: list[Int32s] = [_NONE] * len(slots)
        rows = []
        for number, (slot, tokens) in enumerate(zip(slots, known, strict=True)):
            fits = len(tokens) + self.most <= self._context and int(tokens.max()) < self._vocabulary
            if fits and self._grow(slot, len(tokens) + self.most, slots):
                rows.append(number)
        if not rows:
            return found
        own = [slots[number] for number in rows]
        first = self._extend(own, [known[number] for number in rows])
        proposed = [first]
        ends = np.array([len(known[number]) for number in rows])
        for nth in range(self.most - 1):
            proposed.append(self._run(np.stack([own, ends + nth, np.ones_like(ends)], axis=1)))
        for number, slot, tokens in zip(rows, own, np.stack(proposed, axis=1), strict=True):
            self._seen[slot] = np.concatenate([known[number], tokens[:-1]])
            bad = np.flatnonzero(tokens >= self._vocabulary)
            found[number] = tokens[: bad[0]] if len(bad) else tokens
        return found

    def _extend(self, slots: list[int], known: list[Int32s]) -> Int32s:
        """Computes the known tokens that are not computed yet. Returns the token after each row."""
        last = np.zeros(len(slots), np.int32)
        begins = []
        for slot, tokens in zip(slots, known, strict=True):
            seen = self._seen.get(slot, _NONE)
            both = min(len(seen), len(tokens) - 1)
            differ = np.flatnonzero(seen[:both] != tokens[:both])
            begins.append(int(differ[0]) if len(differ) else both)
        for numbers, spans in self._chunks(begins, [len(tokens) for tokens in known]):
            parts = [(slots[n], known[n], span) for n, span in zip(numbers, spans, strict=True)]
            tokens = self._run(np.array([(slot, *span) for slot, _, span in parts]), parts)
            for number, token, (start, length) in zip(numbers, tokens, spans, strict=True):
                if start + length == len(known[number]):
                    last[number] = token
        return last

    def _chunks(self, begins: list[int], ends: list[int]) -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
        """Yields steps that compute the positions `begins .. ends` of each row: rows, and their starts and lengths."""
        at = list(begins)
        while True:
            room, numbers, spans = self._budget, [], []
            for number, end in enumerate(ends):
                length = min(end - at[number], room)
                if length > 0:
                    numbers.append(number)
                    spans.append((at[number], length))
                    at[number] += length
                    room -= length
            if not numbers:
                return
            yield numbers, spans

    def _run(self, rows: Int64s, parts: list[tuple[int, Int32s, tuple[int, int]]] | None = None) -> Int32s:
        """Runs a step of rows (slot, start, length), after writing the tokens of `parts`. Returns sampled tokens."""
        self._step += 1
        flags = np.full((len(rows), 1), FLAG_SAMPLE)
        plan = Plan(self._step, rows=np.concatenate([rows, flags], axis=1).astype(np.int32))
        writes = [
            (slot, index, page)
            for slot in rows[:, 0].tolist()
            for index, page in enumerate(self._pages[slot])
            if slot not in self._written
        ]
        new = sorted({slot for slot in rows[:, 0].tolist() if slot not in self._written})
        if new:
            slots = np.zeros((len(new), SLOT_WORDS), np.int32)
            slots[:, SlotRecord.SLOT] = new
            slots[:, [SlotRecord.TOKEN_COUNT, SlotRecord.PROMPT_LEN]] = 1
            slots[:, [SlotRecord.LOGPROBS, SlotRecord.ARENA_OFFSET]] = -1
            floats, tokens = np.tile(_GREEDY, (len(new), 1)), np.zeros(len(new), np.int32)
            plan = replace(plan, slots=slots, slot_floats=floats, tokens=tokens)
            plan = replace(plan, page_writes=np.array(writes, np.int32))
            self._written.update(new)
        runner = self.runner
        if new:
            # Known tokens are written after the slots.
            runner.step(replace(plan, rows=plan.rows[:0]).staged())
            plan = Plan(self._step, rows=plan.rows)
        for slot, tokens, (start, length) in parts or []:
            entries = slot * runner.tables.stride + np.arange(start, start + length)
            runner.device.queue(partial(runner.tables.write_tokens, entries, tokens[start : start + length]))
        return runner.step(plan.staged()).tokens

    def _grow(self, slot: int, positions: int, busy: list[int]) -> bool:
        """Gives a slot pages for this many positions. Returns False if there are too few.

        If necessary, it takes the pages of idle slots, least recently used first.
        """
        own = self._pages.pop(slot, [])
        self._pages[slot] = own
        lacks = -(-positions // self._size) - len(own)
        while len(self._free) < lacks:
            idle = next((other for other in self._pages if other not in busy and self._pages[other]), None)
            if idle is None:
                return False
            self._free += self._pages.pop(idle)
            self._seen.pop(idle, None)
        if lacks > 0:
            own += [self._free.pop() for _ in range(lacks)]
            self._written.discard(slot)
        return True
