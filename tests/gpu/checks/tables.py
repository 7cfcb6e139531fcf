"""Plans applied and prepared on the device, compared with the hand's own tables and a loop over positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from forebay.device import open_device
from forebay.gpu.interface import Kernels
from forebay.gpu.tables import Received, StepBuffers, Tables, describe, places
from forebay.protocol.constants import FLAG_SAMPLE, SlotRecord
from forebay.protocol.frames import Int32s
from forebay.protocol.plan import Plan
from forebay.state.config import RunnerConfig
from forebay.state.slots import SlotTables
from forebay.state.staging import StepInputs
from tests.gpu.checks.memory import CPU, Numbers, poisoned
from tests.hand.support import FAMILIES, PlanBuilder, Sampling, hf_config, wire_config

UNKNOWN = -77
Row = tuple[int, int, int, int]
"""Slot, start, length and flags."""
_HOST = open_device("cpu", 1)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a hand's tables."""

    slots: int = 6
    context: int = 37
    page: int = 4
    pages: int = 30
    stride: int = 8
    vocabulary: int = 131

    @cached_property
    def config(self) -> RunnerConfig:
        """The config of a hand with these tables."""
        model = hf_config(FAMILIES["llama"][1], "LlamaForCausalLM")
        model |= {"max_position_embeddings": max(128, self.context), "vocab_size": self.vocabulary}
        changes = {"slots": self.slots, "context_length": self.context, "page_size": self.page}
        return RunnerConfig.from_dict(wire_config(model, **changes))

    def tables(self, device: torch.device = CPU) -> Tables:
        """Tables whose tokens are all unknown."""
        sizes = self.slots, self.context, self.vocabulary, self.page, self.pages, self.stride
        tables = Tables.make(*sizes, device)
        tables.token_pool[: self.slots] = UNKNOWN
        return tables

    def filled(self, random: np.random.Generator, device: torch.device = CPU) -> Tables:
        """Tables in which every slot has tokens and pages."""
        tables = self.tables(device)
        tokens, pages = tables.token_pool[: self.slots], tables.page_table[: self.slots]
        tokens.copy_(torch.from_numpy(random.integers(0, self.vocabulary, tokens.shape)))
        pages.copy_(torch.from_numpy(random.integers(0, self.pages, pages.shape)))
        return tables


SMALL = Sizes()


def errors_of(device: torch.device = CPU) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


def received(plan: Plan, arena_tokens: Int32s | None = None, device: torch.device = CPU) -> Received:
    """A plan in a buffer, with other words after it."""
    body = np.concatenate((plan.body, np.full(40, UNKNOWN, np.int32)))
    arena = np.zeros(1, np.int32) if arena_tokens is None else arena_tokens
    words, columns, tokens = (torch.from_numpy(part).to(device) for part in (body, places(plan), arena))
    return Received(words, columns, tokens)


def apply(operators: Kernels, given: Received, tables: Tables, errors: torch.Tensor) -> None:
    operators.apply_slots(given, tables, errors)
    operators.write_table(given, "page_writes", tables.page_table, -1, tables.page_count, errors)


def check_applied(
    operators: Kernels, plans: list[dict[str, Any]], sizes: Sizes = SMALL, device: torch.device = CPU
) -> None:
    """Applies plans on the device, and compares the tables with the hand's.

    A plan has `slots` by number (tokens, true if they are in the arena, sampling), and `pages` by slot and index.
    """
    expected, tables, errors = (
        SlotTables(sizes.config, sizes.vocabulary, _HOST),
        sizes.tables(device),
        errors_of(device),
    )
    expected.token_pool.fill_(UNKNOWN)
    for values in plans:
        arena, builder = np.zeros(0, np.int32), PlanBuilder()
        slots: Mapping[int, tuple[list[int], bool, Sampling]] = values["slots"]
        for slot, (tokens, in_arena, sampling) in slots.items():
            offset = 4 * len(arena) if in_arena else -1
            builder.slot(slot, tokens, sampling, arena_offset=offset)
            if in_arena:
                arena = np.append(arena, np.array(tokens, np.int32))
        builder.page_writes = [(slot, index, page) for (slot, index), page in values["pages"].items()]
        plan = builder.build()
        writes = expected.read(plan, arena.view(np.uint8))
        if writes is not None:
            expected.write(writes, StepInputs(plan, _HOST))
        with poisoned():
            apply(operators, received(plan, arena if len(arena) else None, device), tables, errors)
        for slot, record, floats in zip(plan.slots[:, SlotRecord.SLOT], plan.slots, plan.slot_floats, strict=True):
            assert tables.words[slot].tolist() == record.tolist()
            assert tables.floats[slot].tolist() == floats.tolist()
    assert not errors
    assert tables.token_pool[: sizes.slots].cpu().equal(expected.token_pool)
    assert tables.page_table[: sizes.slots].cpu().equal(expected.page_table)
    assert tables.page_table[sizes.slots].eq(sizes.pages).all()


