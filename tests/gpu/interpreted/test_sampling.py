"""Sampling on the device: the same tokens as the layers' operators and the hand's sampler give for the same logits."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.compute.uniform import uniform
from forebay.gpu import kernels
from forebay.gpu.interface import Kernels
from forebay.gpu.sampling import Wishes
from forebay.gpu.tables import StepBuffers, Tables
from forebay.layers.ops import Draw, TorchOps
from forebay.protocol.plan import SlotFloat, SlotWord
from tests.gpu.support import BOTH
from tests.uniform_values import VALUES

U64 = 1 << 64
# Multiples of a quarter make ties.
QUARTER = st.integers(-12, 12).map(lambda n: n / 4)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks, blocks, and more tokens than there is room for candidates, with few tokens."""
    drawing, largest = sys.modules["forebay.gpu.kernels.drawing"], sys.modules["forebay.gpu.kernels.largest"]
    monkeypatch.setattr(drawing, "CANDIDATES", 16)
    monkeypatch.setattr(drawing, "_BLOCK", 64)
    monkeypatch.setattr(largest, "CHUNK", 64)


def wishes_of(rows: list[dict[str, float]], bits: torch.Tensor) -> Wishes:
    def column(name: str, otherwise: float) -> torch.Tensor:
        return torch.tensor([row.get(name, otherwise) for row in rows])

    return Wishes(
        column("temperature", 0.0).float(),
        column("top_k", 0).int(),
        column("top_p", 1.0).float(),
        column("min_p", 0.0).float(),
        bits,
    )


def expected_tokens(logits: torch.Tensor, wishes: Wishes) -> list[int]:
    """What the layers' operators give, a row at a time."""
    tokens = []
    for row in range(len(logits)):
        line, temperature = logits[row : row + 1], wishes.temperature[row : row + 1]
        if temperature == 0:
            tokens.append(int(line.argmax()))
            continue
        top_k, top_p = int(wishes.top_k[row]), wishes.top_p[row : row + 1]
        here = torch.zeros(1, dtype=torch.int64)
        limited = (here, torch.tensor([top_k]), top_p) if 0 < top_k < logits.shape[1] else None
        nucleus = (here, top_p) if limited is None and bool(top_p < 1) else None
        u = torch.tensor([((int(wishes.bits[row]) % U64) >> 11) * 2.0**-53], dtype=torch.float64)
        draw = Draw(temperature, u, limited, top_k, nucleus, wishes.min_p[row : row + 1])
        tokens.append(int(TorchOps().sample(line, draw)))
    return tokens


def check(operators: Kernels, logits: torch.Tensor, wishes: Wishes) -> None:
    tokens, finite = operators.greedy(logits)
    assert finite.all()
    operators.draw(logits, wishes, tokens)
    assert tokens.tolist() == expected_tokens(logits, wishes)


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
    check(operators, logits, wishes_of(rows, bits))


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
    check(operators, logits, wishes_of(rows, bits))


