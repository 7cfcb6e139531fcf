"""Multi-head latent attention (DeepSeek-V2, 2024) over gathered rows, in two mathematically equal forms.

A position's row is `[c | r]`. `c` is the latent part, from which each head's keys and values are computed. `r` is a
rotated key that all heads share. The *naive* form computes the keys and values. The *absorbed* form maps the query to
the latent space, since scores are `(U_k^T q) . c`. It is attention with one key-value head, whose values are the
latent part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from forebay.attention.backend import LatentHeads

Block = tuple[int, int, torch.Tensor]
"""First query, end query, and additive mask [queries, positions that they may attend to]."""
MADE = 1 << 25
"""The largest number of elements of keys and values that are computed at once, unless a single head has more.

For all heads at once they would take gigabytes.
"""


def absorbed(
    q: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor | None, up: torch.Tensor, heads: LatentHeads
) -> torch.Tensor:
    """Absorbed attention for a query per request, [n, heads, nope_dim + rotated]; rows [n, positions, rank + rotated].

    `mask` is additive [n, 1, 1, positions]. The result is [n, heads * value_dim].
    """
    of_keys, of_values = up.split((heads.nope_dim, heads.value_dim), dim=1)
    nope, rotated = q[..., : heads.nope_dim], q[..., heads.nope_dim :]
    latent = torch.einsum("nhd,hdc->nhc", nope, of_keys)
    # Heads become queries of one key head. With values as wide as keys, the blocked kernel can be used.
    query, keys = torch.cat((latent, rotated), dim=-1)[:, None], rows[:, None]
    seen = F.scaled_dot_product_attention(query, keys, keys, attn_mask=mask, scale=heads.scale)[:, 0, :, : heads.rank]
    return torch.einsum("nhc,hvc->nhv", seen, of_values).flatten(1)


def of_chunk(
    q: torch.Tensor, rows: torch.Tensor, blocks: Sequence[Block], up: torch.Tensor, heads: LatentHeads
) -> torch.Tensor:
    """Attention of a chunk's queries [n, heads, nope_dim + rotated] to rows [positions, rank + rotated].

    The chunk's own rows are the last. No `blocks`: nothing precedes the chunk. The result is [n, heads * value_dim].
    """
    rotated = rows.shape[1] - heads.rank
    both = (heads.nope_dim + heads.value_dim) * heads.rank
    pairs = 2 * len(q) * len(rows)
    # Multiplications per head of both forms. With few queries, the absorbed form has fewer, since it does not compute
    # the keys and values of all earlier positions.
    made = len(rows) * both + pairs * max(heads.nope_dim + rotated, heads.value_dim)
    brought = len(q) * both + pairs * rows.shape[1]
    way = naive if made <= brought or not blocks else absorbed_chunk
    return way(q, rows, blocks, up, heads)


def absorbed_chunk(
    q: torch.Tensor, rows: torch.Tensor, blocks: Sequence[Block], up: torch.Tensor, heads: LatentHeads
) -> torch.Tensor:
    """`of_chunk` in the absorbed form, for few queries, with blocks. It computes no keys and values."""
    of_keys, of_values = up.split((heads.nope_dim, heads.value_dim), dim=1)
    nope, rotated = q[..., : heads.nope_dim], q[..., heads.nope_dim :]
    latent = torch.einsum("nhd,hdc->nhc", nope, of_keys)
    query = torch.cat((latent, rotated), dim=-1).transpose(0, 1)[None]
    keys = rows[None, None].expand(-1, q.shape[1], -1, -1)
    seen = _by_blocks(query, keys, keys, blocks, heads.scale)[0, ..., : heads.rank]
    return torch.einsum("hnc,hvc->nhv", seen, of_values).flatten(1)


def naive(
    q: torch.Tensor, rows: torch.Tensor, blocks: Sequence[Block], up: torch.Tensor, heads: LatentHeads
) -> torch.Tensor:
    """`of_chunk` in the naive form, for many queries. Computes at most `MADE` elements of keys and values at once."""
    at_once = max(1, MADE // (len(rows) * up.shape[1]))
    parts = zip(q.split(at_once, dim=1), up.split(at_once), strict=True)
    outputs = [_made(of_some, rows, blocks, up_of_some, heads) for of_some, up_of_some in parts]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _made(
    q: torch.Tensor, rows: torch.Tensor, blocks: Sequence[Block], up: torch.Tensor, heads: LatentHeads
) -> torch.Tensor:
    count = q.shape[1]
    made = F.linear(rows[:, : heads.rank], up.flatten(0, 1)).unflatten(1, (count, -1))
    nope, v = made.split((heads.nope_dim, heads.value_dim), dim=-1)
    k = torch.cat((nope, rows[:, None, heads.rank :].expand(-1, count, -1)), dim=-1)
    # The blocked kernel requires values as wide as keys; without it a matrix of all scores would be allocated.
    width = max(k.shape[-1], heads.value_dim)
    q, k, v = (F.pad(x, (0, width - x.shape[-1])).transpose(0, 1)[None] for x in (q, k, v))
    out = _by_blocks(q, k, v, blocks, heads.scale)
    return out[0, ..., : heads.value_dim].transpose(0, 1).flatten(1)


def _by_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Sequence[Block], scale: float
) -> torch.Tensor:
    """Attention of q [1, heads, n, width], at the last n positions, to k and v [1, heads, positions, width]."""
    if not blocks:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    parts = []
    for begin, end, mask in blocks:
        seen = mask.shape[1]
        part = F.scaled_dot_product_attention(
            q[:, :, begin:end], k[:, :, :seen], v[:, :, :seen], attn_mask=mask, scale=scale
        )
        parts.append(part)
    return torch.cat(parts, dim=2)