def prepare(operators: Kernels, rows: list[Row], tables: Tables, padded: tuple[int, int]) -> tuple[StepBuffers, int]:
    """Prepares `rows` in buffers of the padded size. Returns the buffers and the errors."""
    device = tables.token_pool.device
    plan = Plan(rows=np.array(rows, np.int32).reshape(-1, 4)).staged()
    buffers, errors = StepBuffers.make(*padded, device), errors_of(device)
    for buffer in vars(buffers).values():
        buffer.fill_(UNKNOWN)
    with poisoned():
        operators.prepare(received(plan, None, device), tables, buffers, errors, None)
    return buffers, int(errors)


def check_prepared(
    operators: Kernels,
    rows: list[Row],
    more: tuple[int, int],
    seed: int = 0,
    sizes: Sizes = SMALL,
    device: torch.device = CPU,
) -> None:
    """`more`: the rows and tokens of padding."""
    tables = sizes.filled(np.random.default_rng(seed), device)
    total = sum(length for _, _, length, _ in rows)
    size = len(rows) + more[0], total + more[1]
    buffers, errors = prepare(operators, rows, tables, size)
    assert errors == 0, describe(errors)
    null = (sizes.slots, 0, 1, 0)
    pool, pages = tables.token_pool.cpu().numpy(), tables.page_table.cpu().numpy()
    tokens: list[int] = []
    positions: list[int] = []
    writes: list[int] = []
    ends, first, last, sampling = [], [], [], []
    padded = [*rows, *[null] * more[0]]
    for slot, start, length, flags in padded:
        first.append(len(tokens))
        for position in range(start, start + length):
            if len(tokens) < size[1]:
                tokens.append(int(pool[slot, position]))
                positions.append(position)
                page = int(pages[slot, position // sizes.page])
                writes.append(page * sizes.stride + position % sizes.page)
        count = len(tokens) - first[-1]
        ends.append(start + count)
        last.append(max(len(tokens) - 1, 0))
        sampling.append(slot if flags & FLAG_SAMPLE else sizes.slots)
    nobody = size[1] - len(tokens)
    assert buffers.tokens.tolist() == tokens + [0] * nobody
    assert buffers.positions.tolist() == positions + [0] * nobody
    assert buffers.writes.tolist() == writes + [sizes.pages * sizes.stride] * nobody
    assert buffers.slots.tolist() == [slot for slot, _, _, _ in padded]
    assert buffers.first.tolist() == [*first, len(tokens)]
    assert buffers.ends.tolist() == ends
    assert buffers.last.tolist() == last
    assert buffers.sampling.tolist() == sampling


def check_move_words(operators: Kernels, count: int, device: torch.device = CPU, seed: int = 0) -> None:
    """Copies words to the device and back. The words after them are unchanged."""
    here = Numbers(torch.device("cpu"), seed).bits(count).int()
    back, there = (
        torch.full((count + 9,), UNKNOWN, dtype=torch.int32),
        torch.full((count + 9,), UNKNOWN).int().to(device),
    )
    if device.type == "cuda":
        here, back = here.pin_memory(), back.pin_memory()
    operators.move_words(here, there[:count])
    operators.move_words(there[:count], back[:count])
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    for found in (there.cpu(), back):
        assert found[:count].equal(here)
        assert (found[count:] == UNKNOWN).all()
