"""Each operator of a step alone, at the shapes of Qwen3-0.6B and Qwen3-8B: its time beside that of copying its bytes.

An operator runs in one graph, as often as it takes to read more memory than the caches hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu import coded
from benchmarks.gpu.clock import Operator, copies_of
from forebay.attention.flash import FlashAttention, why_not_fa3
from forebay.gpu.choose import kernels
from forebay.gpu.interface import Kernels, PagedRows
from forebay.gpu.sampling import Wishes

PAGE = 16
EPS = 1e-6


@dataclass(frozen=True)
class Heads:
    """A layer's sizes."""

    hidden: int
    inner: int
    queries: int
    kv: int
    dim: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Heads:
        """The sizes in a model's `config.json`."""
        return cls(
            config["hidden_size"],
            config["intermediate_size"],
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["head_dim"],
        )


@dataclass(frozen=True)
class Sizes:
    """The cases to measure for a shape; tests have fewer."""

    decodes: tuple[tuple[int, int], ...] = ((1, 512), (1, 4096), (1, 32768), (64, 512), (64, 4096), (256, 1536))
    """The number of rows, and the positions of each."""
    among: tuple[int, int, int] = (63, 512, 32768)
    """The number of short rows, the positions of each, and those of one long row among them."""
    chunks: tuple[tuple[int, int], ...] = ((0, 2048), (4096, 512), (30720, 2048))
    """Positions before the chunk, and tokens in it."""
    tokens: tuple[int, ...] = (1, 64, 2048)
    rows: tuple[int, ...] = (1, 64, 256)