@BOTH
@pytest.mark.parametrize("kind", [{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 30, "top_p": 0.6}, {}])
def test_every_u_gives_its_token(operators: Kernels, kind: dict[str, float]) -> None:
    """Edges of the distribution: both sides of each cumulative probability, and both ends."""
    count = 12
    logits = (torch.randn(1, 40, generator=torch.Generator().manual_seed(1)) * 2).expand(count, -1)
    u = [0, U64 - 1, *(i * U64 // count + 12345 for i in range(count - 2))]
    bits = torch.tensor([value - U64 if value >= U64 >> 1 else value for value in u])
    check(operators, logits, wishes_of([{"temperature": 0.9, **kind}] * count, bits))


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


def tables_of(slots: int) -> Tables:
    return Tables.make(slots, 40, 100, 4, 10, 8, torch.device("cpu"))


@BOTH
def test_wishes_are_read_by_slot(operators: Kernels) -> None:
    tables, buffers = tables_of(3), StepBuffers.make(4, 4, torch.device("cpu"))
    tables.words.random_(generator=torch.Generator().manual_seed(0))
    tables.floats.uniform_(generator=torch.Generator().manual_seed(0))
    tables.floats[3] = 0
    buffers.sampling.copy_(torch.tensor([2, 3, 0, 1]))
    buffers.ends.copy_(torch.tensor([7, 1, 40, 3]))
    wishes = operators.ask(tables, buffers)
    slots = buffers.sampling.long()
    assert wishes.temperature.equal(tables.floats[slots, SlotFloat.TEMPERATURE])
    assert wishes.top_p.equal(tables.floats[slots, SlotFloat.TOP_P])
    assert wishes.min_p.equal(tables.floats[slots, SlotFloat.MIN_P])
    assert wishes.top_k.equal(tables.words[slots, SlotWord.TOP_K])
    halves = tables.words[slots][:, [SlotWord.SEED_LO, SlotWord.SEED_HI]].contiguous().numpy()
    seeds = halves.view(np.uint64)[:, 0]
    expected = uniform(seeds, buffers.ends.numpy().astype(np.int64))
    u = (wishes.bits.numpy().view(np.uint64) >> np.uint64(11)) * 2.0**-53
    assert u.tolist() == expected.tolist()


@BOTH
def test_random_bits_are_those_of_every_hand(operators: Kernels) -> None:
    """The golden values are checked against the hand's host side in tests/hand."""
    count = len(VALUES)
    tables, buffers = tables_of(count), StepBuffers.make(count, count, torch.device("cpu"))
    seeds = np.array([seed for seed, _, _ in VALUES], np.uint64)
    tables.words[:count, [SlotWord.SEED_LO, SlotWord.SEED_HI]] = torch.from_numpy(seeds.view(np.int32).reshape(-1, 2))
    buffers.sampling.copy_(torch.arange(count))
    buffers.ends.copy_(torch.tensor([position for _, position, _ in VALUES]))
    bits = operators.ask(tables, buffers).bits.numpy().view(np.uint64)
    assert (bits >> np.uint64(11)).tolist() == [value for _, _, value in VALUES]


@BOTH
def test_tokens_are_kept_where_their_slots_read_them(operators: Kernels) -> None:
    tables, buffers = tables_of(3), StepBuffers.make(4, 4, torch.device("cpu"))
    tables.token_pool.fill_(-9)
    buffers.sampling.copy_(torch.tensor([2, 3, 0, 1]))
    buffers.ends.copy_(torch.tensor([7, 1, 40, 3]))
    tokens, finite = torch.tensor([11, 12, 13, 14]), torch.tensor([True, True, True, False])
    assert operators.keep(tokens, finite, tables, buffers).tolist() == [11, 12, 13, 0]
    expected = torch.full_like(tables.token_pool, -9)
    expected[2, 7], expected[3, 1], expected[0, 40], expected[1, 3] = 11, 12, 13, 0
    assert tables.token_pool.equal(expected)


MUTANTS: dict[str, tuple[str, str, dict[str, float]]] = {
    "ties": ("equal & (rank <= equals)", "equal", {"top_k": 5}),
    "share of what top_k keeps": (
        "mass = under + equals * _mass(key)",
        "mass = all_mass",
        {"top_k": 12, "top_p": 0.6},
    ),
    "least weight": ("keep & (_weight(found) >= min_p)", "keep & (_weight(found) >= 0.0)", {"min_p": 0.5}),
    "temperature": ("tl.math.div_rn(top - x, temperature)", "top - x", {}),
    "candidates that do not suffice": (
        "few = (count > 0) & (limited |",
        "few = (count > 0) & (limited | (top_p < 1) |",
        {"top_p": 0.95},
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_filter_is_seen(name: str, mutate: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, kind = MUTANTS[name]
    mutated = mutate("drawing", old, new)
    monkeypatch.setattr(mutated, "CANDIDATES", 16)
    monkeypatch.setattr(mutated, "_BLOCK", 64)
    monkeypatch.setattr(kernels, "draw", mutated.draw)
    rows = [{"temperature": 3.0, **kind}] * 6
    generator = torch.Generator().manual_seed(6)
    # Many are equal to the largest.
    logits = (torch.randn(len(rows), 60, generator=generator) * 3).round().clamp(max=3)
    bits = torch.randint(-(1 << 62), 1 << 62, (len(rows),), generator=generator) * 2
    with pytest.raises(AssertionError):
        check(kernels, logits, wishes_of(rows, bits))
