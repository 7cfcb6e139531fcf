"""Counters of tokens, compared with lists that are counted again, over random sequences of slot writes and samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.device import open_device
from forebay.state.config import RunnerConfig
from forebay.state.slots import PlanError, SlotTables
from forebay.state.staging import StepInputs
from tests.hand.support import FAMILIES, PlanBuilder, Sampling, hf_config, wire_config

VOCABULARY = 7
SLOTS = 11
DEVICE = open_device("cpu", 1)
CONFIG = RunnerConfig.from_dict(wire_config(hf_config(FAMILIES["llama"][1], "LlamaForCausalLM"), slots=SLOTS))
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=9)
WRITE = st.tuples(st.integers(0, SLOTS - 1), TOKENS, st.integers(1, 9), st.booleans(), st.booleans())
SAMPLE = st.tuples(st.integers(0, SLOTS - 1), st.integers(0, VOCABULARY - 1))


def write(tables: SlotTables, builder: PlanBuilder) -> None:
    plan = builder.build()
    writes = tables.read(plan, np.zeros(0, np.uint8))
    assert writes is not None
    tables.write(writes, StepInputs(plan, DEVICE))


def counted(tokens: list[int]) -> list[int]:
    return np.bincount(np.array(tokens, np.int64), minlength=VOCABULARY).tolist()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.lists(WRITE, min_size=1, max_size=6, unique_by=lambda w: w[0]), SAMPLE), max_size=12))
def test_counts_are_those_of_the_slots_tokens(events: list[list[tuple] | tuple[int, int]]) -> None:
    tables = SlotTables(CONFIG, VOCABULARY, DEVICE)
    seen: dict[int, list[int]] = {}
    generated: dict[int, list[int]] = {}
    for event in events:
        if isinstance(event, tuple):
            slot, token = event
            if slot in seen:
                begin = torch.from_numpy(tables.counts.begin(tables.counts.lines(np.array([slot]))))
                tables.counts.add(begin, torch.tensor([token]))
                seen[slot].append(token)
                generated[slot].append(token)
            continue
        builder = PlanBuilder()
        for slot, tokens, prompt_len, penalty, embedded in event:
            prompt_len = min(prompt_len, len(tokens))
            sampling = Sampling(frequency_penalty=0.5 * penalty)
            builder.slot(slot, tokens, sampling, prompt_len, embeds_offset=0 if embedded else -1)
            seen.pop(slot, None)
            generated.pop(slot, None)
            if penalty:
                seen[slot], generated[slot] = tokens[prompt_len * embedded :], tokens[prompt_len:]
        write(tables, builder)
        lines = tables.counts.lines(np.arange(SLOTS))
        assert sorted(np.flatnonzero(lines >= 0).tolist()) == sorted(seen)
        taken = lines[lines >= 0].tolist()
        assert len(set(taken)) == len(taken)
    for slot in seen:
        found = tables.counts.table[int(tables.counts.lines(np.array([slot]))[0])]
        assert found.tolist() == [counted(seen[slot]), counted(generated[slot])]


def test_there_is_no_table_until_a_slot_has_a_penalty_and_no_line_for_those_without() -> None:
    tables = SlotTables(CONFIG, VOCABULARY, DEVICE)
    builder = PlanBuilder()
    for slot in range(SLOTS):
        builder.slot(slot, [1, 2])
    write(tables, builder)
    assert tables.counts.nbytes == 0
    builder = PlanBuilder()
    builder.slot(3, [1, 2], Sampling(presence_penalty=1.0))
    write(tables, builder)
    small = tables.counts.nbytes
    assert 0 < small < SLOTS * 2 * VOCABULARY * 4
    builder = PlanBuilder()
    for slot in range(SLOTS):
        builder.slot(slot, [1, 2], Sampling(repetition_penalty=1.5))
    write(tables, builder)
    assert tables.counts.nbytes == SLOTS * 2 * VOCABULARY * 4


def test_a_slot_is_written_once_a_plan() -> None:
    builder = PlanBuilder()
    builder.slot(3, [1])
    builder.slot(3, [2])
    with pytest.raises(PlanError, match="are not distinct"):
        write(SlotTables(CONFIG, VOCABULARY, DEVICE), builder)
