"""Sampling on the device gives the same tokens as the layers' operators and the hand's sampler for the same logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from forebay.compute.uniform import uniform
from forebay.gpu.interface import Kernels
from forebay.gpu.sampling import MOST_LIKELY, Wishes
from forebay.gpu.tables import StepBuffers, Tables
from forebay.layers.ops import Draw, TorchOps
from forebay.protocol.constants import SlotFloats, SlotRecord
from tests.gpu.checks.memory import CPU, Numbers, poisoned

U64 = 1 << 64
EDGE = 1e-6
"""The distance from an edge, relative to the total, within which the order of additions may change the token."""
KINDS: list[dict[str, float]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 50},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.5, "min_p": 0.05},
    {"temperature": 1.3, "top_k": 1000, "top_p": 0.5, "min_p": 0.001},
    {"temperature": 2.0, "top_p": 0.999},
]


def wishes_of(rows: Sequence[dict[str, float]], bits: torch.Tensor) -> Wishes:
    def column(name: str, otherwise: float) -> torch.Tensor:
        return torch.tensor([row.get(name, otherwise) for row in rows], device=bits.device)

    return Wishes(
        column("temperature", 0.0).float(),
        column("top_k", 0).int(),
        column("top_p", 1.0).float(),
        column("min_p", 0.0).float(),
        bits,
    )


def share(bits: torch.Tensor) -> float:
    """Converts 64 random bits to a number from 0 to 1."""
    return ((int(bits) % U64) >> 11) * 2.0**-53


def expected_token(logits: torch.Tensor, wishes: Wishes, row: int, u: float, more_p: float = 0.0) -> int:
    """The token that the layers' operators give for a row with `u`, after `more_p` is added to `top_p`."""
    line, temperature = logits[row : row + 1], wishes.temperature[row : row + 1]
    if temperature == 0:
        return int(line.argmax())
    top_k, top_p = int(wishes.top_k[row]), wishes.top_p[row : row + 1]
    top_p = torch.where(top_p < 1, top_p + more_p, top_p)
    here = torch.zeros(1, dtype=torch.int64, device=logits.device)
    limited = (here, torch.full_like(here, top_k), top_p) if 0 < top_k < logits.shape[1] else None
    nucleus = (here, top_p) if limited is None and bool(top_p < 1) else None
    at = torch.full((1,), u, dtype=torch.float64, device=logits.device)
    draw = Draw(temperature, at, limited, top_k, nucleus, wishes.min_p[row : row + 1])
    return int(TorchOps().sample(line, draw))


def expected_tokens(logits: torch.Tensor, wishes: Wishes) -> list[int]:
    """The tokens that the layers' operators give, one row at a time."""
    return [expected_token(logits, wishes, row, share(wishes.bits[row])) for row in range(len(logits))]


def check_draw(operators: Kernels, logits: torch.Tensor, wishes: Wishes, edge: float = 0.0) -> None:
    """`edge`: the distance from an edge between two tokens within which both are right. 0: only one token is right."""
    with poisoned():
        tokens, finite = operators.greedy(logits)
        operators.draw(logits, wishes, tokens)
    assert finite.all()
    given, expected = tokens.tolist(), expected_tokens(logits, wishes)
    if not edge:
        assert given == expected
    for row in [row for row in range(len(given)) if given[row] != expected[row]]:
        u = share(wishes.bits[row])
        near = {
            expected_token(logits, wishes, row, min(max(u + by, 0.0), 1 - 2.0**-53), more)
            for by in (-edge, 0.0, edge)
            for more in (-edge, 0.0, edge)
        }
        assert given[row] in near, f"row {row}: {given[row]}, where one of {near} is near"


def check_random_draws(
    operators: Kernels, rows: int, vocabulary: int, spread: float, device: torch.device = CPU, seed: int = 0
) -> None:
    """Draws rows of all kinds in turn. `spread` is the deviation of the logits."""
    numbers = Numbers(device, seed)
    logits = numbers.normal(rows, vocabulary) * spread
    wishes = wishes_of([KINDS[row % len(KINDS)] for row in range(rows)], numbers.bits(rows))
    check_draw(operators, logits, wishes, EDGE)


def check_greedy(
    operators: Kernels, rows: int, vocabulary: int, dtype: torch.dtype, device: torch.device = CPU, seed: int = 0
) -> None:
    """The largest logits are at both ends and elsewhere. Of equal ones the first wins.

    Rows that are not finite are found.
    """
    numbers = Numbers(device, seed)
    logits = numbers.normal(rows, vocabulary, dtype=dtype)
    expected = numbers.below(vocabulary, rows)
    expected[0], expected[1] = 0, vocabulary - 1
    for row, token in enumerate(expected.tolist()):
        logits[row, token] = 100
        later = token + int(numbers.below(vocabulary - token, 1))
        logits[row, later] = 100
    bad = numbers.below(3, rows)
    bad[:2] = 0
    for row, kind in enumerate(bad.tolist()):
        if kind:
            logits[row, int(expected[row]) - 1] = -torch.inf if kind == 1 else torch.nan
    with poisoned():
        tokens, finite = operators.greedy(logits)
    assert finite.tolist() == (bad == 0).tolist()
    assert tokens[bad == 0].tolist() == expected[bad == 0].tolist()


