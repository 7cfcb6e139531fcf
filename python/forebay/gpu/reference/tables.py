"""Applies and prepares plans with PyTorch's operators.

The number of records of a column exists only on the device. So operators process as many *candidates* as the body could
contain. A candidate that is not a record writes to a cell that is never read.
"""

from __future__ import annotations

import torch

from forebay.gpu.tables import (
    ERROR_RANGE,
    ERROR_READ,
    ERROR_TOKEN,
    ERROR_WRITE,
    Received,
    StepBuffers,
    Tables,
    column_id,
)
from forebay.protocol.constants import (
    FLAG_SAMPLE,
    PAGE_WRITE_WORDS,
    ROW_WORDS,
    SLOT_FLOATS_WORDS,
    SLOT_WORDS,
    SlotRecord,
)


def write_table(
    received: Received, name: str, table: torch.Tensor, least: int, most: int, errors: torch.Tensor
) -> None:
    """See `interface.Plans`."""
    triples, there = records(received, name, PAGE_WRITE_WORDS)
    slot, index, value = triples.unbind(1)
    slots, width = len(table) - 1, table.shape[1]
    cell = there & (slot >= 0) & (slot < slots) & (index >= 0) & (index < width)
    known = (value >= least) & (value < most)
    tell(errors, there & ~(cell & known), ERROR_RANGE)
    scatter(table, slot * width + index, value.masked_fill(~known, -1), cell)


def move_words(source: torch.Tensor, target: torch.Tensor) -> None:
    """See `interface.Plans`."""
    target.copy_(source, non_blocking=True)


def apply_slots(received: Received, tables: Tables, errors: torch.Tensor) -> None:
    """See `interface.Plans`."""
    new, there = records(received, "slots", SLOT_WORDS)
    floats, _ = records(received, "slot_floats", SLOT_FLOATS_WORDS)
    floats = floats[: len(new)]
    stride = tables.token_pool.shape[1]
    slot, length = new[:, SlotRecord.SLOT], new[:, SlotRecord.TOKEN_COUNT]
    fine = (slot >= 0) & (slot < tables.null_slot) & (length >= 0) & (length <= stride)
    tell(errors, there & ~fine, ERROR_RANGE)
    fine &= there
    arena = new[:, SlotRecord.ARENA_OFFSET] >= 0
    inline, _ = records(received, "tokens", 1)
    for source, mine in ((inline[:, 0], ~arena), (received.arena_tokens.long(), arena)):
        behind = length.masked_fill(~(there & mine), 0).cumsum(0)
        at = torch.arange(len(source), device=source.device)
        record = torch.searchsorted(behind, at, right=True)
        wanted = record < len(new)
        record = record.clamp_(max=len(new) - 1)
        cell = at - (behind - length).index_select(0, record) + slot.index_select(0, record) * stride
        scatter(tables.token_pool, cell, source, wanted & fine.index_select(0, record))
    columns = torch.arange(SLOT_WORDS, device=slot.device)
    scatter(tables.words, (slot[:, None] * SLOT_WORDS + columns).view(-1), new.view(-1), _wide(fine, SLOT_WORDS))
    columns = columns[:SLOT_FLOATS_WORDS]
    bits = floats.int().view(-1)
    cells = (slot[: len(floats), None] * SLOT_FLOATS_WORDS + columns).view(-1)
    scatter(tables.floats.view(torch.int32), cells, bits, _wide(fine[: len(floats)], SLOT_FLOATS_WORDS))


