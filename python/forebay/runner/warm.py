"""The plans of a warm-up, so that no request waits for the initialisation of libraries and kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from forebay.protocol.constants import FLAG_SAMPLE, NO_PAGE, SLOT_WORDS, SlotFloats, SlotRecord
from forebay.protocol.plan import Plan
from forebay.state.config import RunnerConfig


def warm_plans(
    config: RunnerConfig, flag: int, backed: bool, in_order: bool = False, drafts: int = 0
) -> Iterator[Plan]:
    """Yields a prompt that uses all options, a tiny prompt in slot 0 and, if the model generates, a decode row.

    `flag` is the flag of the rows.

    `backed`: each hot page needs a host page. `in_order`: no position may be computed twice. `drafts`: the number of
    drafts that the hand may add to the decode row.
    """
    length = min(2, config.context_length, config.page_size)
    pages = np.zeros((1, 3), np.int32)
    row = np.array([[0, 0, length, flag]], np.int32)
    prompt = replace(_slot(length), rows=row, page_writes=pages, host_writes=pages if backed else pages[:0])
    if flag == FLAG_SAMPLE:
        # Rows with few options use other samplers. The next plan resets the slot.
        yield asking_all(prompt)
    yield prompt
    decode = length if in_order else length - 1
    room = min(config.context_length, config.page_size) - decode
    if flag == FLAG_SAMPLE and room > 0:
        tokens = np.full(1 if drafts else 0, min(1 + drafts, room), np.int32)
        yield Plan(rows=np.array([[0, decode, 1, FLAG_SAMPLE]], np.int32), row_tokens=tokens)


def asking_all(plan: Plan) -> Plan:
    """Returns the plan, with new slots that use a bias, penalties, a draw with all filters, and log-probabilities."""
    slots, floats = plan.slots.copy(), plan.slot_floats.copy()
    slots[:, SlotRecord.LOGPROBS], slots[:, SlotRecord.TOP_K], slots[:, SlotRecord.BIAS_COUNT] = 1, 1, 1
    floats[:] = 1
    floats[:, [SlotFloats.TOP_P, SlotFloats.MIN_P]] = 0.9, 0.01
    ids, values = np.zeros(len(slots), np.int32), np.ones(len(slots), np.float32)
    return replace(plan, slots=slots, slot_floats=floats, bias_ids=ids, bias_values=values)


def sparse_plan(config: RunnerConfig, host_pages: int) -> Plan | None:
    """Returns a sparse row of slot 0 that reads host page 0, whatever its content; None: there is no room for it.

    So a device that can't read host memory fails here, rather than later when pages run short.
    """
    size = config.page_size
    if config.context_length <= size or host_pages < 2:
        return None
    return replace(
        _slot(size + 1),
        rows=np.array([[0, size, 1, FLAG_SAMPLE]], np.int32),
        page_writes=np.array([(0, 0, NO_PAGE), (0, 1, 1)], np.int32),
        host_writes=np.array([(0, 0, 0), (0, 1, 1)], np.int32),
        hot_rows=np.array([(0, index, 2 + index) for index in range(config.row_pages)], np.int32),
    )


def _slot(tokens: int) -> Plan:
    """Returns a plan that rewrites slot 0, with this many tokens."""
    slots = np.zeros((1, SLOT_WORDS), np.int32)
    slots[0, [SlotRecord.TOKEN_COUNT, SlotRecord.PROMPT_LEN]] = tokens
    slots[0, [SlotRecord.LOGPROBS, SlotRecord.ARENA_OFFSET]] = -1
    floats = np.array([[0, 1, 0, 1, 0, 0]], np.float32)
    return Plan(slots=slots, slot_floats=floats, tokens=np.zeros(tokens, np.int32))
