"""The operators of layers besides matrix products and attention, in PyTorch's operators."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from forebay.gpu.reference.eight_bits import kept


def one_row(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See `interface.Layers`."""
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def one_row_gated(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str = "silu"
) -> torch.Tensor:
    """See `interface.Layers`."""
    return gate(one_row(x, weight, bias), activation)


def add_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `interface.Layers`."""
    summed = x if residual is None else residual.add_(x)
    return F.rms_norm(summed.float(), (x.shape[1],), weight.float(), eps).to(x.dtype), summed


def gate(gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """See `interface.Layers`."""
    return gated(gate_up.float(), activation).to(gate_up.dtype)


def gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Applies the activation to gates and multiplies by ups; the last dimension has gates and then ups."""
    gates, ups = gate_up.chunk(2, dim=-1)
    if activation == "swigluoai":
        gates, ups = gates.clamp(max=7.0), ups.clamp(-7.0, 7.0) + 1
        return gates * torch.sigmoid(1.702 * gates) * ups
    if activation == "silu":
        return F.silu(gates) * ups
    return F.gelu(gates, approximate="tanh" if activation == "gelu_pytorch_tanh" else "none") * ups


def rotate_and_keep(
    qkv: torch.Tensor,
    queries: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    writes: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `interface.Layers`."""
    count, dim, half = keys.shape[1], keys.shape[2], cos.shape[-1] // 2
    q, k, v = qkv.unflatten(1, (-1, dim)).split((queries, count, count), dim=1)
    made = []
    for heads, weight in zip((q, k), norms or (None, None), strict=True):
        normal = heads if weight is None else F.rms_norm(heads, (dim,), weight, eps)
        turned = _turned(normal[..., :half], normal[..., half : 2 * half], cos, signed_sin)
        made.append(torch.cat((*turned, normal[..., 2 * half :].float()), dim=-1))
        heads.copy_(made[-1])
    # Keys are rounded from float32 only once.
    keys.index_copy_(0, writes.long(), kept(made[1], keys))
    values.index_copy_(0, writes.long(), kept(v, values))
    return q, k, v


def keep_latent(
    made: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    pairs: bool,
    pool: torch.Tensor,
    writes: torch.Tensor,
) -> torch.Tensor:
    """See `interface.Layers`."""
    rank = len(weight)
    latent = F.rms_norm(made[:, :rank].float(), (rank,), weight.float(), eps)
    a, b = _halves(made[:, None, rank:], pairs)
    turned = torch.cat(_turned(a, b, cos, signed_sin), dim=-1)[:, 0]
    rows = torch.cat((latent, turned), dim=-1).to(made.dtype)
    pool.index_copy_(0, writes.long(), rows)
    return rows


def keep_index_keys(
    made: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    pairs: bool,
    pool: torch.Tensor,
    writes: torch.Tensor,
) -> None:
    """See `interface.Layers`."""
    turned = cos.shape[-1]
    normal = F.layer_norm(made, (len(weight),), weight, bias, eps)
    a, b = _halves(normal[:, None, :turned], pairs)
    keys = torch.cat((torch.cat(_turned(a, b, cos, signed_sin), dim=-1)[:, 0], normal[:, turned:].float()), dim=-1)
    pool.index_copy_(0, writes.long(), keys.to(pool.dtype))


def _halves(x: torch.Tensor, pairs: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if pairs:
        return x[..., ::2], x[..., 1::2]
    a, b = x.chunk(2, dim=-1)
    return a, b


def _turned(
    a: torch.Tensor, b: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rotated halves of heads [tokens, heads, half], float32. Angles are [tokens, 1, 2 * half]."""
    half = a.shape[-1]
    c, s = cos[..., :half].float(), signed_sin[..., half:].float()
    return a.float() * c - b.float() * s, b.float() * c + a.float() * s
