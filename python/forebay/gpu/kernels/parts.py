"""The division of one-token rows into parts for programs, by length, and the join of the parts' results.

As in stream-K and FlashInfer's plans (Ye et al. 2025), as many programs as fill the device share the positions of all
rows evenly, so many programs read one long row among short rows. The device computes the division once per step. A
graph serves any lengths, since its grid is an upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from forebay.gpu.interface import PagedRows
from forebay.gpu.kernels.launch import dependents, launch, power_of_2
from forebay.gpu.kernels.shape import Shape, Tiles
from forebay.gpu.kernels.walk import beside_sinks, seen_from

MOST = 32
"""The largest number of parts of a row, a power of 2. A join reads all parts at once."""
RECORD_WORDS = 8
"""The number of words per part.

- its token or -1, the slot, and the end of the row;
- the part's first position and end;
- the row's number of parts, the cell of the row's first part, and the part's index in the row.
"""
_JOINS_ITSELF = 8
"""The largest number of heads per group with which a row's last program joins the parts. For more heads, a separate
kernel is faster.
"""


@triton.jit
def part_length(positions, count, TILE: tl.constexpr):
    """Returns the length of each of `count` parts, a multiple of TILE. The last part may be shorter."""
    return tl.cdiv(tl.cdiv(positions, count), TILE) * TILE


@triton.jit
def length_of_row(positions, share, MOST: tl.constexpr, TILE: tl.constexpr):
    """Returns the length of each part of a row, except the last. A row shorter than two shares has one part."""
    return tl.where(positions < 2 * share, positions, tl.maximum(share, part_length(positions, MOST, TILE)))


@triton.jit(do_not_specialize=["rows", "items", "counters", "programs", "steps"])
def divide_kernel(
    work,
    at,
    counts,
    slots,
    ends,
    first,
    rows,
    items,
    counters,
    programs,
    steps,
    WORDS: tl.constexpr,
    MOST: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes `work` [items, WORDS], and zeros to `counts` [counters]; one program.

    `at` [2, rows + 1] receives, for each row, the number of parts before the row, and how many of these parts are in
    rows with several parts. Each of `programs` has an equal share of all positions. `steps`: the steps of a binary
    search among rows.
    """
    total = tl.zeros([1], tl.int64)
    for begin in range(0, rows, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        inside = row < rows
        one = inside & (tl.load(first + row + 1, mask=inside) - tl.load(first + row, mask=inside) == 1)
        end = tl.load(ends + row, mask=inside, other=0)
        total += tl.sum(tl.where(one, end - seen_from(end - 1, WINDOW, TILE), 0).to(tl.int64), 0)
    share = tl.maximum(part_length(tl.sum(total, 0), programs, TILE), TILE).to(tl.int32)
    parts, cells = 0, 0
    for begin in range(0, rows, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        inside = row < rows
        one = inside & (tl.load(first + row + 1, mask=inside) - tl.load(first + row, mask=inside) == 1)
        end = tl.load(ends + row, mask=inside, other=0)
        positions = tl.maximum(end - seen_from(end - 1, WINDOW, TILE), 1)
        count = tl.where(one, tl.cdiv(positions, length_of_row(positions, share, MOST, TILE)), 0)
        several = tl.where(count > 1, count, 0)
        tl.store(at + row, parts + tl.cumsum(count, 0) - count, mask=inside)
        tl.store(at + rows + 1 + row, cells + tl.cumsum(several, 0) - several, mask=inside)
        parts += tl.sum(count, 0)
        cells += tl.sum(several, 0)
    tl.store(at + rows, parts)
    # Threads read values that other threads have written.
    tl.debug_barrier()
    for begin in range(0, items, BLOCK):
        item = begin + tl.arange(0, BLOCK)
        used = item < parts
        low = tl.zeros([BLOCK], tl.int32)
        high = tl.zeros([BLOCK], tl.int32) + (rows - 1)
        for _ in range(steps):
            middle = (low + high + 1) // 2
            there = tl.load(at + middle, mask=low < high, other=0) <= item
            low = tl.where((low < high) & there, middle, low)
            high = tl.where((low < high) & (there == 0), middle - 1, high)
        before = tl.load(at + low)
        count = tl.load(at + low + 1) - before
        end = tl.load(ends + low)
        from_ = seen_from(end - 1, WINDOW, TILE)
        length = length_of_row(end - from_, share, MOST, TILE)
        record, inside = work + item * WORDS, item < items
        tl.store(record, tl.where(used, tl.load(first + low), -1), mask=inside)
        tl.store(record + 1, tl.load(slots + low), mask=inside)
        tl.store(record + 2, end, mask=inside)
        tl.store(record + 3, from_ + (item - before) * length, mask=inside)
        tl.store(record + 4, tl.minimum(from_ + (item - before + 1) * length, end), mask=inside)
        tl.store(record + 5, count, mask=inside)
        tl.store(record + 6, tl.load(at + rows + 1 + low), mask=inside)
        tl.store(record + 7, item - before, mask=inside)
    for begin in range(0, counters, BLOCK):
        cell = begin + tl.arange(0, BLOCK)
        tl.store(counts + cell, 0, mask=cell < counters)


@triton.jit
def joined(
    sums,
    weights,
    sinks,
    cell,
    head,
    count,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    MOST: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Returns the output [DIM_BLOCK] of a head, joined from `count` parts, at most MOST, whose cells start at `cell`.

    The join is that of flash decoding (Dao et al. 2023). Other programs may have written the parts during this launch.
    """
    s = tl.arange(0, MOST)
    d = tl.arange(0, DIM_BLOCK)
    place = (cell + s).to(tl.int64) * HEADS + head
    inside = s < count
    top = tl.load(weights + place * 2, mask=inside, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(weights + place * 2 + 1, mask=inside, other=0.0, cache_modifier=".cg")
    there = inside[:, None] & (d < DIM)[None, :]
    part = tl.load(sums + place[:, None] * DIM + d[None, :], mask=there, other=0.0, cache_modifier=".cg")
    highest = tl.max(top, 0)
    # A part without positions has weight 0 and sums of 0.
    share = tl.where(total > 0.0, tl.exp2(top - tl.where(highest == float("-inf"), 0.0, highest)), 0.0)
    weight = tl.sum(total * share, 0)
    of_parts, weight = beside_sinks(highest, weight, sinks, head, True, SINKS)
    return tl.sum(part * share[:, None], 0) * (of_parts / tl.where(weight == 0.0, 1.0, weight))


@triton.jit
def keep_part(
    out,
    sums,
    weights,
    sinks,
    counts,
    counter,
    token,
    count,
    first_cell,
    number,
    first_head,
    head,
    alive,
    summed,
    top,
    total,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    MOST: tl.constexpr,
    JOINS: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Stores a walk's results of some heads [BLOCK]: the final output of a row with one part, otherwise join data.

    JOINS: the heads are the GROUP from `first_head` on, and the last of a row's `count` programs joins their results.
    `counts[counter]` counts the finished programs; the last one resets it to 0. Sums are in the order of parts,
    whichever program is the last.
    """
    d = tl.arange(0, DIM_BLOCK)
    wide = alive[:, None] & (d < DIM)[None, :]
    if count == 1:
        share, total = beside_sinks(top, total, sinks, head, alive, SINKS)
        result = summed * (share / tl.where(total == 0.0, 1.0, total))[:, None]
        tl.store(out + (token * HEADS + head[:, None]) * DIM + d[None, :], result, mask=wide)
    else:
        place = (first_cell + number).to(tl.int64) * HEADS + head
        tl.store(sums + place[:, None] * DIM + d[None, :], summed, mask=wide)
        tl.store(weights + place * 2, top, mask=alive)
        tl.store(weights + place * 2 + 1, total, mask=alive)
        if JOINS:
            # The stores of all threads have to precede the count.
            tl.debug_barrier()
            before = tl.atomic_add(counts + counter, 1, sem="acq_rel", scope="gpu")
            if before == count - 1:
                # The counter is reset before the joins. If it were reset after them, its address would be spilled to
                # the stack for groups of eight heads (Qwen3-30B-A3B).
                tl.store(counts + counter, 0)
                for i in tl.static_range(GROUP):
                    one = joined(
                        sums, weights, sinks, first_cell, first_head + i, count, HEADS, DIM, DIM_BLOCK, MOST, SINKS
                    )
                    tl.store(out + (token * HEADS + first_head + i) * DIM + d, one, mask=d < DIM)


@triton.jit
def join_kernel(
    at,
    first,
    sums,
    weights,
    sinks,
    out,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    MOST: tl.constexpr,
    OVERLAP: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Joins one head of a row, if the row has several parts; grid: rows, HEADS."""
    dependents(OVERLAP)
    row, head = tl.program_id(0), tl.program_id(1)
    count = tl.load(at + row + 1) - tl.load(at + row)
    cell = tl.load(at + tl.num_programs(0) + 1 + row)
    token = tl.load(first + row).to(tl.int64)
    if count < 2:
        return
    d = tl.arange(0, DIM_BLOCK)
    result = joined(sums, weights, sinks, cell, head, count, HEADS, DIM, DIM_BLOCK, MOST, SINKS)
    tl.store(out + (token * HEADS + head) * DIM + d, result, mask=d < DIM)


def programs_of(fill: int, blocks: int, rows: int) -> int:
    """Returns how many parts of all rows together fill a GPU, if a part needs `blocks` programs and a GPU `fill`."""
    return max(1, min(fill // blocks, rows * MOST))


@dataclass(frozen=True)
class Work:
    """The parts of a step's rows, and memory for their programs' results."""

    items: int
    records: torch.Tensor  # int32 [items, RECORD_WORDS]
    at: torch.Tensor  # int32 [2, rows + 1]: the parts before each row, and those of them in rows with several parts
    counts: torch.Tensor  # int32 [cells * blocks]: the finished programs of a row; 0 between launches
    sums: torch.Tensor  # float32 [cells, heads, dim]
    weights: torch.Tensor  # float32 [cells, heads, 2]: the largest score and the sum of weights
    joins: bool
    """True if the last program of a row joins its parts, so that no join kernel is launched.

    On an H100 such joins take 3 to 5 us longer than a join kernel. So this is only true with fewer than two programs
    per row: rows of equal length then have one part each, and a join kernel would have nothing to do.
    """

    @classmethod
    def of(cls, rows: PagedRows, shape: Shape, tiles: Tiles, window: int) -> Work:
        """Returns the parts for layers of these shapes and this window. The first layer of a step computes them."""
        key = (shape.heads, shape.group, shape.dim, tiles, window)
        found = rows.works.get(key)
        if found is None:
            found = rows.works[key] = cls._divide(rows, shape, tiles, window)
        assert isinstance(found, cls)
        return found

    @classmethod
    def _divide(cls, rows: PagedRows, shape: Shape, tiles: Tiles, window: int) -> Work:
        count, blocks, device = len(rows.slots), shape.blocks(tiles), rows.ends.device
        programs = programs_of(tiles.programs, blocks, count)
        # A row with several parts covers at least two shares, and has at most one more part than shares.
        items, cells = count + programs, programs + programs // 2

        def empty(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        records, at, counts = empty(items, RECORD_WORDS), empty(2, count + 1), empty(cells * blocks)
        launch(
            divide_kernel,
            (1,),
            *(records, at, counts, rows.slots, rows.ends, rows.first),
            *(count, items, cells * blocks, programs, count.bit_length()),
            WORDS=RECORD_WORDS,
            MOST=MOST,
            WINDOW=window,
            TILE=tiles.tile,
            BLOCK=512,
            num_warps=4,
        )
        sums = empty(cells, shape.heads, shape.dim, dtype=torch.float32)
        weights = empty(cells, shape.heads, 2, dtype=torch.float32)
        joins = shape.group <= _JOINS_ITSELF and programs < 2 * count
        return cls(items, records, at, counts, sums, weights, joins)

    def join(self, out: torch.Tensor, rows: PagedRows, shape: Shape, sinks: torch.Tensor | None) -> None:
        """Writes `out` [n, heads, dim] for rows with several parts, unless their programs already joined them."""
        if self.joins:
            return
        launch(
            join_kernel,
            (len(rows.slots), shape.heads),
            *(self.at, rows.first, self.sums, self.weights, out if sinks is None else sinks, out),
            HEADS=shape.heads,
            DIM=shape.dim,
            DIM_BLOCK=power_of_2(shape.dim),
            MOST=MOST,
            SINKS=sinks is not None,
            overlap=len(out) == 1,
            num_warps=4,
        )