def measure(
    config: dict[str, Any], device: torch.device, sizes: Sizes, late: Callable[[], bool]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measures operators one by one: names, microseconds, GB/s and TFLOP/s. Stops once `late()` is true."""
    heads = Heads.of(config)
    for make in _operators(heads, config, device, sizes):
        if late():
            break
        with torch.inference_mode():
            operator = make()
            if operator is None:
                continue
            us = 1e6 * operator.seconds(device)
        tflops = operator.flops / us / 1e6 if operator.flops else None
        yield operator.name, {"us": us, "gbps": operator.bytes / us / 1e3, "tflops": tflops}
        del operator


def _operators(
    heads: Heads, config: dict[str, Any], device: torch.device, sizes: Sizes
) -> Iterator[Callable[[], Operator | None]]:
    """Functions that make the operators: each operator holds memory only while it is measured."""
    ops, vocabulary = kernels(), config["vocab_size"]
    cases = [[(positions - 1, 1)] * rows for rows, positions in sizes.decodes]
    short, each, long = sizes.among
    cases.append([*[(each - 1, 1)] * short, (long - 1, 1)])
    for case in [*cases, *([chunk] for chunk in sizes.chunks)]:
        yield partial(attention, ops, heads, device, case)
        yield partial(flash, heads, device, case)
    for tokens in sizes.tokens:
        for layer in (_norm, _gate, _rotate):
            yield partial(layer, ops, heads, device, tokens)
        for name, rows, inputs in matrices(heads):
            yield partial(_linear, name, rows, inputs, device, tokens)
        for _, product in coded.products(ops, device, 2 * heads.inner, heads.hidden, tokens):
            yield product
        yield partial(coded.experts, ops, config, device, tokens)
    for rows in sizes.rows:
        yield partial(_greedy, ops, vocabulary, device, rows)
        yield partial(_draw, ops, vocabulary, device, rows)


def matrices(heads: Heads) -> list[tuple[str, int, int]]:
    """A layer's matrices: name, rows, inputs."""
    all_heads = (heads.queries + 2 * heads.kv) * heads.dim
    return [
        ("qkv", all_heads, heads.hidden),
        ("o", heads.hidden, heads.queries * heads.dim),
        ("gate_up", 2 * heads.inner, heads.hidden),
        ("down", heads.hidden, heads.inner),
    ]


@dataclass(frozen=True)
class Paged:
    """Rows (start, length) on pages in random order, with more copies than the caches hold."""

    keys: torch.Tensor
    values: torch.Tensor
    q: torch.Tensor
    rows: list[PagedRows]
    bytes: float
    flops: float

    @classmethod
    def make(cls, heads: Heads, device: torch.device, rows: list[tuple[int, int]]) -> Paged:
        """Random keys, values and queries in bfloat16."""
        ends, lengths = [start + length for start, length in rows], [length for _, length in rows]
        width = -(-max(ends) // PAGE)
        tokens = sum(lengths)
        moved = 2.0 * (sum(ends) * 2 * heads.kv + 2 * tokens * heads.queries) * heads.dim
        copies = copies_of(moved)
        count = copies * len(rows) * width
        shape = (count + 1) * PAGE, heads.kv, heads.dim
        keys, values = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
        tables = torch.randperm(count, device=device, dtype=torch.int64).view(copies, len(rows), width).int()
        first = torch.tensor([0, *lengths], device=device).cumsum(0).int()
        q = torch.randn(tokens, heads.queries, heads.dim, dtype=torch.bfloat16, device=device)
        made = [
            PagedRows(
                slots=torch.arange(len(rows), device=device, dtype=torch.int32),
                ends=torch.tensor(ends, device=device, dtype=torch.int32),
                first=first,
                page_table=table,
                page_size=PAGE,
                page_stride=PAGE,
                null_page=count,
                decodes=max(lengths) == 1,
                chunks=max(lengths) > 1,
            )
            for table in tables
        ]
        seen = sum(length * start + length * (length + 1) / 2 for start, length in rows)
        return cls(keys, values, q, made, moved, 4.0 * seen * heads.queries * heads.dim)


def _case(rows: list[tuple[int, int]]) -> str:
    start, length = rows[0]
    if length > 1:
        return f"{length} tokens behind {start}"
    if rows[-1] != rows[0]:
        return f"{len(rows) - 1} rows of {start + 1} and one of {rows[-1][0] + 1}"
    return f"{len(rows)} rows of {start + 1}"


def attention(ops: Kernels, heads: Heads, device: torch.device, rows: list[tuple[int, int]]) -> Operator:
    """Forebay's attention."""
    paged, scale = Paged.make(heads, device, rows), heads.dim**-0.5
    return Operator(
        f"attention, {_case(rows)}",
        lambda at: ops.attend(paged.q, paged.keys, paged.values, paged.rows[at], scale),
        len(paged.rows),
        paged.bytes,
        paged.flops,
    )


def flash(heads: Heads, device: torch.device, rows: list[tuple[int, int]]) -> Operator | None:
    """FlashAttention 3 on the same pages; None if it is not installed."""
    if device.type != "cuda" or why_not_fa3(device, torch.bfloat16):
        return None
    paged, backend = Paged.make(heads, device, rows), FlashAttention()

    def run(at: int) -> object:
        kv: Any = (paged.keys, paged.values)
        return backend.attend(paged.q, paged.q, paged.q, kv, paged.rows[at])

    return Operator(f"FlashAttention 3, {_case(rows)}", run, len(paged.rows), paged.bytes, paged.flops)


def _random(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device)


def _norm(ops: Kernels, heads: Heads, device: torch.device, tokens: int) -> Operator:
    bytes_ = 2.0 * 4 * tokens * heads.hidden
    copies = copies_of(bytes_)
    x, residual = (_random(device, copies, tokens, heads.hidden) for _ in range(2))
    weight = _random(device, heads.hidden)
    return Operator(
        f"add and norm, {tokens} tokens", lambda at: ops.add_norm(x[at], residual[at], weight, EPS), copies, bytes_
    )


def _gate(ops: Kernels, heads: Heads, device: torch.device, tokens: int) -> Operator:
    bytes_ = 2.0 * 3 * tokens * heads.inner
    copies = copies_of(bytes_)
    x = _random(device, copies, tokens, 2 * heads.inner)
    return Operator(f"gate, {tokens} tokens", lambda at: ops.gate(x[at]), copies, bytes_)


def _rotate(ops: Kernels, heads: Heads, device: torch.device, tokens: int) -> Operator:
    width = (heads.queries + 2 * heads.kv) * heads.dim
    bytes_ = 2.0 * tokens * (2 * width + 2 * heads.kv * heads.dim)
    copies = copies_of(bytes_)
    qkv = _random(device, copies, tokens, width)
    keys, values = (_random(device, copies * tokens, heads.kv, heads.dim) for _ in range(2))
    angles = _random(device, tokens, 1, heads.dim)
    norms = (_random(device, heads.dim), _random(device, heads.dim))
    writes = torch.randperm(copies * tokens, device=device).view(copies, tokens)
    return Operator(
        f"norms, rotation and store, {tokens} tokens",
        lambda at: ops.rotate_and_keep(qkv[at], heads.queries, norms, EPS, angles, angles, keys, values, writes[at]),
        copies,
        bytes_,
    )


def _linear(name: str, rows: int, inputs: int, device: torch.device, tokens: int) -> Operator:
    bytes_ = 2.0 * (rows * inputs + tokens * (rows + inputs))
    copies = copies_of(bytes_)
    weights, x = _random(device, copies, rows, inputs), _random(device, tokens, inputs)
    return Operator(
        f"product {name} {rows} x {inputs}, {tokens} tokens",
        lambda at: F.linear(x, weights[at]),
        copies,
        bytes_,
        2.0 * tokens * rows * inputs,
    )


def _greedy(ops: Kernels, vocabulary: int, device: torch.device, rows: int) -> Operator:
    copies = copies_of(4.0 * rows * vocabulary)
    logits = torch.randn(copies, rows, vocabulary, device=device)
    return Operator(f"largest logit, {rows} rows", lambda at: ops.greedy(logits[at]), copies, 4.0 * rows * vocabulary)


def _draw(ops: Kernels, vocabulary: int, device: torch.device, rows: int) -> Operator:
    """Sampling for rows that all have a temperature, `top_k` and `top_p`."""
    copies = copies_of(4.0 * rows * vocabulary)
    # Like a model's logits, where some tokens are far likelier than others.
    logits = 4 * torch.randn(copies, rows, vocabulary, device=device)
    tokens = torch.zeros(rows, dtype=torch.int64, device=device)
    wishes = Wishes(
        temperature=torch.full((rows,), 0.7, device=device),
        top_k=torch.full((rows,), 50, dtype=torch.int32, device=device),
        top_p=torch.full((rows,), 0.9, device=device),
        min_p=torch.zeros(rows, device=device),
        bits=torch.randint(-(1 << 62), 1 << 62, (rows,), device=device),
    )
    return Operator(
        f"draw, {rows} rows", lambda at: ops.draw(logits[at], wishes, tokens), copies, 4.0 * rows * vocabulary
    )
