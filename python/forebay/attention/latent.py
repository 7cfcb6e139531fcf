"""Multi-head latent attention (DeepSeek-V2, 2024) over rows that are gathered already, in two ways that are equal.

A position's row is `[c | r]`: a latent part of which each head's keys and values are made, and a rotated key that all
heads share. Naive: make them. Absorbed: bring the query to the latent part instead, as scores are `(U_k^T q) . c`; then
a row stands for all heads, and attention is that of one key-value head whose values are the latent part itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from forebay.attention.backend import LatentHeads

Block = tuple[int, int, torch.Tensor]
"""First query, end query, additive mask [queries, positions that they see]."""


def absorbed(
    q: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor | None, up: torch.Tensor, heads: LatentHeads
) -> torch.Tensor:
    """One query a request, [n, heads, nope_dim + rotated], on rows [n, positions, rank + rotated].

    `mask` is additive [n, 1, 1, positions]. Gives [n, heads * value_dim].
    """
    of_keys, of_values = up.split((heads.nope_dim, heads.value_dim), dim=1)
    nope, rotated = q[..., : heads.nope_dim], q[..., heads.nope_dim :]
    latent = torch.einsum("nhd,hdc->nhc", nope, of_keys)
    # Heads stand in as queries of one key head. Values as wide as keys let the blocked kernel compute it.
    query, keys = torch.cat((latent, rotated), dim=-1)[:, None], rows[:, None]
    seen = F.scaled_dot_product_attention(query, keys, keys, attn_mask=mask, scale=heads.scale)[:, 0, :, : heads.rank]
    return torch.einsum("nhc,hvc->nhv", seen, of_values).flatten(1)


def naive(
    q: torch.Tensor, rows: torch.Tensor, blocks: Sequence[Block], up: torch.Tensor, heads: LatentHeads
) -> torch.Tensor:
    """The queries of a chunk, [n, heads, nope_dim + rotated], on rows [positions, rank + rotated], its own at the end.

    Without blocks nothing is before the chunk. Gives [n, heads * value_dim].
    """
    count = q.shape[1]
    made = F.linear(rows[:, : heads.rank], up.flatten(0, 1)).unflatten(1, (count, -1))
    nope, v = made.split((heads.nope_dim, heads.value_dim), dim=-1)
    k = torch.cat((nope, rows[:, None, heads.rank :].expand(-1, count, -1)), dim=-1)
    # The blocked kernel wants values as wide as keys; without it a matrix of all scores would be made.
    width = max(k.shape[-1], heads.value_dim)
    q, k, v = (F.pad(x, (0, width - x.shape[-1])).transpose(0, 1)[None] for x in (q, k, v))
    if not blocks:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=heads.scale)
    else:
        parts = []
        for begin, end, mask in blocks:
            seen = mask.shape[1]
            part = F.scaled_dot_product_attention(
                q[:, :, begin:end], k[:, :, :seen], v[:, :, :seen], attn_mask=mask, scale=heads.scale
            )
            parts.append(part)
        out = torch.cat(parts, dim=2)
    return out[0, ..., : heads.value_dim].transpose(0, 1).flatten(1)
