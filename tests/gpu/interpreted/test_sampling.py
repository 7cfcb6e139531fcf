"""Sampling on the device gives the same tokens as the layers' operators and the hand's sampler for the same logits."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.gpu import kernels
from forebay.gpu.interface import Kernels
from forebay.gpu.tables import StepBuffers, Tables
from forebay.protocol.constants import SlotRecord
from tests.gpu.checks.memory import CPU
from tests.gpu.checks.sampling import (
    U64,
    check_adjust,
    check_ask,
    check_count_tokens,
    check_draw,
    check_greedy,
    check_keep,
    check_likely,
    check_penalise,
    check_random_draws,
    check_tell_likely,
    expected_tokens,
    wishes_of,
)
from tests.gpu.support import BOTH
from tests.uniform_values import VALUES

# Multiples of a quarter make ties.
QUARTER = st.integers(-12, 12).map(lambda n: n / 4)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks, so that few tokens make several chunks and blocks, and more candidates than fit."""
    drawing, largest = sys.modules["forebay.gpu.kernels.drawing"], sys.modules["forebay.gpu.kernels.largest"]
    monkeypatch.setattr(drawing, "CANDIDATES", 16)
    monkeypatch.setattr(drawing, "_BLOCK", 32)
    monkeypatch.setattr(drawing, "_LEAST_CHUNK", 32)
    monkeypatch.setattr(largest, "CHUNK", 64)


ROW = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 0, 1, 3, 15, 17, 40, 100]),
        "top_p": st.sampled_from([1.0, 0.9, 0.5, 0.1]),
        "min_p": st.sampled_from([0.0, 0.0, 0.03, 0.4]),
    }
)


@BOTH
@settings(max_examples=12, deadline=None)
@given(rows=st.lists(ROW, min_size=1, max_size=3), vocabulary=st.integers(1, 60), data=st.data())
def test_ties(operators: Kernels, rows: list[dict[str, float]], vocabulary: int, data: st.DataObject) -> None:
    line = st.lists(QUARTER, min_size=vocabulary, max_size=vocabulary)
    logits = torch.tensor([data.draw(line) for _ in rows])
    bits = torch.tensor([data.draw(st.integers(-(1 << 63), (1 << 63) - 1)) for _ in rows])
    check_draw(operators, logits, wishes_of(rows, bits))


@BOTH
@settings(max_examples=8, deadline=None)
@given(
    rows=st.lists(ROW, min_size=2, max_size=3),
    vocabulary=st.integers(50, 150),
    spread=st.sampled_from([0.01, 1.0, 5.0]),
    seed=st.integers(0, 1 << 20),
)
def test_random_logits(
    operators: Kernels, rows: list[dict[str, float]], vocabulary: int, spread: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), vocabulary, generator=generator) * spread
    bits = torch.randint(-(1 << 62), 1 << 62, (len(rows),), generator=generator) * 2
    check_draw(operators, logits, wishes_of(rows, bits))


