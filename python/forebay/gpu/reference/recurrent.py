"""Convolutions, recurrences and gated norms in PyTorch's operators. Recurrences are computed token by token."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from forebay.gpu.recurrent import KEPT, SOURCE, TARGET, StateHeads, StateRows, StateWeights

_EPSILON = 1e-6


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    table: torch.Tensor,
    rows: StateRows,
    *,
    silu: bool = False,
    gates: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """See `interface.Recurrences`."""
    if gates is not None:
        x = x * gates[0]
    taps, count, tokens = weight.shape[1], len(rows.places), len(x)
    first, row = rows.first.long(), rows.of_token.long()
    of_tokens = torch.arange(tokens, device=x.device)
    # A row without inputs is added after the last row, for tokens that belong to no row.
    before = _with_nobody(_states(table, rows))
    begin = first.index_select(0, row)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    if bias is not None:
        total = total + bias.float()
    for tap in range(taps):
        at = of_tokens - (taps - 1) + tap
        own = x.index_select(0, at.clamp(min=0))
        old = before[row, (at - begin + taps - 1).clamp(0, taps - 2)]
        total = total + torch.where((at >= begin)[:, None], own, old).float() * weight[:, tap].float()
    out = total.to(x.dtype)
    if silu:
        out = F.silu(out)
    if gates is not None:
        out = out * gates[1]
    out = out.masked_fill((row >= count)[:, None], 0)

    lengths, places = first.diff(), rows.places.long()
    windows = torch.cat((before[:count], x.new_zeros(count, 1, x.shape[1])), dim=1)

    def behind(positions: torch.Tensor) -> torch.Tensor:
        """Returns the last inputs [r, taps - 1, channels] of each row up to its first `positions` [r] tokens."""
        at = positions[:, None] + torch.arange(taps - 1, device=x.device)
        own = x.index_select(0, (first[:-1, None] + at - (taps - 1)).clamp(0, tokens - 1).flatten())
        old = windows.gather(1, at.clamp(max=taps - 1)[..., None].expand(-1, -1, x.shape[1]))
        return torch.where((at >= taps - 1)[..., None], own.view_as(old), old)

    kept, last = behind((lengths - 1).clamp(min=0)), behind(lengths)
    table.index_copy_(0, places[:, KEPT], kept)
    table.index_copy_(0, places[:, TARGET], last)
    return out


def _states(table: torch.Tensor, rows: StateRows) -> torch.Tensor:
    """Returns the states before rows, [r, ...]."""
    source = rows.places[:, SOURCE].long()
    found = table.index_select(0, source.clamp(min=0))
    return found.masked_fill_((source < 0).view(-1, *[1] * (found.dim() - 1)), 0)


def _with_nobody(states: torch.Tensor) -> torch.Tensor:
    """Appends a state of zeros to the states [r, ...]."""
    return torch.cat((states, states.new_zeros(1, *states.shape[1:])))


def recur(
    mixed: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor | None,
    weights: StateWeights,
    shape: StateHeads,
    table: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:
    """See `interface.Recurrences`."""
    tokens, count = len(mixed), len(rows.places)
    keys = shape.key_heads * shape.key_dim
    q, k, v = mixed.float().split((keys, keys, shape.heads * shape.value_dim), dim=1)
    q, k = (one.unflatten(1, (shape.key_heads, shape.key_dim)) for one in (q, k))
    if shape.delta:
        q, k = (one * torch.rsqrt(one.square().sum(dim=-1, keepdim=True) + _EPSILON) for one in (q, k))
        q = q * shape.key_dim**-0.5
    shared = shape.heads // shape.key_heads
    q, k = (one.repeat(1, shared, 1) if shape.tiled else one.repeat_interleave(shared, dim=1) for one in (q, k))
    v = v.unflatten(1, (shape.heads, shape.value_dim))
    steps = F.softplus(a.float() + weights.step_bias).unflatten(1, (shape.heads, -1))
    decays = (-weights.decay.exp()[:, None] * steps).exp()
    strengths = steps[..., 0] if b is None else b.float().sigmoid()
    inputs = q, k, v, decays, strengths

    first, row, places = rows.first.long(), rows.of_token.long(), rows.places.long()
    # A row is added after the last row, for tokens that belong to no row.
    states = _with_nobody(_states(table, rows))
    kept = states.clone()
    if rows.chunks:
        y, last = torch.zeros_like(v), torch.cat((first[1:], first[-1:] * 0)).index_select(0, row)
        for token in range(tokens):
            at = row[token : token + 1]
            state = states.index_select(0, at)
            is_last = (last[token : token + 1] == token + 1)[:, None, None, None]
            kept.index_copy_(0, at, torch.where(is_last, state, kept.index_select(0, at)))
            out, state = _advance([one[token : token + 1] for one in inputs], state, shape.delta)
            y[token] = out[0]
            states.index_copy_(0, at, state)
    else:
        of_rows = first[:-1].clamp(max=tokens - 1)
        out, after = _advance([one.index_select(0, of_rows) for one in inputs], states[:count], shape.delta)
        alone = (first.diff() == 1)[:, None, None, None]
        states[:count] = torch.where(alone, after, states[:count])
        y = torch.zeros_like(v).index_copy_(0, of_rows, out)
    table.index_copy_(0, places[:, KEPT], kept[:count])
    table.index_copy_(0, places[:, TARGET], states[:count])
    if weights.skip is not None:
        y = y + weights.skip[:, None] * v
    return y.flatten(1)


def _advance(inputs: list[torch.Tensor], state: torch.Tensor, delta: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Advances rows by one position. Returns outputs [r, heads, value_dim], and the new states, shaped like `state`."""
    q, k, v, decays, strengths = inputs
    state = state * decays[..., None]
    if delta:
        v = v - (k[..., None] * state).sum(dim=2)
    state = state + k[..., None] * (strengths[..., None] * v)[:, :, None]
    return (q[..., None] * state).sum(dim=2), state


def gated_norm(
    y: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    norm: str,
    size: int,
    sigmoid: bool,
    first: torch.Tensor,
) -> torch.Tensor:
    """See `interface.Recurrences`."""
    strength = gate.float().sigmoid() if sigmoid else F.silu(gate.float())
    if norm == "none":
        out = y * strength
    else:
        assert weight is not None
        groups = (y if norm == "before_gate" else y * strength).unflatten(1, (-1, size))
        groups = groups * torch.rsqrt(groups.square().mean(dim=-1, keepdim=True) + eps)
        out = groups.flatten(1) * weight.float().repeat(y.shape[1] // len(weight))
        out = out * strength if norm == "before_gate" else out
    nobody = torch.arange(len(y), device=y.device) >= first[-1]
    return out.masked_fill(nobody[:, None], 0).to(gate.dtype)
