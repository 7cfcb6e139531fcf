"""Norms, rotations, gates and stores of rows against the layers' own operators."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.attention.backend import LayerKV
from forebay.gpu import kernels
from forebay.gpu.interface import Kernels
from forebay.layers.norm import RMSNorm
from forebay.layers.ops import Heads, TorchOps
from forebay.layers.params import Parameters
from forebay.layers.rotary import Rotary, Rotation, rotate, rotate_pairs
from tests.gpu.support import BOTH, nan

DTYPE = st.sampled_from([torch.float32, torch.bfloat16])
EPS = 1e-5


def close(given: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal to rounding. In bfloat16 operators round more or less often, and the interpreter cuts off instead."""
    narrow = given.dtype == torch.bfloat16
    torch.testing.assert_close(
        given.float(), expected.float(), atol=0.06 if narrow else 1e-5, rtol=2e-2 if narrow else 1e-5
    )


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def norm_of(size: int, dtype: torch.dtype) -> RMSNorm:
    norm = RMSNorm(Parameters(dtype, torch.device("cpu")), "norm", size, EPS)
    norm.weight.copy_(random(size) * 0.3 + 1)
    return norm


def angles(tokens: int, turned: int, dtype: torch.dtype) -> Rotation:
    rotary = Rotary(turned, 100.0, None, 4096, dtype, torch.device("cpu"))
    return rotary(torch.randint(0, 4000, (tokens,)))


def spaced(x: torch.Tensor) -> torch.Tensor:
    """The same lines, with others' elements between them."""
    return torch.cat((x, nan(*x.shape, dtype=x.dtype)), dim=1)[:, : x.shape[1]]


