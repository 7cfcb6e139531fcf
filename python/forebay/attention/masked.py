"""Attention with options in PyTorch's operators: windows, chunks, caps, sinks and scales."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from forebay.attention.backend import How


def positions_mask(
    queries: torch.Tensor, keys: torch.Tensor, how: How, last: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns bool `[*queries, keys]`, true where a query attends to a key, from the positions of both.

    The last dimension of `queries` has one element per query: 1 for decode rows. `keys` is [keys]. `last`, of the shape
    of `queries`, is the last position that each query attends to; None: its own position.
    """
    of_query, of_key = queries[..., None], keys
    if how.both_ways:
        distance = (of_key - of_query).abs()
        return torch.ones_like(distance, dtype=torch.bool) if how.window is None else distance < how.window
    sees = of_key <= (of_query if last is None else last[..., None])
    if how.window is not None:
        # The window includes the query's own position.
        sees = sees & (of_key > of_query - how.window)
    if how.chunk is not None:
        sees = sees & (of_key // how.chunk == of_query // how.chunk)
    return sees


def masked_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, how: How) -> torch.Tensor:
    """Returns [b, heads, n, value_dim] for q [b, heads, n, head_dim]; `mask` is bool, broadcastable to [b, 1, n, m].

    k is [b, kv_heads, m, head_dim], and v [b, kv_heads, m, value_dim]. With a cap or sinks, scores are float32.
    """
    if how.cap is None and how.sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=how.scale, enable_gqa=True)
    kv_heads, queries = k.shape[1], q.shape[2]
    grouped = q.unflatten(1, (kv_heads, -1))
    scale = q.shape[3] ** -0.5 if how.scale is None else how.scale
    scores = (grouped @ k[:, :, None].mT).float() * scale
    if how.cap is not None:
        scores = how.cap * torch.tanh(scores / how.cap)
    scores = scores.masked_fill(~mask[..., None, :, :] if mask.dim() > 2 else ~mask, -torch.inf)
    if how.sinks is not None:
        sinks = how.sinks.float().view(1, kv_heads, -1, 1, 1).expand(len(q), -1, -1, queries, 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[2]].to(v.dtype)
    out: torch.Tensor = weights @ v[:, :, None]
    return out.flatten(1, 2)