def prepare(
    received: Received, tables: Tables, buffers: StepBuffers, errors: torch.Tensor, hot_rows: torch.Tensor | None
) -> None:
    """See `interface.Plans`."""
    _prepare_rows(received, tables, buffers, errors)
    tokens, null_slot = len(buffers.tokens), tables.null_slot
    t = torch.arange(tokens, device=buffers.tokens.device)
    row = (torch.searchsorted(buffers.first, t.int(), right=True) - 1).clamp_(max=len(buffers.slots) - 1)
    behind = buffers.first.index_select(0, row + 1)
    somebody = t < behind
    slot = buffers.slots.index_select(0, row).masked_fill(~somebody, null_slot).long()
    position = (buffers.ends.index_select(0, row) - behind + t).masked_fill(~somebody, 0)
    token = tables.token_pool[slot, position]
    known = (token >= 0) & (token < tables.vocabulary)
    page = tables.page_table[slot, position // tables.page_size].long()
    tell(errors, ~known, ERROR_TOKEN)
    tell(errors, page < 0, ERROR_WRITE)
    page = page.masked_fill(page < 0, tables.page_count)
    buffers.tokens.copy_(token.masked_fill(~known, 0))
    buffers.positions.copy_(position)
    buffers.writes.copy_(page * tables.page_stride + position % tables.page_size)

    read = tables.page_table.index_select(0, buffers.slots)
    used = -(-buffers.ends // tables.page_size)
    if hot_rows is not None:
        used = used.masked_fill(hot_rows.index_select(0, buffers.slots)[:, 0] >= 0, 0)
    within = torch.arange(read.shape[1], device=read.device) < used[:, None]
    tell(errors, within & (read < 0), ERROR_READ)


def _prepare_rows(received: Received, tables: Tables, buffers: StepBuffers, errors: torch.Tensor) -> None:
    rows, tokens = len(buffers.slots), len(buffers.tokens)
    context_length = tables.token_pool.shape[1] - 1
    planned_rows, there = records(received, "rows", ROW_WORDS)
    tell(errors, there[rows:], ERROR_RANGE)
    missing = max(0, rows - len(planned_rows))
    planned_rows = torch.nn.functional.pad(planned_rows[:rows], (0, 0, 0, missing))
    planned = torch.nn.functional.pad(there[:rows], (0, missing))
    slot, start, length, flags = planned_rows.unbind(1)
    fine = planned & (slot >= 0) & (slot < tables.null_slot) & (start >= 0) & (length >= 1)
    fine &= (length <= context_length) & (start <= context_length - length)
    slot, start = slot.masked_fill(~fine, tables.null_slot), start.masked_fill(~fine, 0)
    length = length.masked_fill(~fine, 1)
    behind = length.cumsum(0)
    cut, token = behind.clamp(max=tokens), (behind - length).clamp(max=tokens)
    tell(errors, planned & (~fine | (cut < behind)), ERROR_RANGE)
    buffers.slots.copy_(slot)
    buffers.ends.copy_(start + cut - token)
    buffers.first[:-1].copy_(token)
    buffers.first[-1:].copy_(cut[-1:])
    buffers.last.copy_((cut - 1).clamp(min=0))
    buffers.sampling.copy_(slot.masked_fill(~(fine & (flags & FLAG_SAMPLE > 0)), tables.null_slot))


def records(received: Received, name: str, words: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns candidates for the records of a column, int64 [c, words], and true for those that exist."""
    body = received.body
    first, size = received.places[column_id(name)].long().unbind(0)
    count = len(body) // words
    number = torch.arange(count, device=body.device)
    at = first + torch.arange(count * words, device=body.device)
    found = body.index_select(0, at.clamp_(max=len(body) - 1)).view(count, words).long()
    return found, number < size // words


def _wide(there: torch.Tensor, words: int) -> torch.Tensor:
    return there[:, None].expand(-1, words).reshape(-1)


def scatter(table: torch.Tensor, cells: torch.Tensor, values: torch.Tensor, there: torch.Tensor) -> None:
    """Writes values to cells of a table, for records that exist."""
    flat = table.view(-1)
    extended = torch.cat((flat, flat[:1]))
    extended.index_copy_(0, cells.masked_fill(~there, len(flat)), values.to(table.dtype))
    flat.copy_(extended[:-1])


def tell(errors: torch.Tensor, wrong: torch.Tensor, bit: int) -> None:
    """Sets a bit of the error word if any of `wrong` is true."""
    errors.bitwise_or_(wrong.any().int() * bit)
