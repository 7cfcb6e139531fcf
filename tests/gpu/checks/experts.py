"""Mixtures of experts, compared with float64, one expert at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch

from forebay.gpu.interface import Kernels
from forebay.layers.ops import GATES
from tests.gpu.checks.memory import CPU, SINGLE, Numbers, poisoned, rounding, spaced, within


def routed(numbers: Numbers, tokens: int, each: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ascending ids of experts int64 [tokens, each], and weights float32."""
    ids = torch.stack([numbers.order(count)[:each] for _ in range(tokens)]).sort(-1).values
    return ids, numbers.uniform(tokens, each) + 0.1


def mixture(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    count: int,
    expert: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    activation: str = "silu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted sums [tokens, hidden] in float64, and the sums of absolute terms.

    `expert` returns its two matrices.
    """
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    size = torch.zeros_like(out)
    for number in range(count):
        token, place = (ids == number).nonzero(as_tuple=True)
        if not len(token):
            continue
        gate_up, down = expert(number)
        none = torch.zeros((), dtype=torch.float64, device=x.device)
        of_gates, of_outputs = (none, none) if biases is None else (bias[number].double() for bias in biases)
        gates, ups = (x[token].double() @ gate_up.double().T + of_gates).chunk(2, dim=-1)
        weight = weights[token, place].double()[:, None]
        inner = GATES[activation](gates, ups)
        out.index_add_(0, token, weight * (inner @ down.double().T + of_outputs))
        # The error of a gate changes the result at any value of the gate. SiLU's slope is at most 1.1.
        factors = gates * (ups if activation == "silu" else ups.abs() + 2)
        of_terms = factors.abs() @ down.double().abs().T
        size.index_add_(0, token, weight * (of_terms + of_outputs.abs()))
    return out, size


def bound(size: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Allows five roundings: gates, ups, their product, an expert's result, and the sum."""
    return size * (5 * rounding(dtype) + 4 * SINGLE)


def check_experts(
    operators: Kernels,
    tokens: int,
    each: int,
    count: int,
    sizes: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    seed: int = 0,
    first: int = 0,
    clamped: bool = False,
) -> None:
    """`sizes`: hidden and inner. `first`: the rank's first expert; lower ones belong to another rank.

    `clamped`: as in gpt-oss.
    """
    hidden, inner = sizes
    numbers = Numbers(device, seed)
    x = numbers.normal(tokens, hidden, dtype=dtype)
    ids, weights = routed(numbers, tokens, each, count)
    gate_up = numbers.normal(count, 2 * inner, hidden, dtype=dtype) * hidden**-0.5
    down = numbers.normal(count, hidden, inner, dtype=dtype) * inner**-0.5
    elsewhere = ids < first
    ids, weights = (ids - first).masked_fill(elsewhere, count - first), weights.masked_fill(elsewhere, 0)
    gate_up, down = gate_up[first:], down[first:]
    biases, activation = None, "silu"
    if clamped:
        # Some gates and ups exceed the limits at which they are clamped.
        biases = numbers.normal(count, 2 * inner, dtype=dtype) * 5, numbers.normal(count, hidden, dtype=dtype)
        biases, activation = (biases[0][first:], biases[1][first:]), "swigluoai"
    with poisoned():
        given = operators.experts(spaced(x), ids, weights, gate_up, down, biases, activation)
    expected, size = mixture(
        x, ids, weights, count - first, lambda number: (gate_up[number], down[number]), biases, activation
    )
    assert given.dtype == dtype
    within(given, expected, bound(size, dtype))
