"""Norms, rotations, gates and stores of rows, compared with the same formulas in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from forebay.gpu.interface import Kernels
from forebay.layers.ops import GATES, Heads
from forebay.layers.rotary import Rotary, Rotation
from tests.gpu.checks.memory import CPU, SINGLE, Numbers, nan, poisoned, rounding, spaced, within

EPS = 1e-5


def room(dtype: torch.dtype) -> float:
    """The error of a result relative to its terms: two roundings between operators, and one of the result.

    PyTorch's operators round the norm's result, and so do kernels that imitate them.
    """
    return 3 * rounding(dtype) + SINGLE


def weight_of(numbers: Numbers, size: int, dtype: torch.dtype) -> torch.Tensor:
    return (numbers.normal(size) * 0.3 + 1).to(dtype)


def angles(numbers: Numbers, tokens: int, turned: int, dtype: torch.dtype) -> Rotation:
    rotary = Rotary(turned, 100.0, None, 4096, dtype, numbers.device)
    return rotary(numbers.below(4000, tokens))


def turned_halves(x: torch.Tensor, rotation: Rotation, pairs: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 heads [tokens, heads, dim] whose first elements are rotated, and the sums of absolute terms."""
    cos, sin = rotation.cos.double(), rotation.signed_sin.double()
    half = cos.shape[-1] // 2
    first, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (first[..., ::2], first[..., 1::2]) if pairs else first.chunk(2, dim=-1)
    c, s = cos[..., :half], sin[..., half:]
    out = torch.cat((a * c - b * s, b * c + a * s, rest), dim=-1)
    size = torch.cat(((a * c).abs() + (b * s).abs(), (b * c).abs() + (a * s).abs(), rest.abs()), dim=-1)
    return out, size


def check_one_row(
    operators: Kernels,
    rows: int,
    inputs: int,
    biased: bool,
    dtype: torch.dtype,
    device: torch.device = CPU,
    seed: int = 0,
) -> None:
    """Sums are float32: only the result is rounded. The kernel before writes `state`, and programs must wait for it."""
    numbers = Numbers(device, seed)
    weight, x = numbers.normal(rows, inputs, dtype=dtype), numbers.normal(1, inputs, dtype=dtype)
    bias = numbers.normal(rows, dtype=dtype) if biased else None
    with poisoned():
        state, _ = operators.add_norm(x, None, torch.ones_like(x[0]), EPS)
        given = operators.one_row(state, weight, bias)
    expected = state.double() @ weight.double().T
    size = state.double().abs() @ weight.double().abs().T
    if bias is not None:
        expected, size = expected + bias.double(), size + bias.double().abs()
    within(given, expected, expected.abs() * rounding(dtype) + size * SINGLE)


def check_one_row_gated(
    operators: Kernels,
    inner: int,
    inputs: int,
    biased: bool,
    dtype: torch.dtype,
    device: torch.device = CPU,
    seed: int = 0,
    activation: str = "silu",
) -> None:
    """As `check_one_row`, for gates and ups, which are rounded before the gate is applied."""
    numbers = Numbers(device, seed)
    weight = numbers.normal(2 * inner, inputs, dtype=dtype) * (2 * inputs**-0.5)
    x, bias = numbers.normal(1, inputs, dtype=dtype), numbers.normal(2 * inner, dtype=dtype) if biased else None
    with poisoned():
        state, _ = operators.add_norm(x, None, torch.ones_like(x[0]), EPS)
        given = operators.one_row_gated(state, weight, bias, activation)
    product, size = state.double() @ weight.double().T, state.double().abs() @ weight.double().abs().T
    if bias is not None:
        product, size = product + bias.double(), size + bias.double().abs()
    gates, ups = product.chunk(2, dim=-1)
    of_gates, of_ups = (product.abs() * rounding(dtype) + size * SINGLE).chunk(2, dim=-1)
    expected = GATES[activation](gates, ups)
    # Error bound: the slope of an activation is at most 1.2, and its value at most its input; 1 may be added to ups.
    lost = 1.2 * of_gates * (ups.abs() + 1 + of_ups) + (gates.abs() + of_gates) * of_ups
    within(given, expected, lost + expected.abs() * rounding(dtype) + (gates * ups).abs() * SINGLE)


def check_norm(
    operators: Kernels,
    tokens: int,
    hidden: int,
    added: bool,
    dtype: torch.dtype,
    device: torch.device = CPU,
    seed: int = 0,
) -> None:
    """With `added` there is a residual, which is overwritten."""
    numbers = Numbers(device, seed)
    weight, x = weight_of(numbers, hidden, dtype), numbers.normal(tokens, hidden, dtype=dtype)
    residual = (numbers.normal(tokens, hidden) * 30).to(dtype) if added else None
    expected_sum = x.double() if residual is None else x.double() + residual.double()
    with poisoned():
        out, summed = operators.add_norm(spaced(x), residual, weight, EPS)
    assert residual is None or summed is residual
    within(summed, expected_sum, expected_sum.abs() * rounding(dtype))
    # The norm uses the sum as rounded for the next layer.
    expected = F.rms_norm(summed.double(), (hidden,), weight.double(), EPS)
    within(out, expected, expected.abs() * room(dtype))


