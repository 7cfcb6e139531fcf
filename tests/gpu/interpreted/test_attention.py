"""Paged attention of random mixed steps, compared with dense attention in float64."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.gpu import kernels
from forebay.gpu.interface import Kernels
from forebay.gpu.kernels.parts import Work
from forebay.gpu.kernels.shape import Shape, Tiles
from tests.gpu.checks.attention import SCALE, check_attend, check_dense, check_missing_page
from tests.gpu.checks.memory import CPU, Numbers, Paged
from tests.gpu.support import BOTH

ROW = st.one_of(
    st.tuples(st.integers(0, 150), st.just(1)),
    st.tuples(st.just(0), st.integers(2, 30)),
    st.tuples(st.integers(1, 60), st.integers(2, 30)),
)


def in_parts(programs: Callable[[int], int]) -> Any:
    """Divides the rows of one token among about `programs(rows)` programs."""
    return patch.object(
        sys.modules["forebay.gpu.kernels.parts"], "programs_of", lambda fill, blocks, rows: programs(rows)
    )


def check(operators: Kernels, rows: list[tuple[int, int]], *, parts: int = 2, **changes: Any) -> None:
    """Reads each row of one token in `parts` parts on average."""
    with in_parts(lambda rows: parts * rows):
        check_attend(operators, rows, **changes)


@BOTH
@settings(max_examples=5, deadline=None)
@given(
    rows=st.lists(ROW, min_size=1, max_size=4),
    heads=st.sampled_from([(2, 2), (4, 2), (6, 2), (5, 1)]),
    page_size=st.sampled_from([1, 4, 7, 16]),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 9)),
    parts=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 1000),
)
def test_mixed_steps(
    operators: Kernels,
    rows: list[tuple[int, int]],
    heads: tuple[int, int],
    page_size: int,
    padding: tuple[int, int],
    parts: int,
    seed: int,
) -> None:
    check(operators, rows, heads=heads, page_size=page_size, padding=padding, parts=parts, seed=seed)


@BOTH
@settings(max_examples=5, deadline=None)
@given(
    rows=st.lists(ROW, min_size=1, max_size=4),
    heads=st.sampled_from([(2, 2), (6, 2), (5, 1)]),
    page_size=st.sampled_from([1, 7, 16]),
    parts=st.sampled_from([1, 4]),
    window=st.sampled_from([1, 3, 16, 33, 140]),
    cap=st.sampled_from([0.0, 0.5, 30.0]),
    sinks=st.sampled_from([None, 2.0, 30.0]),
    seed=st.integers(0, 1000),
)
def test_windows_caps_and_sinks(
    operators: Kernels,
    rows: list[tuple[int, int]],
    heads: tuple[int, int],
    page_size: int,
    parts: int,
    window: int,
    cap: float,
    sinks: float | None,
    seed: int,
) -> None:
    changes = {"window": window, "cap": cap, "sinks": sinks, "seed": seed}
    check(operators, rows, heads=heads, page_size=page_size, parts=parts, **changes)


@BOTH
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_take_weight_and_give_nothing(operators: Kernels, parts: int, dtype: torch.dtype) -> None:
    rows = [(0, 30), (70, 1), (3, 1), (20, 33), (0, 1)]
    check(operators, rows, heads=(6, 2), page_size=16, parts=parts, sinks=30.0, dtype=dtype)


@pytest.mark.parametrize("parts", [1, 2, 8])
def test_rows_in_parts(parts: int) -> None:
    check(kernels, [(0, 1), (31, 1), (32, 1), (200, 1)], padding=(1, 0), parts=parts)


def test_a_long_row_is_read_by_many_programs() -> None:
    """With 20 programs for a row of 300 positions and three short rows, the long row gets most programs."""
    with in_parts(lambda rows: 20):
        check_attend(kernels, [(8, 1), (299, 1), (3, 1), (0, 1)], padding=(1, 0))
        works = parts_of([9, 300, 4, 1], [1, 1, 1, 1], 0)
    assert [len(works[row]) for row in range(4)] == [1, 10, 1, 1]


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 3000), st.sampled_from([1, 1, 1, 2])), min_size=1, max_size=9),
    programs=st.integers(1, 200),
    window=st.sampled_from([0, 1, 40, 1000]),
)
def test_parts_cover_what_a_row_sees_once(rows: list[tuple[int, int]], programs: int, window: int) -> None:
    """Rows are (end, length). Rows of several tokens have no parts.

    If a row has several parts, each has its own cell.
    """
    ends, lengths = [end + length for end, length in rows], [length for _, length in rows]
    with in_parts(lambda count: programs):
        works = parts_of(ends, lengths, window)
    several = [parts for parts in works.values() if len(parts) > 1]
    cells = [cell for parts in several for _, _, cell in parts]
    assert sorted(cells) == list(range(len(cells)))
    assert len(cells) <= programs + programs // 2
    assert all(parts[-1][0] < parts[-1][1] for parts in works.values())
    for row, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        if length > 1:
            assert row not in works
            continue
        first = max(end - window, 0) if window else 0
        at = works[row][0][0]
        assert first - TILE < at <= first
        for begin, until, _ in works[row]:
            assert begin == at
            at = until
        assert at == end


TILE = 32


def parts_of(ends: list[int], lengths: list[int], window: int) -> dict[int, list[tuple[int, int, int]]]:
    """The parts (begin, end, cell) of each row, in tiles of 32 positions."""
    paged = Paged.make([1] * len(ends), 1, 16, 4, 0, torch.float32)
    rows = replace(paged.rows(lengths), ends=torch.tensor(ends, dtype=torch.int32))
    shape = Shape.of(torch.empty(1, 1, 16), paged.pool, paged.pool)
    work = Work.of(rows, shape, Tiles(16, TILE, 4, 2), window)
    tokens = {token: row for row, token in enumerate(rows.first[:-1].tolist())}
    found: dict[int, list[tuple[int, int, int]]] = {}
    for token, slot, end, begin, until, count, cell, number in work.records.tolist():
        if token < 0:
            continue
        row = tokens[token]
        assert (slot, end) == (int(rows.slots[row]), ends[row])
        assert number == len(found.setdefault(row, []))
        found[row].append((begin, until, cell + number))
        assert number < count
    assert work.counts.eq(0).all()
    return found


@BOTH
def test_latent_rows(operators: Kernels) -> None:
    """One key head, whose values are the first part of its keys, and more query heads than one program takes."""
    check(operators, [(70, 1), (9, 20), (0, 3)], heads=(20, 1), widths=(32, 8), page_size=16, padding=(1, 2))


@BOTH
def test_bfloat16(operators: Kernels) -> None:
    rows = [(0, 30), (70, 1), (3, 1), (20, 33), (149, 1)]
    check(operators, rows, page_size=16, dtype=torch.bfloat16)


@BOTH
@settings(max_examples=4, deadline=None)
@given(
    rows=st.lists(ROW, min_size=1, max_size=3),
    heads=st.sampled_from([(2, 2), (6, 2)]),
    page_size=st.sampled_from([4, 7]),
    parts=st.sampled_from([1, 4]),
    seed=st.integers(0, 1000),
)
def test_keys_and_values_of_8_bits(
    operators: Kernels, rows: list[tuple[int, int]], heads: tuple[int, int], page_size: int, parts: int, seed: int
) -> None:
    check(operators, rows, heads=heads, page_size=page_size, padding=(1, 3), parts=parts, eight_bits=True, seed=seed)


@BOTH
def test_queries_in_bfloat16_of_keys_of_8_bits(operators: Kernels) -> None:
    rows = [(0, 30), (70, 1), (20, 33)]
    check(operators, rows, page_size=16, dtype=torch.bfloat16, eight_bits=True)


@BOTH
def test_every_8_bit_float_is_read(operators: Kernels) -> None:
    """With one position its value is the result. With two positions, a key decides between the values."""
    codes = torch.arange(256, dtype=torch.uint8)
    paged = Paged.make([1, 1], 1, 256, 4, 0, torch.float32)
    pool = torch.full((len(paged.pool), 1, 256), 0x7F, dtype=torch.uint8)
    for row in range(2):
        pool[int(paged.page_table[1 - row, 0]) * paged.page_stride] = codes
    out = operators.attend(torch.randn(3, 1, 256), torch.zeros_like(pool), pool, paged.rows([1, 1]), SCALE)
    expected = codes.view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(out[0, 0], expected, atol=0, rtol=0, equal_nan=True)
    # One of two positions has a key of zeros. The key of the other has one code, whose value is the score.
    numbers = codes[codes & 0x7F < 0x7F]
    paged = Paged.make([2] * len(numbers), 1, 16, 2, 0, torch.float32)
    keys, values = torch.zeros(2, len(paged.pool), 1, 16, dtype=torch.uint8)
    first = paged.page_table.flip(0)[1:, 0].long() * paged.page_stride
    keys[first + 1, 0, 3] = numbers
    values[first + 1] = torch.tensor(1.0).to(torch.float8_e4m3fn).view(torch.uint8)
    q = torch.zeros(len(numbers), 1, 16)
    q[:, 0, 3] = 1
    with in_parts(lambda rows: 1):
        out = operators.attend(q, keys, values, paged.rows([1] * len(numbers)), 0.01)
    expected = numbers.view(torch.float8_e4m3fn).double().mul(0.01).sigmoid()
    torch.testing.assert_close(out[:, 0, 0].double(), expected, atol=1e-6, rtol=0)


@BOTH
def test_a_page_that_is_not_there_is_the_null_page(operators: Kernels) -> None:
    check_missing_page(operators, CPU)


def test_entries_beyond_2_to_the_31_elements_are_reached() -> None:
    """Most of the pool's memory is never touched, so the system never allocates it."""
    width = 4096
    pool = torch.empty((1 << 31) + 64 * width, dtype=torch.bfloat16).view(-1, 1, width)[:, :, :16]
    paged = Paged.make([5], 1, 16, 4, 0, torch.bfloat16)
    last = len(pool) // 4 - 2
    history = paged.histories[0]
    pool[last * 4 : last * 4 + 4] = history[:4]
    pool[(last + 1) * 4] = history[4]
    table = torch.tensor([[last, last + 1]], dtype=torch.int32)
    rows = replace(paged.rows([1]), page_table=table, page_stride=4)
    q = Numbers(CPU, 0).normal(1, 1, 16, dtype=torch.bfloat16)
    out = kernels.attend(q, pool, pool, rows, SCALE)
    check_dense(out, q, history, history, SCALE)