@BOTH
@settings(max_examples=12, deadline=None)
@given(tokens=st.integers(1, 5), hidden=st.integers(1, 300), added=st.booleans(), dtype=DTYPE, seed=st.integers(0, 99))
def test_norm(operators: Kernels, tokens: int, hidden: int, added: bool, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    norm = norm_of(hidden, dtype)
    x = random(tokens, hidden, dtype=dtype)
    residual = random(tokens, hidden, dtype=dtype) * 30 if added else None
    expected, expected_sum = TorchOps().norm(norm, x, None if residual is None else residual.clone())
    out, summed = operators.add_norm(spaced(x), residual, norm.weight, EPS)
    close(out, expected)
    close(summed, expected_sum)
    assert residual is None or summed is residual


@BOTH
@settings(max_examples=8, deadline=None)
@given(tokens=st.integers(1, 4), inner=st.integers(1, 1500), dtype=DTYPE, seed=st.integers(0, 99))
def test_gate(operators: Kernels, tokens: int, inner: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    gate_up = random(tokens, 2 * inner, dtype=dtype) * 3
    close(operators.gate(spaced(gate_up)), TorchOps().gate(gate_up.clone()))


def check_rotate(
    operators: Kernels,
    tokens: int,
    heads: Heads,
    turned: int,
    normed: bool,
    dtype: torch.dtype,
) -> None:
    norms = (norm_of(heads.dim, dtype), norm_of(heads.dim, dtype)) if normed else None
    width = (heads.queries + 2 * heads.keys) * heads.dim
    qkv, rotation = random(tokens, width, dtype=dtype), angles(tokens, turned, dtype)
    pages = [LayerKV(*(nan(40, heads.keys, heads.dim, dtype=dtype) for _ in range(2))) for _ in range(2)]
    writes = torch.randperm(40)[:tokens]
    expected = TorchOps().rotate_and_keep(qkv.clone(), heads, norms, rotation, pages[0], writes)
    weights = None if norms is None else (norms[0].weight, norms[1].weight)
    # Entries of one layer, between those of others.
    kv = LayerKV(*(nan(40, 3, heads.keys, heads.dim, dtype=dtype)[:, 1] for _ in range(2)))
    given = operators.rotate_and_keep(
        spaced(qkv), heads.queries, weights, EPS, rotation.cos, rotation.signed_sin, kv.keys, kv.values, writes
    )
    for part, expected_part in zip(given, expected, strict=True):
        close(part, expected_part)
    for pool, expected_pool in zip(kv, pages[0], strict=True):
        written = torch.zeros(40, dtype=torch.bool).index_fill_(0, writes, True)
        close(pool[written], expected_pool[written])
        assert pool[~written].isnan().all(), "nobody else's entry"


@BOTH
@settings(max_examples=12, deadline=None)
@given(
    tokens=st.integers(1, 4),
    heads=st.builds(Heads, st.sampled_from([1, 4, 9]), st.sampled_from([1, 3]), st.sampled_from([4, 24, 64, 80])),
    share=st.sampled_from([1.0, 0.5]),
    normed=st.booleans(),
    dtype=DTYPE,
    seed=st.integers(0, 99),
)
def test_rotate_and_keep(
    operators: Kernels, tokens: int, heads: Heads, share: float, normed: bool, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    check_rotate(operators, tokens, heads, int(heads.dim * share), normed, dtype)


ONES = torch.tensor([[0.0, 17.0, 19.0, -17.0, 2.0**-10, 3 * 2.0**-10, -(2.0**-9), 447.9]])
"""17 and 19 lie between 16, 18 and 20, and two of the small ones between others."""
AS_8_BITS = [0, 16, 20, -16, 0, 2.0**-8, -(2.0**-9), 448]


def check_8_bits(
    operators: Kernels, tokens: int, heads: Heads, turned: int, normed: bool, dtype: torch.dtype, size: float = 1.0
) -> None:
    """Each key and value is the nearest of all 8-bit floats to that of the layers' operators."""
    norms = (norm_of(heads.dim, dtype), norm_of(heads.dim, dtype)) if normed else None
    qkv = random(tokens, (heads.queries + 2 * heads.keys) * heads.dim, dtype=dtype) * size
    rotation, writes = angles(tokens, turned, dtype), torch.randperm(40)[:tokens]
    exact = LayerKV(*(nan(40, heads.keys, heads.dim) for _ in range(2)))
    # In float32: the only rounding is that to 8 bits.
    wide = Rotation(rotation.cos.float(), rotation.signed_sin.float())
    norm_32 = None
    if norms is not None:
        norm_32 = tuple(norm_of(heads.dim, torch.float32) for _ in norms)
        for narrow, norm in zip(norms, norm_32, strict=True):
            norm.weight.copy_(narrow.weight)
    TorchOps().rotate_and_keep(qkv.float(), heads, norm_32, wide, exact, writes)  # type: ignore[arg-type]
    weights = None if norms is None else (norms[0].weight, norms[1].weight)
    kv = LayerKV(*(torch.full((40, 3, heads.keys, heads.dim), 0x7F, dtype=torch.uint8)[:, 1] for _ in range(2)))
    operators.rotate_and_keep(
        spaced(qkv), heads.queries, weights, EPS, rotation.cos, rotation.signed_sin, kv.keys, kv.values, writes
    )
    floats = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    floats = floats[floats.isfinite()]
    written = torch.zeros(40, dtype=torch.bool).index_fill_(0, writes, True)
    for pool, wanted in zip(kv, exact, strict=True):
        found, number = pool[written].view(torch.float8_e4m3fn).float(), wanted[written].clamp(-448, 448)
        least = (number[..., None] - floats).abs().amin(-1)
        # A norm in bfloat16 is rounded before keys turn.
        slack = number.abs() * 2.0**-6 + 0.02 if normed and dtype == torch.bfloat16 else 1e-5 * number.abs() + 1e-6
        assert ((found - number).abs() <= least + slack).all()
        assert (pool[~written] == 0x7F).all(), "nobody else's entry"


@BOTH
@settings(max_examples=10, deadline=None)
@given(
    tokens=st.integers(1, 3),
    heads=st.builds(Heads, st.sampled_from([1, 4]), st.sampled_from([1, 3]), st.sampled_from([24, 64])),
    share=st.sampled_from([1.0, 0.5]),
    normed=st.booleans(),
    dtype=DTYPE,
    size=st.sampled_from([0.01, 1.0, 300.0]),
    seed=st.integers(0, 99),
)
def test_keys_and_values_of_8_bits(
    operators: Kernels,
    tokens: int,
    heads: Heads,
    share: float,
    normed: bool,
    dtype: torch.dtype,
    size: float,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    check_8_bits(operators, tokens, heads, int(heads.dim * share), normed, dtype, size)


def kept_as_it_is(operators: Kernels, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The 8-bit floats that are kept of keys and values [n, dim] of one head, which do not turn."""
    n, dim = k.shape
    kept_keys, kept_values = torch.zeros(2, n, 1, dim, dtype=torch.uint8)
    cos, sin = torch.ones(n, 1, dim), torch.zeros(n, 1, dim)
    qkv, writes = torch.cat((k, k, v), dim=1), torch.arange(n)
    operators.rotate_and_keep(qkv, 1, None, EPS, cos, sin, kept_keys, kept_values, writes)
    return kept_keys[:, 0].view(torch.float8_e4m3fn), kept_values[:, 0].view(torch.float8_e4m3fn)


@BOTH
def test_ties_large_numbers_and_nan_in_8_bits(operators: Kernels) -> None:
    check_kept(operators)


def check_kept(operators: Kernels) -> None:
    """Ties go to even ones, large numbers become 448, and NaN stays NaN."""
    for kept in kept_as_it_is(operators, ONES, ONES):
        assert kept.float().tolist() == [AS_8_BITS]

    large = torch.tensor([[449.0, 1e30, torch.inf, torch.nan, -449.0, -1e30, -torch.inf, -torch.nan]])
    _, values = kept_as_it_is(operators, torch.zeros_like(large), large)
    expected = torch.tensor([[448.0, 448, 448, torch.nan, -448, -448, -448, torch.nan]])
    torch.testing.assert_close(values.float(), expected, atol=0, rtol=0, equal_nan=True)
    keys, _ = kept_as_it_is(operators, large.nan_to_num(nan=torch.nan, posinf=1e38, neginf=-1e38), large)
    torch.testing.assert_close(keys.float(), expected, atol=0, rtol=0, equal_nan=True)


def test_more_heads_than_a_program_takes() -> None:
    check_rotate(kernels, 2, Heads(40, 8, 128), 128, True, torch.float32)


@BOTH
@settings(max_examples=10, deadline=None)
@given(
    tokens=st.integers(1, 4),
    rank=st.integers(1, 70),
    turned=st.sampled_from([2, 8, 24]),
    pairs=st.booleans(),
    dtype=DTYPE,
    seed=st.integers(0, 99),
)
def test_latent_rows(
    operators: Kernels, tokens: int, rank: int, turned: int, pairs: bool, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    norm, rotation = norm_of(rank, dtype), angles(tokens, turned, dtype)
    made = random(tokens, rank + turned, dtype=dtype)
    turn = rotate_pairs if pairs else rotate
    expected = torch.cat((norm(made[:, :rank]), turn(made[:, None, rank:], rotation)[:, 0]), dim=1)
    pool, writes = nan(20, 3, rank + turned, dtype=dtype)[:, 2], torch.randperm(20)[:tokens]
    rows = operators.keep_latent(spaced(made), norm.weight, EPS, rotation.cos, rotation.signed_sin, pairs, pool, writes)
    close(rows, expected)
    assert pool[writes].equal(rows)
    assert int(pool.isnan().sum()) == (20 - tokens) * (rank + turned)


@BOTH
@settings(max_examples=10, deadline=None)
@given(
    tokens=st.integers(1, 4),
    sizes=st.sampled_from([(16, 16), (16, 8), (128, 64), (24, 10)]),
    pairs=st.booleans(),
    dtype=DTYPE,
    seed=st.integers(0, 99),
)
def test_index_keys(
    operators: Kernels, tokens: int, sizes: tuple[int, int], pairs: bool, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    dim, turned = sizes
    weight, bias, rotation = random(dim, dtype=dtype), random(dim, dtype=dtype), angles(tokens, turned, dtype)
    made = random(tokens, dim, dtype=dtype) * 4 + 1
    normal = F.layer_norm(made, (dim,), weight, bias, EPS)[:, None]
    turn = rotate_pairs if pairs else rotate
    expected = torch.cat((turn(normal[..., :turned], rotation), normal[..., turned:]), dim=-1)[:, 0]
    pool, writes = nan(20, 3, dim, dtype=dtype)[:, 2], torch.randperm(20)[:tokens]
    operators.keep_index_keys(spaced(made), weight, bias, EPS, rotation.cos, rotation.signed_sin, pairs, pool, writes)
    close(pool[writes], expected)
    assert int(pool.isnan().sum()) == (20 - tokens) * dim


MUTANTS = {
    "half of a head": ("cosine - b * sine", "cosine + b * sine"),
    "values that turn": ("b * cosine + a * sine, b)", "b * cosine + a * sine, a)"),
    "another's entry": ("keys + entry * key_stride", "keys + (entry + 1) * key_stride"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_rotation_is_seen(name: str, mutate: Callable[..., ModuleType]) -> None:
    torch.manual_seed(0)
    mutated = mutate("rotate", *MUTANTS[name])
    with pytest.raises(AssertionError):
        check_rotate(mutated, 3, Heads(4, 2, 16), 16, True, torch.float32)


OF_8_BITS = {
    "ties": ("+ 0x7FFFF + ((size >> 20) & 1)", "+ 0x80000"),
    "signs": ("((bits >> 24) & 0x80)", "((bits >> 24) & 0)"),
    "largest": ("tl.minimum(tl.maximum(x, -LARGEST), LARGEST)", "tl.minimum(x, LARGEST)"),
    "NaN": ("tl.where(x == x, code, _NO_NUMBER)", "code"),
}


@pytest.mark.parametrize("name", OF_8_BITS)
def test_a_wrong_8_bit_float_is_seen(name: str, mutate: Callable[..., ModuleType]) -> None:
    mutate("eight_bits", *OF_8_BITS[name], "kept", ("rotate",))
    with pytest.raises(AssertionError):
        check_kept(kernels)