def filled_tables(slots: int, device: torch.device, seed: int) -> tuple[Tables, StepBuffers]:
    """Tables with random records, and a row for each slot and for the null slot."""
    numbers = Numbers(device, seed)
    tables, buffers = (
        Tables.make(slots, 40, 100, 4, 10, 8, device),
        StepBuffers.make(slots + 1, slots + 1, device),
    )
    tables.words.copy_(numbers.bits(tables.words.numel()).view_as(tables.words))
    tables.floats.copy_(numbers.uniform(*tables.floats.shape))
    tables.floats[slots] = 0
    buffers.sampling.copy_(numbers.order(slots + 1))
    buffers.ends.copy_(numbers.below(40, slots + 1))
    return tables, buffers


def check_ask(operators: Kernels, slots: int = 3, device: torch.device = CPU, seed: int = 0) -> None:
    """Parameters are read by slot, and random bits equal those of the hand's host side."""
    tables, buffers = filled_tables(slots, device, seed)
    with poisoned():
        wishes = operators.ask(tables, buffers)
    rows = buffers.sampling.long()
    assert wishes.temperature.equal(tables.floats[rows, SlotFloats.TEMPERATURE])
    assert wishes.top_p.equal(tables.floats[rows, SlotFloats.TOP_P])
    assert wishes.min_p.equal(tables.floats[rows, SlotFloats.MIN_P])
    assert wishes.top_k.equal(tables.words[rows, SlotRecord.TOP_K])
    halves = tables.words[rows][:, [SlotRecord.SEED_LO, SlotRecord.SEED_HI]].cpu().contiguous().numpy()
    expected = uniform(halves.view(np.uint64)[:, 0], buffers.ends.cpu().numpy().astype(np.int64))
    assert [share(bits) for bits in wishes.bits] == expected.tolist()


def check_keep(operators: Kernels, slots: int = 3, device: torch.device = CPU, seed: int = 0) -> None:
    """Each token is stored where its slot reads it. A row that is not finite stores 0."""
    tables, buffers = filled_tables(slots, device, seed)
    tables.token_pool.fill_(-9)
    numbers = Numbers(device, seed + 1)
    tokens, finite = numbers.below(1 << 20, slots + 1), numbers.below(4, slots + 1) > 0
    expected = tables.token_pool.clone()
    kept = torch.where(finite, tokens, 0).int()
    expected[buffers.sampling.long(), buffers.ends.long()] = kept
    errors, block = torch.full((1,), 5, dtype=torch.int32, device=device), torch.full((2 * slots + 9,), -9).int()
    block = block.to(device)
    with poisoned():
        found = operators.keep(tokens, finite, tables, buffers, errors, block[: 2 * slots + 3])
    assert found.equal(kept)
    assert tables.token_pool.equal(expected)
    told, *rest = block.split((1, slots + 1, slots + 1, 6))
    assert int(told) == 5
    assert int(errors) == 0
    for column, values in zip(rest, (kept, finite.int(), torch.full_like(block[:6], -9)), strict=True):
        assert column.equal(values)


def check_likely(
    operators: Kernels, rows: int, vocabulary: int, most: int, device: torch.device = CPU, seed: int = 0
) -> None:
    """The likeliest tokens are in order, and all reported log-probabilities are compared with float64."""
    numbers = Numbers(device, seed)
    logits, tokens = numbers.normal(rows, vocabulary) * 4, numbers.below(vocabulary, rows, 1)
    exact = logits.double().log_softmax(dim=-1)
    with poisoned():
        ids, values = operators.likely(logits, tokens, most)
    assert ids.shape == values.shape == (rows, 1 + most)
    assert ids[:, :1].equal(tokens)
    assert all(len(set(line)) == most for line in ids[:, 1:].tolist())
    torch.testing.assert_close(values[:, 1:].double(), exact.topk(most, dim=-1).values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(values.double(), exact.gather(1, ids), rtol=1e-5, atol=1e-5)


def penalised(logits: torch.Tensor, counts: torch.Tensor, penalties: torch.Tensor) -> torch.Tensor:
    """float64 logits [vocabulary], by counts [2, vocabulary] and penalties of repetition, presence and frequency."""
    by, presence, frequency = penalties.double()
    seen, generated = counts.double()
    repeated = torch.where(logits > 0, logits / by, logits * by)
    return torch.where(seen > 0, repeated, logits) - frequency * generated - presence * (generated > 0)


def check_penalise(
    operators: Kernels, rows: int, penalised_rows: int, vocabulary: int, device: torch.device = CPU, seed: int = 0
) -> None:
    """Some rows have counts, in table lines of any order. All other rows are unchanged to the bit."""
    numbers = Numbers(device, seed)
    logits = numbers.normal(rows, vocabulary) * 4
    own, lines = numbers.order(rows)[:penalised_rows], numbers.order(penalised_rows + 3)[:penalised_rows]
    counts = (numbers.below(4, penalised_rows + 3, 2, vocabulary) - 2).clamp(min=0).int()
    repetition, others = 0.5 + numbers.uniform(penalised_rows, 1), numbers.normal(penalised_rows, 2)
    penalties = torch.cat((repetition, others), dim=1)
    exact, before = logits.double(), logits.clone()
    for row, line, of_row in zip(own.tolist(), lines.tolist(), penalties, strict=True):
        exact[row] = penalised(exact[row], counts[line], of_row)
    operators.penalise(logits, own, counts, lines, penalties)
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)
    rest = [row for row in range(rows) if row not in own.tolist()]
    assert logits[rest].equal(before[rest])