MUTANTS = {
    "causal": ("walk", "inside[None, :] & (position[None, :] <= last[:, None])", "inside[None, :]"),
    "end of a row": ("walk", "inside = position < end", "inside = position < end + 1"),
    "page size": ("walk", "page * page_stride + position % PAGE", "page * page_stride + position % (PAGE + 1)"),
}


OF_CODES = {
    "signs": ("(code & 0x80) << 24", "(code & 0x80) << 23"),
    "exponents": ("(code & 0x7F) << 20", "(code & 0x7F) << 19"),
    "NaN": ('float("nan"), of_eight', "480.0, of_eight"),
    "bytes": ("if at.dtype.element_ty == tl.uint8", "if at.dtype.element_ty == tl.int8"),
}


@pytest.mark.parametrize("name", OF_CODES)
def test_a_wrong_8_bit_float_is_seen(name: str, mutate: Callable[..., ModuleType]) -> None:
    mutate("eight_bits", *OF_CODES[name], "load_kept", ("walk",))
    with pytest.raises(AssertionError):
        test_every_8_bit_float_is_read(kernels)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_removed_mask_is_seen(name: str, mutate: Callable[..., ModuleType]) -> None:
    module, old, new = MUTANTS[name]
    mutate(module, old, new, "walk", ("decodes", "chunks"))
    with pytest.raises(AssertionError):
        check(kernels, [(9, 1), (5, 12)])