def check_gate(
    operators: Kernels,
    tokens: int,
    inner: int,
    dtype: torch.dtype,
    device: torch.device = CPU,
    seed: int = 0,
    activation: str = "silu",
) -> None:
    gate_up = (Numbers(device, seed).normal(tokens, 2 * inner) * 3).to(dtype)
    with poisoned():
        out = operators.gate(spaced(gate_up), activation)
    gates, ups = gate_up.double().chunk(2, dim=-1)
    expected = GATES[activation](gates, ups)
    # An activation's factor near zero is the difference of two numbers near 1.
    lost = 0 if activation == "silu" else (gates * ups).abs() * SINGLE
    within(out, expected, expected.abs() * room(dtype) + lost)


def check_rotate(
    operators: Kernels,
    tokens: int,
    heads: Heads,
    turned: int,
    normed: bool,
    dtype: torch.dtype,
    device: torch.device = CPU,
    seed: int = 0,
) -> None:
    """Rotates the first `turned` elements of each head. With `normed` the heads are normalised before."""
    numbers = Numbers(device, seed)
    weights = (weight_of(numbers, heads.dim, dtype), weight_of(numbers, heads.dim, dtype)) if normed else None
    qkv = numbers.normal(tokens, (heads.queries + 2 * heads.keys) * heads.dim, dtype=dtype)
    rotation, entries = angles(numbers, tokens, turned, dtype), tokens + 36
    q, k, v = qkv.double().unflatten(1, (-1, heads.dim)).split((heads.queries, heads.keys, heads.keys), dim=1)
    if weights is not None:
        q, k = (
            F.rms_norm(part, (heads.dim,), weight.double(), EPS) for part, weight in zip((q, k), weights, strict=True)
        )
    expected = [turned_halves(q, rotation), turned_halves(k, rotation), (v, v.abs())]
    writes = numbers.order(entries)[:tokens]
    # The entries of one layer, between those of others.
    pools = [nan(entries, 3, heads.keys, heads.dim, dtype=dtype, device=device)[:, 1] for _ in range(2)]
    given = operators.rotate_and_keep(
        spaced(qkv), heads.queries, weights, EPS, rotation.cos, rotation.signed_sin, pools[0], pools[1], writes
    )
    for part, (exact, size) in zip(given, expected, strict=True):
        within(part, exact, size * room(dtype))
    for pool, part in zip(pools, given[1:], strict=True):
        assert pool[writes].equal(part)
        assert int(pool.isnan().sum()) == (entries - tokens) * heads.keys * heads.dim, "entries of others are unchanged"


def check_latent(
    operators: Kernels,
    tokens: int,
    rank: int,
    turned: int,
    pairs: bool,
    dtype: torch.dtype,
    device: torch.device = CPU,
    seed: int = 0,
) -> None:
    """A row has `rank` normalised elements and `turned` rotated ones.

    `pairs`: whether neighbours are rotated together, or the elements of two halves.
    """
    numbers, entries = Numbers(device, seed), tokens + 16
    weight, rotation = weight_of(numbers, rank, dtype), angles(numbers, tokens, turned, dtype)
    made = numbers.normal(tokens, rank + turned, dtype=dtype)
    latent = F.rms_norm(made[:, :rank].double(), (rank,), weight.double(), EPS)
    turns, size = (part[:, 0] for part in turned_halves(made[:, None, rank:].double(), rotation, pairs))
    pool = nan(entries, 3, rank + turned, dtype=dtype, device=device)[:, 2]
    writes = numbers.order(entries)[:tokens]
    with poisoned():
        rows = operators.keep_latent(spaced(made), weight, EPS, rotation.cos, rotation.signed_sin, pairs, pool, writes)
    within(rows, torch.cat((latent, turns), dim=1), torch.cat((latent.abs(), size), dim=1) * room(dtype))
    assert pool[writes].equal(rows)
    assert int(pool.isnan().sum()) == (entries - tokens) * (rank + turned)


def check_index_keys(
    operators: Kernels,
    tokens: int,
    dim: int,
    turned: int,
    pairs: bool,
    dtype: torch.dtype,
    device: torch.device = CPU,
    seed: int = 0,
) -> None:
    """Stores keys of an index, of which `turned` elements are rotated."""
    numbers, entries = Numbers(device, seed), tokens + 16
    weight, bias = numbers.normal(dim, dtype=dtype), numbers.normal(dim, dtype=dtype)
    rotation = angles(numbers, tokens, turned, dtype)
    made = (numbers.normal(tokens, dim) * 4 + 1).to(dtype)
    scaled = F.layer_norm(made.double(), (dim,), weight.double(), None, EPS)
    expected, size = (part[:, 0] for part in turned_halves((scaled + bias.double())[:, None], rotation, pairs))
    # The sum with the bias may be much smaller than its terms, and the mean is subtracted before.
    terms = scaled.abs() + bias.double().abs() + weight.double().abs()
    if turned:
        # In a rotated pair each element gets a part of the other's error.
        terms = terms + terms.amax(-1, keepdim=True)
    pool = nan(entries, 3, dim, dtype=dtype, device=device)[:, 2]
    writes = numbers.order(entries)[:tokens]
    operators.keep_index_keys(spaced(made), weight, bias, EPS, rotation.cos, rotation.signed_sin, pairs, pool, writes)
    within(pool[writes], expected, size * room(dtype) + terms * SINGLE)
    assert int(pool.isnan().sum()) == (entries - tokens) * dim
