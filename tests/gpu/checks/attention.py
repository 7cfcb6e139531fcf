"""Attention over pages and to chosen rows, compared with dense attention in float64, one row at a time."""

from __future__ import annotations

from dataclasses import replace

import torch

from forebay.gpu.interface import Kernels
from tests.gpu.checks.memory import CPU, SINGLE, Numbers, Paged, nan, poisoned, rounding, spaced, within

SCALE = 0.3


def dense(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    seen: torch.Tensor | None = None,
    window: int = 0,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends in float64. Returns two [n, heads, any]: the results, and the same sums of absolute values.

    The shapes are q [n, heads, dim], keys and values [positions, kv_heads, any]. Query i attends to the first `seen[i]`
    positions, or to all if `seen` is None, and of these to the last `window`. `cap` is the limit that scores approach;
    0: no limit. `sinks` [heads] are scores without values.
    """
    group = q.shape[1] // keys.shape[1]
    hidden = None
    if seen is not None:
        at = torch.arange(len(keys), device=q.device)
        hidden = at >= seen[:, None]
        if window:
            hidden |= at < seen[:, None] - window
    out, size = [], []
    # Each key head is computed alone, because a long prompt with all heads exceeds a GPU's memory.
    for head in range(keys.shape[1]):
        of_head = q[:, head * group : (head + 1) * group].double()
        scores = torch.einsum("nhd,sd->nhs", of_head, keys[:, head].double()) * scale
        if cap:
            scores = cap * torch.tanh(scores / cap)
        if hidden is not None:
            scores.masked_fill_(hidden[:, None], -torch.inf)
        if sinks is not None:
            of_group = sinks[head * group : (head + 1) * group].double()
            scores = torch.cat((scores, of_group[None, :, None].expand(len(q), -1, 1)), dim=-1)
        weights = scores.softmax(-1)[..., : len(keys)]
        value = values[:, head].double()
        out.append(weights @ value)
        size.append(weights @ value.abs())
    return torch.cat(out, dim=1), torch.cat(size, dim=1)


def check_dense(
    given: torch.Tensor,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    seen: torch.Tensor | None = None,
    window: int = 0,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Compares results [n, heads, any] with `dense`.

    Inputs are exact, and scores are float32. Weights are rounded to the keys' type, and so is the result, but the sum
    of weights is not. So an error is at most two roundings of the sum of absolute terms.
    """
    expected, size = dense(q, keys, values, scale, seen, window, cap, sinks)
    within(given, expected, size * (2 * rounding(given.dtype) + SINGLE))


def check_attend(
    operators: Kernels,
    rows: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 2),
    widths: tuple[int, int] = (24, 0),
    page_size: int = 4,
    padding: tuple[int, int] = (0, 0),
    scale: float = SCALE,
    window: int = 0,
    cap: float = 0.0,
    sinks: float | None = None,
    dtype: torch.dtype = torch.float32,
    eight_bits: bool = False,
    device: torch.device = CPU,
    seed: int = 0,
) -> None:
    """Rows are (start, length). `padding`: padded rows, and tokens of no row. `widths`: those of a key's two parts.

    With `eight_bits` pages hold 8-bit floats, and NaN elsewhere. `sinks` is the largest absolute score of the heads'
    sinks; None: no sinks.
    """
    (queries, kv_heads), (dim, extra) = heads, widths
    ends, lengths = [start + length for start, length in rows], [length for _, length in rows]
    paged = Paged.make(ends, kv_heads, dim + extra, page_size, seed, dtype, device)
    keys, values, histories = paged.pool, paged.pool[..., :dim], paged.histories
    if not extra:
        values = -keys
    if eight_bits:
        keys, values = (pool.to(torch.float8_e4m3fn).view(torch.uint8) for pool in (keys, values))
        histories = [history.to(torch.float8_e4m3fn).float() for history in histories]
    count = sum(lengths)
    q = Numbers(device, seed + 1).normal(count + padding[1], queries, dim + extra, dtype=dtype)
    # As in a fused projection, the heads of two tokens are not adjacent.
    q = spaced(q)
    step = paged.rows(lengths, padding[0])
    if max(lengths, default=1) == 1 and not padding[1]:
        step = replace(step, chunks=False)
    with poisoned():
        of_heads = None if sinks is None else torch.linspace(-sinks, sinks, queries, device=device).to(dtype)
        out = operators.attend(q, keys, values, step, scale, window, cap, of_heads)
    assert out.shape == (len(q), queries, dim)
    at = 0
    for history, length in zip(histories, lengths, strict=True):
        of_values = history[..., :dim] if extra else -history
        seen = torch.arange(len(history) - length, len(history), device=device) + 1
        mine = slice(at, at + length)
        check_dense(out[mine], q[mine], history, of_values, scale, seen, window, cap, of_heads)
        at += length
    assert out[at:].eq(0).all()


def check_missing_page(operators: Kernels, device: torch.device) -> None:
    """A missing page reads as the null page, and affects only its own row."""
    paged = Paged.make([9, 9], 2, 16, 4, 0, torch.float32, device)
    paged.page_table[1, 1] = -1
    q = Numbers(device, 1).normal(2, 4, 16)
    out = operators.attend(q, paged.pool, paged.pool.clone(), paged.rows([1, 1]), SCALE)
    history = paged.histories[0].clone()
    history[4:8] = 7.0
    check_dense(out[:1], q[:1], history, history, SCALE)
    assert out[1].isfinite().all()


def check_attend_chosen(
    operators: Kernels,
    *,
    queries: int = 4,
    top_k: int = 50,
    heads: int = 18,
    widths: tuple[int, int] = (32, 8),
    scale: float = SCALE,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    seed: int = 0,
) -> None:
    """Queries have all rows, fewer than the maximum, one row, or none."""
    numbers = Numbers(device, seed)
    width, entries = sum(widths), queries * top_k
    pool = nan(entries + 100, 3, width, dtype=dtype, device=device)[:, 1:2]
    chosen = numbers.order(len(pool))[:entries].view(queries, top_k)
    pool[chosen] = numbers.normal(queries, top_k, 1, width, dtype=dtype)
    rows = chosen.int()
    # A row is missing in the middle too.
    rows[1, top_k // 2 :] = -1
    rows[1, 3] = -1
    rows[2, 1:] = -1
    rows[3] = -1
    q = numbers.normal(queries, heads, width, dtype=dtype)
    with poisoned():
        out = operators.attend_chosen(q, pool, pool[..., : widths[0]], rows, scale)
    assert out.shape == (queries, heads, widths[0])
    for query in range(queries):
        seen = pool[rows[query][rows[query] >= 0].long()]
        if not len(seen):
            assert out[query].eq(0).all()
            continue
        check_dense(out[query][None], q[query][None], seen, seen[..., : widths[0]], scale)