@pytest.mark.parametrize(
    ("user", "rows", "parts"),
    [
        ("chunks", [(0, 5)], 1),
        ("parts", [(200, 1)], 4),
        ("parts", [(200, 1)], 1),
        ("parts", [(3, 1), (200, 1), (4, 1)], 1),
    ],
)
def test_sinks_that_are_left_out_are_seen(
    user: str, rows: list[tuple[int, int]], parts: int, mutate: Callable[..., ModuleType]
) -> None:
    """Removes sinks from chunks, the joining kernel, single parts, and parts that the last program joins."""
    check(kernels, rows, parts=parts, sinks=4.0)
    mutate("walk", "+ tl.exp2(sink - higher)", "", "beside_sinks", (user,))
    with pytest.raises(AssertionError):
        check(kernels, rows, parts=parts, sinks=4.0)


@pytest.mark.parametrize(
    ("function", "user", "rows", "parts"),
    [("join_kernel", "parts", [(200, 1)], 4), ("keep_part", "decodes", [(3, 1), (200, 1), (4, 1)], 1)],
)
def test_parts_that_are_joined_wrongly_are_seen(
    function: str, user: str, rows: list[tuple[int, int]], parts: int, mutate: Callable[..., ModuleType]
) -> None:
    """If most rows have several parts, a kernel joins them.

    If few have, the last program of each of these rows does.
    """
    check(kernels, rows, parts=parts)
    mutate("parts", "part * share[:, None]", "part", function, (user,))
    with pytest.raises(AssertionError):
        check(kernels, rows, parts=parts)
