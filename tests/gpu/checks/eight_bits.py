"""Keys and values stored as 8-bit floats, compared with the nearest of all 8-bit floats."""

from __future__ import annotations

import torch

from forebay.attention.backend import LayerKV
from forebay.gpu.interface import Kernels
from forebay.layers.norm import RMSNorm
from forebay.layers.ops import Heads, TorchOps
from forebay.layers.params import Parameters
from forebay.layers.rotary import Rotation
from tests.gpu.checks.layers import EPS, angles, weight_of
from tests.gpu.checks.memory import CPU, Numbers, nan, spaced

ONES = torch.tensor([[0.0, 17.0, 19.0, -17.0, 2.0**-10, 3 * 2.0**-10, -(2.0**-9), 447.9]])
"""17 and 19 are halfway between 8-bit floats (16, 18 and 20), and so are the first two of the small numbers."""
AS_8_BITS = [0, 16, 20, -16, 0, 2.0**-8, -(2.0**-9), 448]
_EMPTY = 0x7F
"""The code of NaN."""


def _norm(weight: torch.Tensor) -> RMSNorm:
    """A layer's norm in float32."""
    norm = RMSNorm(Parameters(torch.float32, weight.device), "norm", len(weight), EPS)
    norm.weight.copy_(weight)
    return norm


def check_8_bits(
    operators: Kernels,
    tokens: int,
    heads: Heads,
    turned: int,
    normed: bool,
    dtype: torch.dtype,
    size: float = 1.0,
    device: torch.device = CPU,
    seed: int = 0,
) -> None:
    """Each stored key and value is an 8-bit float nearest to the result of the layers' operators in float32."""
    numbers = Numbers(device, seed)
    norms = (weight_of(numbers, heads.dim, dtype), weight_of(numbers, heads.dim, dtype)) if normed else None
    qkv = (numbers.normal(tokens, (heads.queries + 2 * heads.keys) * heads.dim) * size).to(dtype)
    entries = 2 * tokens + 32
    rotation, writes = angles(numbers, tokens, turned, dtype), numbers.order(entries)[:tokens]
    exact = LayerKV(*(nan(entries, heads.keys, heads.dim, device=device) for _ in range(2)))
    wide = Rotation(rotation.cos.float(), rotation.signed_sin.float())
    layers = None if norms is None else (_norm(norms[0]), _norm(norms[1]))
    TorchOps().rotate_and_keep(qkv.float(), heads, layers, wide, exact, writes)
    shape = entries, 3, heads.keys, heads.dim
    kv = LayerKV(*(torch.full(shape, _EMPTY, dtype=torch.uint8, device=device)[:, 1] for _ in range(2)))
    operators.rotate_and_keep(
        spaced(qkv), heads.queries, norms, EPS, rotation.cos, rotation.signed_sin, kv.keys, kv.values, writes
    )
    floats = torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()
    floats = floats[floats.isfinite()]
    written = torch.zeros(entries, dtype=torch.bool, device=device).index_fill_(0, writes, True)
    for pool, wanted in zip(kv, exact, strict=True):
        found, number = pool[written].view(torch.float8_e4m3fn).float(), wanted[written].clamp(-448, 448)
        least = (number[..., None] - floats).abs().amin(-1)
        # A norm in bfloat16 is rounded before the rotation of keys.
        slack = number.abs() * 2.0**-6 + 0.02 if normed and dtype == torch.bfloat16 else 1e-5 * number.abs() + 1e-6
        assert ((found - number).abs() <= least + slack).all()
        assert (pool[~written] == _EMPTY).all(), "entries of others are unchanged"


def kept_as_it_is(operators: Kernels, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stores keys and values [n, dim] of one head as 8-bit floats, without a rotation."""
    n, dim = k.shape
    kept_keys, kept_values = torch.zeros(2, n, 1, dim, dtype=torch.uint8, device=k.device)
    cos, sin = torch.ones(n, 1, dim, device=k.device), torch.zeros(n, 1, dim, device=k.device)
    qkv, writes = torch.cat((k, k, v), dim=1), torch.arange(n, device=k.device)
    operators.rotate_and_keep(qkv, 1, None, EPS, cos, sin, kept_keys, kept_values, writes)
    return kept_keys[:, 0].view(torch.float8_e4m3fn), kept_values[:, 0].view(torch.float8_e4m3fn)


def check_kept(operators: Kernels, device: torch.device = CPU) -> None:
    """Ties round to even, large numbers become 448, and NaN stays NaN."""
    for kept in kept_as_it_is(operators, ONES.to(device), ONES.to(device)):
        assert kept.float().tolist() == [AS_8_BITS]

    large = torch.tensor([[449.0, 1e30, torch.inf, torch.nan, -449.0, -1e30, -torch.inf, -torch.nan]], device=device)
    _, values = kept_as_it_is(operators, torch.zeros_like(large), large)
    expected = torch.tensor([[448.0, 448, 448, torch.nan, -448, -448, -448, torch.nan]], device=device)
    torch.testing.assert_close(values.float(), expected, atol=0, rtol=0, equal_nan=True)
    keys, _ = kept_as_it_is(operators, large.nan_to_num(nan=torch.nan, posinf=1e38, neginf=-1e38), large)
    torch.testing.assert_close(keys.float(), expected, atol=0, rtol=0, equal_nan=True)