def by_slot(slots: int, vocabulary: int, numbers: Numbers, device: torch.device) -> tuple[Tables, StepBuffers]:
    """Tables without records, and a row for each slot and for the null slot, in random order."""
    tables, buffers = (
        Tables.make(slots, 40, vocabulary, 4, 10, 8, device),
        StepBuffers.make(slots + 1, slots + 1, device),
    )
    buffers.sampling.copy_(numbers.order(slots + 1))
    return tables, buffers


def lines_of(buffers: StepBuffers, numbers: Numbers) -> torch.Tensor:
    """The line of each row in the counts, int32 [r]. The null slot's row and some others have no line (-1)."""
    rows = len(buffers.sampling)
    nobody = (buffers.sampling == rows - 1) | (numbers.below(3, rows) == 0)
    return numbers.order(rows).int().masked_fill(nobody, -1)


def check_adjust(operators: Kernels, slots: int, vocabulary: int, device: torch.device = CPU, seed: int = 0) -> None:
    """Penalties are read by slot, and counts by line. Rows without a line are unchanged to the bit."""
    numbers = Numbers(device, seed)
    tables, buffers = by_slot(slots, vocabulary, numbers, device)
    columns = [SlotFloats.REPETITION_PENALTY, SlotFloats.PRESENCE_PENALTY, SlotFloats.FREQUENCY_PENALTY]
    tables.floats.copy_(0.5 + numbers.uniform(*tables.floats.shape))
    rows, lines = slots + 1, lines_of(buffers, numbers)
    counts = (numbers.below(4, rows, 2, vocabulary) - 2).clamp(min=0).int()
    logits = numbers.normal(rows, vocabulary) * 4
    exact, before = logits.double(), logits.clone()
    for row, (slot, line) in enumerate(zip(buffers.sampling.tolist(), lines.tolist(), strict=True)):
        if line >= 0:
            exact[row] = penalised(exact[row], counts[line], tables.floats[slot, columns])
    with poisoned():
        found = operators.adjust(logits, lines, counts, tables, buffers)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    assert found[lines < 0].equal(before[lines < 0])
    assert logits.equal(before)
    assert (lines < 0).any()


def check_count_tokens(
    operators: Kernels, rows: int, vocabulary: int, device: torch.device = CPU, seed: int = 0
) -> None:
    """Adds each row's token to its line, in both halves: all tokens, and generated tokens."""
    numbers = Numbers(device, seed)
    lines = numbers.order(rows).int().masked_fill(numbers.below(3, rows) == 0, -1)
    tokens = numbers.below(vocabulary, rows).int()
    # These tokens are at the end of a line, next to another line.
    tokens[: rows // 3] = vocabulary - 1
    counts = numbers.below(9, rows, 2, vocabulary).int()
    expected = counts.clone()
    for line, token in zip(lines.tolist(), tokens.tolist(), strict=True):
        if line >= 0:
            expected[line, :, token] += 1
    operators.count_tokens(tokens, lines, counts)
    assert counts.equal(expected)


def check_tell_likely(
    operators: Kernels, slots: int, vocabulary: int, device: torch.device = CPU, seed: int = 0
) -> None:
    """Each slot gets as many of the likeliest tokens as its record requests. Values are compared with float64."""
    numbers = Numbers(device, seed)
    tables, buffers = by_slot(slots, vocabulary, numbers, device)
    asked = numbers.below(2 + MOST_LIKELY, slots).int() - 1
    asked[0] = MOST_LIKELY
    tables.words[:slots, SlotRecord.LOGPROBS] = asked
    logits, tokens = numbers.normal(slots + 1, vocabulary) * 4, numbers.below(vocabulary, slots + 1).int()
    exact = logits.double().log_softmax(dim=-1)
    told = torch.full((slots + 1, 2, 1 + MOST_LIKELY), -7, dtype=torch.int32, device=device)
    operators.tell_likely(logits, tokens, tables, buffers, told)
    for row, slot in enumerate(buffers.sampling.tolist()):
        count = -1 if slot == slots else min(int(asked[slot]), vocabulary)
        if count < 0:
            continue
        ids, values = told[row, 0, : 1 + count].long(), told[row, 1, : 1 + count].view(torch.float32).double()
        assert ids[0] == tokens[row]
        assert len(set(ids[1:].tolist())) == count
        torch.testing.assert_close(values[1:], exact[row].topk(count).values, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(values, exact[row, ids], rtol=1e-5, atol=1e-5)