@BOTH
@pytest.mark.parametrize("kind", [{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 30, "top_p": 0.6}, {}])
def test_every_u_gives_its_token(operators: Kernels, kind: dict[str, float]) -> None:
    """Draws with `u` at both ends of its range and at equal distances in between."""
    count = 12
    logits = (torch.randn(1, 40, generator=torch.Generator().manual_seed(1)) * 2).expand(count, -1)
    u = [0, U64 - 1, *(i * U64 // count + 12345 for i in range(count - 2))]
    bits = torch.tensor([value - U64 if value >= U64 >> 1 else value for value in u])
    check_draw(operators, logits, wishes_of([{"temperature": 0.9, **kind}] * count, bits))


@BOTH
def test_the_largest_of_many(operators: Kernels) -> None:
    logits = torch.zeros(3, 200)
    logits[0, [150, 33, 199]] = 2
    logits[1, :] = -1
    logits[2, 17:] = -torch.inf
    logits[2, 0] = -5
    tokens, finite = operators.greedy(logits)
    assert tokens.tolist() == [33, 0, 1]
    assert finite.tolist() == [True, True, False]


@BOTH
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_told_and_touches_no_other_row(operators: Kernels, bad: float) -> None:
    logits = torch.randn(3, 70, generator=torch.Generator().manual_seed(3))
    wishes = wishes_of([{"temperature": 1.0, "top_p": 0.5}] * 3, torch.tensor([1 << 62, -5, 1 << 61]))
    good = expected_tokens(logits, wishes)
    logits[1, 69] = bad
    tokens, finite = operators.greedy(logits)
    assert finite.tolist() == [True, False, True]
    operators.draw(logits, wishes, tokens)
    assert tokens[0] == good[0]
    assert tokens[2] == good[2]
    assert 0 <= int(tokens[1]) < 70


@BOTH
def test_suppressed_tokens_are_never_drawn(operators: Kernels) -> None:
    logits = torch.randn(1, 90, generator=torch.Generator().manual_seed(4))
    logits[0, ::2] = -torch.inf
    rows = [{"temperature": 1.5}, {"temperature": 1.5, "top_p": 0.9}, {"temperature": 1.5, "top_k": 60}, {}]
    bits = torch.tensor([3 << 61, -7, 1 << 60, 0])
    wishes = wishes_of(rows, bits)
    tokens, _ = operators.greedy(logits.expand(4, -1))
    operators.draw(logits.expand(4, -1), wishes, tokens)
    assert tokens.tolist() == expected_tokens(logits.expand(4, -1), wishes)
    assert all(token % 2 for token in tokens.tolist())


@BOTH
def test_the_first_of_equal_ones(operators: Kernels) -> None:
    check_greedy(operators, 8, 200, torch.float32)


@BOTH
def test_rows_of_every_kind(operators: Kernels) -> None:
    check_random_draws(operators, 8, 150, 3.0)


@BOTH
def test_wishes_are_read_by_slot(operators: Kernels) -> None:
    check_ask(operators)


@BOTH
def test_random_bits_are_those_of_every_hand(operators: Kernels) -> None:
    """tests/hand checks the hand's host side against the same values."""
    count = len(VALUES)
    tables, buffers = Tables.make(count, 40, 100, 4, 10, 8, CPU), StepBuffers.make(count, count, CPU)
    seeds = np.array([seed for seed, _, _ in VALUES], np.uint64)
    tables.words[:count, [SlotRecord.SEED_LO, SlotRecord.SEED_HI]] = torch.from_numpy(
        seeds.view(np.int32).reshape(-1, 2)
    )
    buffers.sampling.copy_(torch.arange(count))
    buffers.ends.copy_(torch.tensor([position for _, position, _ in VALUES]))
    bits = operators.ask(tables, buffers).bits.numpy().view(np.uint64)
    assert (bits >> np.uint64(11)).tolist() == [value for _, _, value in VALUES]


@BOTH
def test_tokens_are_kept_where_their_slots_read_them(operators: Kernels) -> None:
    check_keep(operators)


MUTANTS: dict[str, tuple[str, str, dict[str, float]]] = {
    "ties": ("equal & (rank <= equals)", "equal", {"top_k": 5}),
    "share of what top_k keeps": (
        "all_mass = under + equals * _mass(key)",
        "all_mass += 0",
        {"top_k": 12, "top_p": 0.6},
    ),
    "least weight": ("keep & (_weight(found) >= min_p)", "keep & (_weight(found) >= 0.0)", {"min_p": 0.5}),
    "temperature": ("tl.math.div_rn(top - x, temperature)", "top - x", {}),
    "candidates that do not suffice": (
        "few = few & (tl.sum(mass, 0) >= _goal(top_p, all_mass))",
        "few = few",
        {"top_p": 0.95},
    ),
    "candidates of earlier chunks": ("tl.where(c < chunk, found, 0)", "tl.where(c < 0, found, 0)", {"top_k": 12}),
    "the chunk of the goal": ("goal -= tl.sum(tl.where(here, behind - chunk_mass, 0), 0)", "goal -= 0", {}),
    "what min_p keeps of chunks": ("tl.where(_weight(found) >= min_p, each, 0)", "each", {"min_p": 0.5}),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_filter_is_seen(name: str, mutate: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, kind = MUTANTS[name]
    mutated = mutate("drawing", old, new)
    monkeypatch.setattr(mutated, "CANDIDATES", 16)
    monkeypatch.setattr(mutated, "_BLOCK", 16)
    monkeypatch.setattr(mutated, "_LEAST_CHUNK", 16)
    monkeypatch.setattr(kernels, "draw", mutated.draw)
    rows = [{"temperature": 3.0, **kind}] * 6
    generator = torch.Generator().manual_seed(6)
    # Many logits equal the largest.
    logits = (torch.randn(len(rows), 60, generator=generator) * 3).round().clamp(max=3)
    bits = torch.randint(-(1 << 62), 1 << 62, (len(rows),), generator=generator) * 2
    with pytest.raises(AssertionError):
        check_draw(kernels, logits, wishes_of(rows, bits))


@BOTH
@settings(max_examples=6, deadline=None)
@given(
    rows=st.integers(1, 3),
    vocabulary=st.sampled_from([40, 131, 9000]),
    most=st.sampled_from([0, 1, 5, 20, 32]),
    seed=st.integers(0, 99),
)
def test_likely(operators: Kernels, rows: int, vocabulary: int, most: int, seed: int) -> None:
    check_likely(operators, rows, vocabulary, most, CPU, seed)


def test_equal_logits_come_by_their_ids() -> None:
    logits = torch.zeros(1, 9000)
    logits[0, [4095, 4096, 8999]] = 1.0
    ids, values = kernels.likely(logits, torch.tensor([[3]]), 5)
    assert ids.tolist() == [[3, 4095, 4096, 8999, 0, 1]]
    assert values[0, 1] == values[0, 3] > values[0, 4] == values[0, 0]


@BOTH
@settings(max_examples=6, deadline=None)
@given(rows=st.integers(1, 5), vocabulary=st.sampled_from([40, 2500]), seed=st.integers(0, 99))
def test_penalise(operators: Kernels, rows: int, vocabulary: int, seed: int) -> None:
    check_penalise(operators, rows, 1 + seed % rows, vocabulary, CPU, seed)


@BOTH
@pytest.mark.parametrize("vocabulary", [40, 2500])
def test_penalties_are_read_by_slot(operators: Kernels, vocabulary: int) -> None:
    check_adjust(operators, 4, vocabulary, CPU, 5)


@BOTH
def test_tokens_are_counted_in_their_lines(operators: Kernels) -> None:
    check_count_tokens(operators, 200, 7, CPU, 3)


@BOTH
@pytest.mark.parametrize("vocabulary", [20, 131])
def test_likely_ones_are_told_by_slot(operators: Kernels, vocabulary: int) -> None:
    check_tell_likely(operators, 5, vocabulary, CPU, 2)


OF_SLOTS = {
    "another row's penalties": ("floats + tl.load(slots + row)", "floats + tl.load(slots)"),
    "another row's counts": ("counts + line * line_stride", "counts + row * line_stride"),
    "generated tokens that were only seen": ("at + vocabulary, mask=inside", "at, mask=inside"),
}


@pytest.mark.parametrize("name", OF_SLOTS)
def test_a_wrong_penalty_is_seen(name: str, mutate: Callable[..., ModuleType]) -> None:
    text = Path(sys.modules["forebay.gpu.kernels.penalise"].__file__ or "").read_text()
    old, new = OF_SLOTS[name]
    # The kernel before it contains the same line.
    begin = text.index("def adjust_kernel")
    whole = text[begin:].replace(old, new, 1)
    mutated = mutate("penalise", text[begin:], whole)
    with pytest.raises(AssertionError):
        check_adjust(mutated, 4, 40, CPU, 5)


def test_a_count_of_nobody_is_seen(mutate: Callable[..., ModuleType]) -> None:
    old = "other=0) + 1, mask=there)\n    tl.store(at + vocabulary"
    mutated = mutate("penalise", old, old.replace("mask=there", "mask=inside"))
    with pytest.raises(AssertionError):
        check_count_tokens(mutated, 200, 7, CPU, 3)


OF_LIKELY = {
    "a token twice": ("x = tl.where(i == place, float", "x = tl.where(i == -1, float"),
    "a chunk alone": ("tl.exp(top - largest), 0)", "tl.where(c == 0, 1.0, 0.0), 0)"),
}


@pytest.mark.parametrize("name", OF_LIKELY)
def test_a_wrong_log_probability_is_seen(name: str, mutate: Callable[..., ModuleType]) -> None:
    mutated = mutate("likely", *OF_LIKELY[name])
    with pytest.raises(AssertionError):
        # Three chunks of a row hold its five likeliest tokens.
        check_likely(mutated, 2, 150, 5)
