"""The launches of a hand, by model and step: the variants that a GPU needs before it serves requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from forebay.gpu import kernels
from forebay.gpu.hot import HotRows, SparsePages
from forebay.gpu.interface import PagedRows
from forebay.gpu.low_rank import LowRankStack, PlacedTokens
from forebay.gpu.recurrent import StateRows, StateWeights
from forebay.gpu.sampling import MOST_LIKELY, Wishes
from forebay.gpu.tables import Received, StepBuffers, Tables
from tests.gpu.checks.recurrent import published
from tests.gpu.compiled.compiling import meta
from tests.gpu.shapes import INDEX_DIM, INDEX_HEADS, MODELS, QWEN3_0_6B, RANK, ROTARY, TOP_K, Model

META = torch.device("meta")
Operators = Callable[[], object]


PAGES = 9999


def rows_of(
    count: int, page_size: int, page_stride: int, *, decodes: bool, chunks: bool, pages: int = PAGES
) -> PagedRows:
    return PagedRows(
        meta(count),
        meta(count),
        meta(count + 1),
        meta(257, 32768 // page_size),
        page_size,
        page_stride,
        pages,
        decodes=decodes,
        chunks=chunks,
    )


def pool_of(model: Model) -> torch.Tensor:
    """The keys or values of a layer."""
    return meta(4000, model.kv_heads, model.dim, dtype=model.kv_dtype)


def attention(model: Model) -> Iterator[tuple[str, Operators]]:
    """Rows of one token in each possible number of parts, and chunks."""
    stride = model.layers * 2 * model.page_size
    pool = pool_of(model)

    def attend(count: int, chunks: bool) -> object:
        # The heads are a part of a fused projection.
        heads = meta(count, model.heads + 2 * model.kv_heads, model.dim, dtype=model.dtype)[:, : model.heads]
        rows = rows_of(count, model.page_size, stride, decodes=not chunks, chunks=chunks)
        return kernels.attend(heads, pool, pool, rows, 0.1)

    # One model has all numbers of parts, and the others have the least and the most.
    counts = (1, 2, 4, 8, 16, 32, 64, 256) if model == QWEN3_0_6B else (1, 256)
    yield "decode", lambda: [attend(count, False) for count in counts]
    yield "chunks", lambda: attend(2048, True)


def attend_step(model: Model, tokens: int, rows: int, chunks: bool, pages: int = PAGES) -> None:
    """The attention of a step of `tokens` tokens and `rows` rows. `chunks`: rows may have several tokens."""
    pool = meta(4000, model.kv_heads, model.dim, dtype=model.dtype)
    stride = model.layers * 2 * model.page_size
    paged = rows_of(rows, model.page_size, stride, decodes=True, chunks=chunks, pages=pages)
    kernels.attend(meta(tokens, model.heads, model.dim, dtype=model.dtype), pool, pool, paged, 0.1)


def layer(model: Model) -> Iterator[tuple[str, Operators]]:
    dtype, heads = model.dtype, model.heads + 2 * model.kv_heads

    def small(*shape: int) -> torch.Tensor:
        return meta(*shape, dtype=dtype)

    def layers(tokens: int) -> None:
        x = small(tokens, model.hidden)
        kernels.add_norm(x, None, small(model.hidden), 1e-5)
        kernels.add_norm(x, x, small(model.hidden), 1e-5)
        norms = (small(model.dim), small(model.dim)) if model.norms else None
        angles, pool = small(tokens, 1, model.turned), pool_of(model)
        qkv, writes = small(tokens, heads * model.dim), meta(tokens, dtype=torch.int64)
        kernels.rotate_and_keep(qkv, model.heads, norms, 1e-5, angles, angles, pool, pool, writes)
        kernels.gate(small(tokens, 2 * model.inner))

    def one_row() -> None:
        layers(1)
        for rows, inputs in ((heads * model.dim, model.hidden), (model.hidden, model.inner)):
            kernels.one_row(small(1, inputs), small(rows, inputs), small(rows) if rows > inputs else None)

        kernels.one_row_gated(small(1, model.hidden), small(2 * model.inner, model.hidden), None)

    yield "layer", lambda: layers(64)
    yield "layer of one row", one_row
    if model.experts is not None:
        yield "experts", lambda: [experts(model, tokens) for tokens in (1, 64, 2048)]


@dataclass(frozen=True)
class Codes:
    """A matrix of quantised weights."""

    codes: torch.Tensor
    scale: torch.Tensor
    zeros: torch.Tensor | None
    inputs: int
    group: int
    block_rows: int
    fold: int

    @classmethod
    def make(cls, rows: int, inputs: int, group: int, block_rows: int = 1, fold: int = 0) -> Codes:
        """Makes a matrix without memory."""
        groups, byte = -(-inputs // group), torch.uint8
        scale = meta(-(-rows // block_rows), groups, dtype=torch.float32)
        codes = meta(rows, inputs // 2 if fold else inputs, dtype=byte)
        return cls(codes, scale, meta(rows, groups, dtype=byte) if fold else None, inputs, group, block_rows, fold)


KINDS = {"rows": (None, 1, 0), "blocks": (128, 128, 0), "4 bits": (128, 1, 128), "4 bits of 32": (32, 1, 32)}
"""Inputs in a group (None: all), rows in a block, and inputs that are folded together."""


def quantised(name: str, dtype: torch.dtype, experts_of: int = 128, each: int = 8) -> Iterator[tuple[str, Operators]]:
    """Products of few tokens and of many: dense products of Llama-3.1-8B, and experts of Qwen3-30B-A3B."""

    def dense(group: int | None, block_rows: int, fold: int) -> None:
        for tokens in (1, 2048):
            for rows, inputs in ((6144, 4096), (4096, 14336)):
                matrix = Codes.make(rows, inputs, group or inputs, block_rows, fold)
                bias = meta(rows, dtype=dtype) if rows > inputs else None
                kernels.product(meta(tokens, inputs, dtype=dtype), matrix, bias)
                kernels.expand(matrix, dtype)

    def mixture(group: int | None, block_rows: int, fold: int) -> None:
        hidden, inner = 2048, 768
        gate_up = Codes.make(experts_of * 2 * inner, hidden, group or hidden, block_rows, fold)
        down = Codes.make(experts_of * hidden, inner, group or inner, block_rows, fold)
        for tokens in (1, 2048):
            x, ids = meta(tokens, hidden, dtype=dtype), meta(tokens, each, dtype=torch.int64)
            kernels.experts_of_codes(x, ids, meta(tokens, each, dtype=torch.float32), gate_up, down)

    for kind, sizes in KINDS.items():
        yield f"{name}: {kind}", lambda sizes=sizes: dense(*sizes)  # type: ignore[misc]
        if kind != "4 bits of 32":
            yield f"{name}: experts in {kind}", lambda sizes=sizes: mixture(*sizes)  # type: ignore[misc]


def activations() -> None:
    """As many inputs as one program holds at once, and more."""
    for inputs in (1024, 4096):
        kernels.quantise(meta(64, inputs, dtype=torch.bfloat16))


def experts(model: Model, tokens: int) -> object:
    assert model.experts is not None
    count, each, inner = model.experts
    return kernels.experts(
        meta(tokens, model.hidden, dtype=model.dtype),
        meta(tokens, each, dtype=torch.int64),
        meta(tokens, each, dtype=torch.float32),
        meta(count, 2 * inner, model.hidden, dtype=model.dtype),
        meta(count, model.hidden, inner, dtype=model.dtype),
    )


def gpt_oss(dtype: torch.dtype) -> Iterator[tuple[str, Operators]]:
    """gpt-oss-20b: sinks, windows, and experts with biases and clamped gates."""
    hidden, inner, count, each, heads, kv_heads, dim = 2880, 2880, 32, 4, 64, 8, 64

    def some(*shape: int) -> torch.Tensor:
        return meta(*shape, dtype=dtype)

    def attend(count: int, chunks: bool) -> object:
        pool, stride = some(4000, kv_heads, dim), 24 * 2 * 16
        rows = rows_of(count, 16, stride, decodes=not chunks, chunks=chunks)
        q, sinks = some(count, heads, dim), some(heads)
        return [kernels.attend(q, pool, pool, rows, 0.1, window, 0.0, sinks) for window in (0, 128)]

    def mixture(tokens: int) -> object:
        ids, weights = meta(tokens, each, dtype=torch.int64), meta(tokens, each, dtype=torch.float32)
        gate_up, down = some(count, 2 * inner, hidden), some(count, hidden, inner)
        biases = some(count, 2 * inner), some(count, hidden)
        return kernels.experts(some(tokens, hidden), ids, weights, gate_up, down, biases, "swigluoai")

    yield "sinks", lambda: [attend(1, False), attend(256, False), attend(2048, True)]
    yield "biases", lambda: [mixture(1), mixture(2048)]


def state_rows(rows: int, tokens: int, chunks: bool) -> StateRows:
    return StateRows(meta(rows + 1), meta(tokens), meta(rows, 4), chunks)


def recurrent_step(name: str, dtype: torch.dtype, tokens: int, rows: int, chunks: bool) -> None:
    """A recurrent layer of a published model, without its projections."""
    values = published()[name]
    shape, (norm, size), floats = values["shape"], values["norm"], torch.float32
    of_rows, width = state_rows(rows, tokens, chunks), shape.heads * shape.value_dim
    channels, decays = 2 * shape.keys + width, shape.heads * (shape.key_dim if shape.channel_decay else 1)
    fused = meta(tokens, channels + width + decays + shape.heads, dtype=dtype)
    weight, table = meta(channels, values["taps"], dtype=dtype), meta(99, values["taps"] - 1, channels, dtype=dtype)
    mixed = kernels.convolve(fused[:, :channels], weight, weight[:, 0], table, of_rows, silu=True)
    skip = None if shape.delta else meta(shape.heads, dtype=floats)
    weights = StateWeights(meta(shape.heads, dtype=floats), meta(decays, dtype=floats), skip)
    states = meta(99, shape.heads, shape.key_dim, shape.value_dim, dtype=floats)
    a, b = fused[:, channels + width :].split((decays, shape.heads), dim=1)
    y = kernels.recur(mixed, a, b if shape.delta else None, weights, shape, states, of_rows)
    normal = None if norm == "none" else meta(size if norm == "before_gate" else width, dtype=dtype)
    how = 1e-5, norm, size, shape.channel_decay
    kernels.gated_norm(y, fused[:, channels : channels + width], normal, *how, of_rows.first)


def short_convolution(dtype: torch.dtype, chunks: bool) -> None:
    """The convolution of LFM2."""
    parts = meta(64, 3 * 2048, dtype=dtype).split(2048, dim=1)
    weight, table = meta(2048, 3, dtype=dtype), meta(99, 2, 2048, dtype=dtype)
    kernels.convolve(parts[2], weight, None, table, state_rows(64, 64, chunks), gates=(parts[1], parts[0]))


def recurrences(dtype: torch.dtype) -> Iterator[tuple[str, Operators]]:
    """The states of each model, for decode rows and for chunks."""
    for name in published():
        yield f"{name}: decode rows", partial(recurrent_step, name, dtype, 64, 64, False)
        yield f"{name}: states of chunks", partial(recurrent_step, name, dtype, 2048, 64, True)
    yield "LFM2: decode rows", partial(short_convolution, dtype, False)
    yield "LFM2: states of chunks", partial(short_convolution, dtype, True)


def adapters(model: Model, rank: int, counts: tuple[int, ...] = (1, 2048), places: int = 8) -> None:
    """Adapters beside the products of a layer, for few tokens and for many."""
    for tokens in counts:
        adapters_of(model, rank, tokens, places)


def adapters_of(model: Model, rank: int, tokens: int, places: int) -> None:
    """Adapters beside the products of a layer, for `tokens` tokens."""
    queries, keys = model.heads * model.dim, model.kv_heads * model.dim
    of_step = PlacedTokens(meta(tokens))
    products = (
        *(([queries, keys, keys], model.hidden), ([model.hidden], queries)),
        *(([model.inner, model.inner], model.hidden), ([model.hidden], model.inner)),
    )
    for outputs, inputs in products:
        a = meta(places, len(outputs) * rank, inputs, dtype=model.dtype)
        b = meta(places, sum(outputs), rank, dtype=model.dtype)
        stack = LowRankStack(a, b, meta(len(outputs) + 1), max(outputs))
        x, y = meta(tokens, inputs, dtype=model.dtype), meta(tokens, sum(outputs), dtype=model.dtype)
        kernels.add_low_rank(x, y, stack, of_step)


def sample_by_slot(model: Model, rows: int, logits: torch.Tensor, tokens: torch.Tensor) -> None:
    """Penalties and log-probabilities, as graphs compute them."""
    stride = model.layers * 2 * model.page_size
    found = Tables.make(256, 32768, model.vocabulary, model.page_size, PAGES, stride, META)
    buffers, lines, counts = StepBuffers.make(rows, rows, META), meta(rows), meta(256, 2, model.vocabulary)
    kernels.adjust(logits, lines, counts, found, buffers)
    kernels.count_tokens(tokens, lines, counts)
    kernels.tell_likely(logits, tokens, found, buffers, meta(rows, 2, 1 + MOST_LIKELY))


def step(model: Model) -> Iterator[tuple[str, Operators]]:
    """The operators before and after the layers."""

    def tables() -> None:
        stride = model.layers * 2 * model.page_size
        found = Tables.make(256, 32768, model.vocabulary, model.page_size, PAGES, stride, META)
        buffers, plan, errors = StepBuffers.make(64, 64, META), Received(meta(5000), meta(18, 2), meta(8)), meta(1)
        kernels.apply_slots(plan, found, errors)
        kernels.move_words(plan.body, plan.body)
        kernels.write_table(plan, "page_writes", found.page_table, -1, PAGES, errors)
        kernels.prepare(plan, found, buffers, errors, None)
        kernels.keep(meta(64, dtype=torch.int64), meta(64, dtype=torch.bool), found, buffers, errors, meta(129))
        kernels.ask(found, buffers)

    def sampling() -> None:
        for dtype in {torch.float32, model.dtype}:
            tokens, _ = kernels.greedy(meta(64, model.vocabulary, dtype=dtype))
        kernels.draw(meta(64, model.vocabulary, dtype=torch.float32), Wishes.make(64, META), tokens)
        logits, counts = meta(64, model.vocabulary, dtype=torch.float32), meta(8, 2, model.vocabulary)
        kernels.likely(logits, tokens[:, None], 20)
        kernels.penalise(logits, tokens, counts, tokens, meta(64, 3, dtype=torch.float32))
        sample_by_slot(model, 64, logits, tokens.int())

    yield "tables", tables
    yield "sampling", sampling


def latent(dtype: torch.dtype) -> Iterator[tuple[str, Operators]]:
    """DeepSeek V3.2: 128 heads share one row for each position, and an index chooses positions."""
    page, stride = 64, 61 * 64
    pool = meta(4000, 1, RANK + ROTARY, dtype=dtype)

    def small(*shape: int) -> torch.Tensor:
        return meta(*shape, dtype=dtype)

    def attend(count: int, chunks: bool) -> object:
        rows = rows_of(count, page, stride, decodes=not chunks, chunks=chunks)
        return kernels.attend(small(count, 128, RANK + ROTARY), pool, pool[..., :RANK], rows, 0.1)

    def keep() -> None:
        angles, writes = small(64, 1, ROTARY), meta(64, dtype=torch.int64)
        made = small(64, RANK + ROTARY)
        kernels.keep_latent(made, small(RANK), 1e-6, angles, angles, True, pool[:, 0], writes)
        for pairs in (False, True):
            keys, norm = small(4000, INDEX_DIM), small(INDEX_DIM)
            kernels.keep_index_keys(small(64, INDEX_DIM), norm, norm, 1e-6, angles, angles, pairs, keys, writes)

    def choose() -> None:
        for chunks in (False, True):
            rows = rows_of(64, page, stride, decodes=not chunks, chunks=chunks)
            q, weights = small(64, INDEX_HEADS, INDEX_DIM), meta(64, INDEX_HEADS, dtype=torch.float32)
            kernels.choose(q, weights, small(4000, INDEX_DIM), rows, TOP_K)

    def chosen() -> None:
        for count in (1, 8, 64):
            q = small(count, 128, RANK + ROTARY)
            kernels.attend_chosen(q, pool, pool[..., :RANK], meta(count, TOP_K), 0.1)

    yield "latent decode", lambda: [attend(count, False) for count in (1, 64)]
    yield "latent chunks", lambda: attend(2048, True)
    yield "latent rows", keep
    yield "index", choose
    yield "chosen rows", chosen


def hot_step(hot: int, count: int = PAGES) -> None:
    """The search for chosen positions in hot rows, with `count` pages on the device."""
    slots, page = 256, 64
    width, errors = 32768 // page, meta(1)
    pages = SparsePages(
        meta(slots, width), meta(slots, width), meta(slots, hot // page), meta(slots), page, 61 * page, count
    )
    line = meta(slots, hot + 1)
    group = HotRows(meta(slots, 32769, dtype=torch.int16), line, line, hot)
    found = kernels.resolve(meta(64, TOP_K), meta(64), pages, group, errors)
    host = meta(100_000, dtype=torch.bfloat16)
    kernels.gather(found, host, 61 * page * 576, page, meta(4000, RANK + ROTARY, dtype=torch.bfloat16))
    plan = Received(meta(5000), meta(18, 2), meta(8))
    kernels.clear_slots(plan, pages.hot_rows, slots)
    kernels.open_hot_rows(plan, pages, group, slots)


def mixed_step(tokens: int, rows: int, pages: int = PAGES) -> None:
    """Runs once each operator whose launch depends on the numbers of tokens, rows or pages of a step."""
    model, page, stride = QWEN3_0_6B, 16, 28 * 32
    half = meta(tokens, 1024, dtype=torch.bfloat16)
    kernels.add_norm(half, half, half[0], 1e-5)
    kernels.gate(half)
    heads = meta(tokens, 16, 128, dtype=torch.bfloat16)
    pool = meta(4000, 8, 128, dtype=torch.bfloat16)
    paged = rows_of(rows, page, stride, decodes=False, chunks=True, pages=pages)
    kernels.attend(heads, pool, pool, paged, 0.1)
    # Few tokens and many use two variants of tiles. A step of either kind compiles both.
    for some in (half, half[:16]):
        kernels.product(some, Codes.make(512, 1024, 128, 128), None)
    kernels.quantise(half)
    for chunks in (False, True):
        recurrent_step("Qwen3-Next-80B-A3B", torch.bfloat16, tokens, rows, chunks)
        recurrent_step("Kimi-Linear-48B-A3B", torch.bfloat16, tokens, rows, chunks)
    for count in (tokens, 16, 2048):
        adapters_of(model, 16, count, 8)
    kernels.choose(heads, meta(tokens, 16, dtype=torch.float32), pool[:, 0], paged, TOP_K)
    experts(replace(model, experts=(128, 8, 768)), tokens)
    tables = Tables.make(256, 32768, model.vocabulary, page, pages, stride, META)
    buffers, plan, errors = StepBuffers.make(rows, tokens, META), Received(meta(5000), meta(18, 2), meta(8)), meta(1)
    kernels.move_words(plan.body[: 16 * tokens + rows], plan.body)
    kernels.write_table(plan, "page_writes", tables.page_table, -1, pages, errors)
    kernels.prepare(plan, tables, buffers, errors, None)
    wishes = kernels.ask(tables, buffers)
    logits = meta(rows, model.vocabulary, dtype=torch.float32)
    sampled, finite = kernels.greedy(logits)
    kernels.likely(logits, sampled[:, None], tokens % 20)
    kernels.penalise(logits, sampled, meta(8, 2, model.vocabulary), sampled, meta(rows, 3, dtype=torch.float32))
    kernels.draw(logits, wishes, sampled)
    kept = kernels.keep(sampled, finite, tables, buffers, errors, meta(1 + 2 * rows))
    sample_by_slot(model, rows, logits, kept)


def all_variants() -> dict[str, Operators]:
    """All operators by name."""
    found: dict[str, Operators] = {}
    for model in MODELS:
        for part in (attention(model), layer(model), step(model)):
            found |= {f"{model.name}: {name}": operators for name, operators in part}
    found |= {f"DeepSeek-V3.2: {name}": operators for name, operators in latent(torch.bfloat16)}
    found |= {f"DeepSeek-V3.2 in float32: {name}": operators for name, operators in latent(torch.float32)}
    found |= {f"gpt-oss: {name}": operators for name, operators in gpt_oss(torch.bfloat16)}
    found |= {f"gpt-oss in float32: {name}": operators for name, operators in gpt_oss(torch.float32)}
    found |= dict(quantised("codes", torch.bfloat16))
    found |= {name: operators for name, operators in quantised("codes in float32", torch.float32) if "blocks" in name}
    found["codes of activations"] = activations
    found |= dict(recurrences(torch.bfloat16))
    found |= {
        f"{name} in float32": operators for name, operators in recurrences(torch.float32) if "Q" in name or "K" in name
    }
    for model in MODELS[:2]:
        for rank in (16, 64):
            found[f"{model.name}: adapters of rank {rank}"] = partial(adapters, model, rank)
    for hot in (TOP_K, 2 * TOP_K, 32704):
        found[f"hot rows {hot}"] = partial(hot_step, hot)
    wide = Model("heads of 256", 3072, 8192, 16, 8, 256, 256000, 28, 256)
    wide_ones = [wide, replace(wide, name="heads of 256 in float32", dtype=torch.float32)]
    of_bytes = [replace(model, name=f"8-bit KV of {model.name}", eight_bits=True) for model in (*MODELS, *wide_ones)]
    # Models with heads of one width and one type share these variants, so one of them is enough.
    of_bytes = [model for model in of_bytes if not model.name.endswith(("8B", "A3B", "Air"))]
    for model in (*wide_ones, *of_bytes):
        found |= {f"{model.name}: {name}": operators for name, operators in attention(model)}
    found |= {f"{of_bytes[0].name}: {name}": operators for name, operators in layer(of_bytes[0])}
    return found
