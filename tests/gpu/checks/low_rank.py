"""Low-rank matrices of several adapters beside a product, compared with float64, one token at a time."""

from __future__ import annotations

from itertools import pairwise

import torch

from forebay.gpu.interface import Kernels
from forebay.gpu.low_rank import LowRankStack, PlacedTokens
from tests.gpu.checks.memory import CPU, SINGLE, Numbers, poisoned, rounding, spaced, within


def check_add_low_rank(
    operators: Kernels,
    places: list[int],
    outputs: list[int],
    inputs: int,
    ranks: list[int],
    dtype: torch.dtype,
    *,
    most: int | None = None,
    device: torch.device = CPU,
    seed: int = 0,
) -> None:
    """`places`: the adapter of each token; `len(ranks)`: none.

    The stack's rank is `most`, or the largest of `ranks`.
    """
    numbers = Numbers(device, seed)
    rank, modules = most or max(ranks), len(outputs)
    starts = [sum(outputs[:number]) for number in range(modules + 1)]
    a = numbers.normal(len(ranks), modules, rank, inputs, dtype=dtype)
    b = (numbers.normal(len(ranks), starts[-1], rank) * rank**-0.5).to(dtype)
    for place, own in enumerate(ranks):
        a[place, :, own:], b[place, :, own:] = 0, 0
    if len(ranks) > 1 and modules > 1:
        # The second adapter does not change the first module.
        a[1, 0], b[1, : starts[1]] = 0, 0
    of_starts = torch.tensor(starts, dtype=torch.int32, device=device)
    stack = LowRankStack(a.flatten(1, 2), b, of_starts, max(outputs))
    x = (numbers.normal(len(places), inputs) * inputs**-0.5).to(dtype)
    y = numbers.normal(len(places), starts[-1], dtype=dtype)
    given = spaced(y.clone())
    tokens = PlacedTokens(torch.tensor(places, dtype=torch.int32, device=device))
    with poisoned():
        operators.add_low_rank(spaced(x), given, stack, tokens)
        # A second call reuses what the first one has computed from the step's tokens.
        operators.add_low_rank(spaced(x), again := spaced(y.clone()), stack, tokens)
    assert given.equal(again)
    once = rounding(dtype)
    for token, place in enumerate(places):
        if place >= len(ranks):
            assert given[token].equal(y[token]), "a token without an adapter is unchanged"
            continue
        for number, (first, end) in enumerate(pairwise(starts)):
            small = a[place, number].double() @ x[token].double()
            of_terms = a[place, number].double().abs() @ x[token].double().abs()
            matrix = b[place, first:end].double()
            added = matrix @ small
            size = matrix.abs() @ (small.abs() * once + of_terms * SINGLE)
            size = size + (matrix.abs() @ small.abs()) * SINGLE
            wanted = y[token, first:end].double() + added
            room = size * 1.01 + added.abs() * once + (wanted.abs() + added.abs() * once) * once
            within(given[token, first:end], wanted, room + 1e-30)
