"""Every operator of `forebay.gpu` on fresh random inputs of real shapes, for a GPU's kernels beside their twins.

A case makes its inputs on a device, and calls an operator with copies of them. So both sides see the same, and what
they overwrite is a result too. Expected results are the twins' in float32 on the same numbers, which the interpreter's
tests hold against float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from forebay.gpu.hot import HotRows, SparsePages
from forebay.gpu.interface import Kernels, PagedRows
from forebay.gpu.sampling import Wishes
from forebay.gpu.tables import Received, StepBuffers, Tables, places
from forebay.protocol.plan import FLAG_SAMPLE
from tests.gpu.shapes import INDEX_DIM, INDEX_HEADS, RANK, ROTARY, Model
from tests.hand.support import PlanBuilder, Sampling

EPS = 1e-6
PAGE = 16
Tensors: TypeAlias = list[torch.Tensor]


@dataclass(frozen=True)
class Case:
    """An operator with its inputs, of which copies are used."""

    name: str
    call: Callable[[Kernels, Tensors], Tensors]
    inputs: Tensors
    exact: bool = False
    """True if results are integers, or copies of inputs."""
    slack: int = 0
    """The number of elements of exact results that may differ."""

    def results(self, operators: Kernels, wide: bool) -> Tensors:
        """The results; `wide`: of the same numbers in float32."""
        narrow = torch.bfloat16
        given = [x.float() if wide and x.dtype == narrow else x.clone() for x in self.inputs]
        return self.call(operators, given)


@dataclass(frozen=True)
class Place:
    """A device, a type of elements, and a share of the real sizes: 1 on a GPU."""

    device: torch.device
    dtype: torch.dtype
    share: float = 1.0

    def count(self, number: int, least: int = 2) -> int:
        """A number of tokens, positions or rows, scaled."""
        return max(least, int(number * self.share))

    def random(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Normal numbers."""
        return (scale * torch.randn(shape, device=self.device)).to(self.dtype)

    def nan(self, *shape: int) -> torch.Tensor:
        """Memory in which nothing is a number."""
        return torch.full(shape, torch.nan, dtype=self.dtype, device=self.device)

    def ints(self, values: list[int]) -> torch.Tensor:
        """int32."""
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def spaced(self, *shape: int) -> torch.Tensor:
        """Random lines, between which others' elements lie that are no numbers."""
        return torch.cat((self.random(*shape), self.nan(*shape)), dim=1)[:, : shape[1]]


def paged(
    place: Place, rows: list[tuple[int, int]], padding: int, wide: tuple[int, int]
) -> tuple[torch.Tensor, PagedRows]:
    """Entries [entries, heads, width] on pages in no order, random for rows (start, length) and else not numbers."""
    ends, lengths = [start + length for start, length in rows], [length for _, length in rows]
    width = -(-max(ends) // PAGE) + 1
    count = width * len(rows)
    stride = 2 * PAGE
    pool = place.nan((count + 1) * stride, *wide)
    table = torch.full((len(rows) + 1, width), -1, dtype=torch.int32, device=place.device)
    given = torch.randperm(count, device=place.device).int().view(len(rows), width)
    table[-1] = count
    # The null page is real memory with anything in it.
    pool[count * stride :] = 7.0
    for row, end in enumerate(ends):
        used = -(-end // PAGE)
        table[row, :used] = given[row, :used]
        at = torch.arange(end, device=place.device)
        pool[table[row].long()[at // PAGE] * stride + at % PAGE] = place.random(end, *wide)
    step = PagedRows(
        slots=place.ints([*range(len(rows)), *[len(rows)] * padding]),
        ends=place.ints([*ends, *[0] * padding]),
        first=place.ints([0, *lengths, *[0] * padding]).cumsum(0).int(),
        page_table=table,
        page_size=PAGE,
        page_stride=stride,
        null_page=count,
    )
    return pool, step


def in_pages(pool: torch.Tensor, model: Model) -> torch.Tensor:
    """A pool's elements in the form of the model's pages."""
    return pool.float().to(torch.float8_e4m3fn).view(torch.uint8) if model.eight_bits else pool


def attention(place: Place, model: Model) -> Iterator[Case]:
    """Rows of one token of unlike lengths, chunks beside them, and tokens of nobody."""
    steps = {
        "decode": [(place.count(length, 1) - 1, 1) for length in (1, 15, 16, 17, 300, 700, 1500, 4000)],
        "mixed": [(place.count(1500), place.count(500)), (place.count(700), 1), (0, place.count(130)), (0, 1)],
    }
    for name, rows in steps.items():
        tokens = sum(length for _, length in rows)
        # Where all rows have one token, padding is rows of the null slot like others.
        padding = (2, 5) if name == "mixed" else (0, 0)
        keys, step = paged(place, rows, padding[0], (model.kv_heads, model.dim))
        step = replace(step, chunks=name == "mixed")
        width = model.heads + 2 * model.kv_heads
        # As the heads of a fused projection lie.
        q = place.random(tokens + padding[1], width, model.dim)

        def call(ops: Kernels, given: Tensors, step: PagedRows = step, scale: float = model.dim**-0.5) -> Tensors:
            q, keys, values = given
            return [ops.attend(q[:, : model.heads], keys, values, step, scale)]

        yield Case(f"attention, {name}", call, [q, *(in_pages(pool, model) for pool in (keys, -keys.flip(2)))])


def latent(place: Place) -> Iterator[Case]:
    """128 heads on one row a position, whose first part is the value."""
    for name, rows in {
        "decode": [(place.count(length, 1) - 1, 1) for length in (1, 700, 2000)],
        "chunk": [(place.count(300), place.count(60))],
    }.items():
        pool, step = paged(place, rows, int(name == "chunk"), (1, RANK + ROTARY))
        step = replace(step, chunks=name == "chunk")
        q = place.random(sum(length for _, length in rows), 128, RANK + ROTARY)

        def call(ops: Kernels, given: Tensors, step: PagedRows = step) -> Tensors:
            q, pool = given
            return [ops.attend(q, pool, pool[..., :RANK], step, (RANK + ROTARY) ** -0.5)]

        yield Case(f"latent attention, {name}", call, [q, pool])


def chosen(place: Place) -> Iterator[Case]:
    """Attention to rows by number, and the choice of positions by an index, with ties."""
    entries, top_k = place.count(6000, 64), place.count(2048, 16)
    pool, q = place.random(entries, 1, RANK + ROTARY), place.random(3, 128, RANK + ROTARY)
    rows = torch.stack([torch.randperm(entries, device=place.device)[:top_k] for _ in range(3)]).int()
    rows[1, top_k // 3 :] = -1
    rows[2] = -1

    def attend(ops: Kernels, given: Tensors) -> Tensors:
        q, pool = given
        return [ops.attend_chosen(q, pool, pool[..., :RANK], rows, (RANK + ROTARY) ** -0.5)]

    yield Case("attention to chosen rows", attend, [q, pool])
    cases = [(place.count(5000), 1), (place.count(3000), place.count(40)), (0, place.count(9))]
    keys, step = paged(place, cases, 1, (1, INDEX_DIM))
    tokens = sum(length for _, length in cases) + 3
    # Small whole numbers, so that sums are exact in any order, and many are equal.
    q = place.random(tokens, INDEX_HEADS, INDEX_DIM).round().clamp(-2, 2)
    weights = torch.randint(-2, 3, (tokens, INDEX_HEADS), device=place.device).float()

    def choose(ops: Kernels, given: Tensors) -> Tensors:
        q, keys, weights = given
        return [ops.choose(q, weights, keys[:, 0], step, top_k)]

    yield Case("choice of positions", choose, [q, keys.round().clamp(-2, 2), weights], exact=True)


def hot_rows(place: Place) -> Iterator[Case]:
    """Slots without pages on the device: positions of two steps, found in hot rows or copied from the host."""
    slots, context, size = 4, place.count(8192, 128), 64
    hot = max(size, place.count(4096) // size * size)
    top_k, width = hot // 2, RANK + ROTARY
    host_pages, own = slots * -(-context // size), hot // size
    on_gpu = place.device.type == "cuda"
    host = torch.randn(host_pages * size * width).to(place.dtype)
    host = host.pin_memory() if on_gpu else host
    none = torch.full((slots + 1, host_pages // slots), -1, dtype=torch.int32, device=place.device)
    host_table = none.clone()
    host_table[:slots] = torch.randperm(host_pages, device=place.device).view(slots, -1).int()
    hot_pages = torch.full((slots + 1, own), -1, dtype=torch.int32, device=place.device)
    hot_pages[:slots] = torch.randperm(slots * own, device=place.device).view(slots, own).int()
    some = [torch.randperm(context, device=place.device)[:top_k].sort().values for _ in range(2 * slots)]
    steps = torch.stack(some).view(2, slots, top_k).int()
    # The second step wants half of what the first wanted, too.
    steps[1, :, ::2] = steps[0, :, ::2]
    steps[1] = torch.stack([_distinct(line, context) for line in steps[1]])
    queries = torch.arange(slots, device=place.device).int()

    def find(ops: Kernels, given: Tensors) -> Tensors:
        pool, clock, row_of, owner, stamp = given
        pages = SparsePages(none, host_table, hot_pages, clock, size, size, slots * own)
        group, results = HotRows(row_of, owner, stamp, hot), []
        errors = torch.zeros(1, dtype=torch.int32, device=place.device)
        for wanted in steps:
            clock[:slots] += 1
            found = ops.resolve(wanted, queries, pages, group, errors)
            # Only kernels read the host's memory in place.
            rows = host if ops.READS_HOST else host.to(pool.device, pool.dtype)
            ops.gather(found, rows, size * width, size, pool)
            results += [found.rows, found.missing, found.counts, pool[found.rows.clamp(min=0).long().view(-1)]]
        return [*results, errors, owner[:slots, :hot]]

    line = torch.full((slots + 1, hot + 1), -1, dtype=torch.int32, device=place.device)
    row_of = torch.zeros(slots + 1, context + 1, dtype=torch.int16, device=place.device)
    clock = torch.zeros(slots + 1, dtype=torch.int32, device=place.device)
    pool = place.nan((slots * own + 1) * size, width)
    yield Case("hot rows", find, [pool, clock, row_of, line, torch.zeros_like(line)], exact=True)


def _distinct(line: torch.Tensor, context: int) -> torch.Tensor:
    """As many positions, ascending, each once."""
    there = torch.zeros(context, dtype=torch.bool, device=line.device)
    there[line.long()] = True
    free = (~there).nonzero()[:, 0]
    kept = there.nonzero()[:, 0]
    return torch.cat((kept, free[: len(line) - len(kept)])).sort().values.int()


def layers(place: Place, model: Model) -> Iterator[Case]:
    """Norms, gates, rotations and stores."""
    for tokens in (1, place.count(300, 3)):
        weight = place.random(model.hidden, scale=0.3) + 1

        def norm(ops: Kernels, given: Tensors) -> Tensors:
            return list(ops.add_norm(given[0], given[1], given[2], EPS))

        x, residual = place.spaced(tokens, model.hidden), place.random(tokens, model.hidden, scale=30)
        yield Case(f"add and norm, {tokens} tokens", norm, [x, residual, weight])
        both = place.random(tokens, 2 * model.inner)
        yield Case(f"gate, {tokens} tokens", lambda ops, given: [ops.gate(given[0])], [both])
        yield _rotation(place, model, tokens)


def _rotation(place: Place, model: Model, tokens: int) -> Case:
    angles = torch.rand(tokens, 1, model.turned // 2, device=place.device) * 6.28
    cos = torch.cat((angles.cos(), angles.cos()), -1).to(place.dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).to(place.dtype)
    writes = torch.randperm(2 * tokens, device=place.device)[:tokens]
    qkv = place.random(tokens, (model.heads + 2 * model.kv_heads) * model.dim)
    keys = in_pages(place.nan(2 * tokens, model.kv_heads, model.dim), model)
    norms = [place.random(model.dim, scale=0.3) + 1 for _ in range(2)]

    def rotate(ops: Kernels, given: Tensors) -> Tensors:
        qkv, cos, sin, keys, values, *weights = given
        pair = (weights[0], weights[1]) if model.norms else None
        made = ops.rotate_and_keep(qkv, model.heads, pair, EPS, cos, sin, keys, values, writes)
        return [*made, keys, values]

    return Case(f"norms, rotation and store, {tokens} tokens", rotate, [qkv, cos, sin, keys, keys.clone(), *norms])


def latent_rows(place: Place) -> Iterator[Case]:
    """Rows of latent attention, and keys of an index."""
    tokens = place.count(200, 3)
    angles = torch.rand(tokens, 1, ROTARY // 2, device=place.device) * 6.28
    cos = torch.cat((angles.cos(), angles.cos()), -1).to(place.dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).to(place.dtype)
    writes = torch.randperm(2 * tokens, device=place.device)[:tokens]
    for pairs in (False, True):

        def rows(ops: Kernels, given: Tensors, pairs: bool = pairs) -> Tensors:
            made, weight, cos, sin, pool = given
            return [ops.keep_latent(made, weight, EPS, cos, sin, pairs, pool, writes), pool]

        def keys(ops: Kernels, given: Tensors, pairs: bool = pairs) -> Tensors:
            made, weight, bias, cos, sin, pool = given
            ops.keep_index_keys(made, weight, bias, EPS, cos, sin, pairs, pool, writes)
            return [pool]

        weight = place.random(RANK, scale=0.3) + 1
        pool = place.nan(2 * tokens, RANK + ROTARY)
        yield Case(f"latent rows, pairs: {pairs}", rows, [place.spaced(tokens, RANK + ROTARY), weight, cos, sin, pool])
        norm = [place.random(INDEX_DIM, scale=0.3) + 1, place.random(INDEX_DIM)]
        pool = place.nan(2 * tokens, INDEX_DIM)
        yield Case(f"index keys, pairs: {pairs}", keys, [place.spaced(tokens, INDEX_DIM), *norm, cos, sin, pool])


def plans(place: Place, model: Model) -> Iterator[Case]:
    """A plan with new slots, pages and rows, and a step's tokens: into the tables and out of them."""
    slots, context = place.count(64, 4), place.count(4096, 64)
    builder = PlanBuilder()
    for slot in range(0, slots, 2):
        tokens = torch.randint(0, model.vocabulary, (place.count(700, 5),)).tolist()
        builder.slot(slot, tokens, Sampling(temperature=0.5 * (slot % 4), top_k=slot, seed=slot << 40))
        builder.page_writes += [(slot, index, slot * 100 + index) for index in range(-(-context // PAGE))]
        builder.row(slot, 0 if slot % 4 else len(tokens) - 1, len(tokens) if slot % 4 else 1)
    plan = builder.build()
    count = plan.token_count + 7
    tables = Tables.make(slots, context, model.vocabulary, PAGE, slots * 100 + 1000, 2 * PAGE, place.device)
    buffers = StepBuffers.make(len(plan.rows) + 3, count, place.device)
    given = Received(
        torch.from_numpy(plan.body.copy()).to(place.device),
        torch.from_numpy(places(plan)).to(place.device),
        torch.zeros(1, dtype=torch.int32, device=place.device),
    )
    sampled = torch.randint(0, model.vocabulary, (len(plan.rows) + 3,), device=place.device)
    finite = torch.rand(len(sampled), device=place.device) < 0.8
    assert all(flags == FLAG_SAMPLE for flags in plan.rows[:, 3])

    def step(ops: Kernels, copies: Tensors) -> Tensors:
        errors, pool, pages, words, floats, *memory = copies
        mine = replace(tables, token_pool=pool, page_table=pages, words=words, floats=floats)
        rows = StepBuffers(*memory)
        ops.apply_slots(given, mine, errors)
        ops.write_table(given, "page_writes", pages, -1, mine.page_count, errors)
        ops.prepare(given, mine, rows, errors, None)
        wishes = ops.ask(mine, rows)
        kept = ops.keep(sampled, finite, mine, rows)
        return [*copies, *vars(wishes).values(), kept]

    errors = torch.zeros(1, dtype=torch.int32, device=place.device)
    state = [errors, tables.token_pool, tables.page_table, tables.words, tables.floats]
    yield Case("a plan's step", step, [*state, *vars(buffers).values()], exact=True)


def sampling(place: Place, model: Model) -> Iterator[Case]:
    """The largest logits, some of rows that are not finite, and draws behind filters."""
    rows = place.count(64, 6)
    logits = 4 * torch.randn(rows, model.vocabulary, device=place.device)
    logits[1, model.vocabulary // 2] = torch.nan
    logits[2, 5] = torch.inf
    logits[3] = 1.0
    yield Case("largest logits", lambda ops, given: list(ops.greedy(given[0])), [logits], exact=True)
    wishes = Wishes(
        temperature=torch.tensor([0.7, 0.0, 0.0, 1.0, 1.5, 0.3], device=place.device).repeat(rows)[:rows],
        top_k=place.ints([50, 0, 0, 3, 0, 1000]).repeat(rows)[:rows],
        top_p=torch.tensor([0.9, 1.0, 1.0, 0.5, 0.8, 1.0], device=place.device).repeat(rows)[:rows],
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.0, 0.05], device=place.device).repeat(rows)[:rows],
        bits=torch.randint(-(1 << 62), 1 << 62, (rows,), device=place.device),
    )

    def draw(ops: Kernels, given: Tensors) -> Tensors:
        ops.draw(given[0], wishes, given[1])
        return [given[1]]

    logits = 4 * torch.randn(rows, model.vocabulary, device=place.device)
    tokens = torch.full((rows,), 3, dtype=torch.int64, device=place.device)
    # Exponentials round otherwise, and a draw may fall onto the edge of a token.
    yield Case("draws", draw, [logits, tokens], exact=True, slack=rows // 32)


def experts(place: Place) -> Iterator[Case]:
    """Few tokens and many, some without an expert."""
    count, each, hidden, inner = 16, 4, place.count(2048, 64), place.count(768, 32)
    gate_up = place.random(count, 2 * inner, hidden, scale=hidden**-0.5)
    down = place.random(count, hidden, inner, scale=inner**-0.5)
    for tokens in (1, place.count(300, 9)):
        ids = torch.stack([torch.randperm(count + 1, device=place.device)[:each].sort().values for _ in range(tokens)])
        weights = torch.rand(tokens, each, device=place.device).masked_fill(ids == count, 0)

        def call(ops: Kernels, given: Tensors, ids: torch.Tensor = ids, weights: torch.Tensor = weights) -> Tensors:
            x, gate_up, down = given
            return [ops.experts(x, ids, weights, gate_up, down)]

        yield Case(f"experts, {tokens} tokens", call, [place.random(tokens, hidden), gate_up, down])


@dataclass(frozen=True)
class Matrix:
    """Implements `Codes`."""

    codes: torch.Tensor
    scale: torch.Tensor
    zeros: torch.Tensor | None
    inputs: int
    group: int
    block_rows: int
    fold: int


def matrix(place: Place, rows: int, inputs: int, kind: str) -> Matrix:
    """Random codes: `rows` or `blocks` of 8-bit floats, or 4 bits."""
    group, block = {"rows": (inputs, 1), "blocks": (128, 128), "4 bits": (128, 1)}[kind]
    scale = 0.02 * (1 + torch.rand(-(-rows // block), -(-inputs // group), device=place.device))
    if kind == "4 bits":
        codes = torch.randint(0, 256, (rows, inputs // 2), dtype=torch.uint8, device=place.device)
        zeros = torch.randint(0, 16, (rows, scale.shape[1]), dtype=torch.uint8, device=place.device)
        return Matrix(codes, scale, zeros, inputs, group, block, 128)
    floats = torch.randn(rows, inputs, device=place.device).to(torch.float8_e4m3fn)
    return Matrix(floats.view(torch.uint8), scale, None, inputs, group, block, 0)


def quantised(place: Place) -> Iterator[Case]:
    """Products with weights in their bits, of few tokens and of many."""
    rows, inputs = 128 * place.count(48, 2), 128 * place.count(32, 2)
    for kind in ("rows", "blocks", "4 bits"):
        codes = matrix(place, rows, inputs, kind)
        bias = place.random(rows)
        for tokens in (1, place.count(600, 20)):

            def call(ops: Kernels, given: Tensors, codes: Matrix = codes) -> Tensors:
                return [ops.product(given[0], codes, given[1])]

            yield Case(f"product in {kind}, {tokens} tokens", call, [place.random(tokens, inputs), bias])
        yield _mixture(place, kind)


def _mixture(place: Place, kind: str) -> Case:
    count, each, hidden, inner = 8, 2, 128 * place.count(16, 1), 128 * place.count(6, 1)
    gate_up, down = (matrix(place, count * size, other, kind) for size, other in ((2 * inner, hidden), (hidden, inner)))
    tokens = place.count(100, 3)
    ids = torch.stack([torch.randperm(count, device=place.device)[:each].sort().values for _ in range(tokens)])
    weights = torch.rand(tokens, each, device=place.device)

    def call(ops: Kernels, given: Tensors) -> Tensors:
        return [ops.experts_of_codes(given[0], ids, weights, gate_up, down)]

    return Case(f"experts in {kind}", call, [place.random(tokens, hidden)])


Made: TypeAlias = Callable[[Place], Iterator[Case]]
OfModel: TypeAlias = Callable[[Place, Model], Iterator[Case]]
OF_MODELS: list[OfModel] = [attention, layers, plans, sampling]
OF_FAMILIES: list[Made] = [latent, chosen, hot_rows, latent_rows, experts, quantised]


def compare(case: Case, operators: Kernels, twins: Kernels, dtype: torch.dtype) -> None:
    """Raises `AssertionError` if results differ by more than rounding explains."""
    found, expected = case.results(operators, wide=False), case.results(twins, wide=True)
    assert len(found) == len(expected)
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        what = f"{case.name}, result {number}"
        assert ours.shape == theirs.shape, what
        if case.exact:
            unlike = int((ours.nan_to_num(99) != theirs.to(ours.dtype).nan_to_num(99)).sum())
            assert unlike <= case.slack, f"{what}: {unlike} elements differ"
            continue
        if ours.dtype == torch.uint8:
            # 8-bit floats: near the middle of two, an earlier rounding to bfloat16 decides, or the order of a sum.
            left, right = (codes.view(torch.float8_e4m3fn).float() for codes in (ours, theirs))
            assert torch.equal(left.isnan(), right.isnan()), what
            assert ((left - right).abs() <= 0.02 + right.abs() / 8).logical_or(left.isnan()).all(), what
            assert (left - right).nan_to_num().abs().mean() < 0.01, what
            continue
        assert torch.equal(ours.isnan(), theirs.isnan()), what
        # bfloat16 rounds results, and what products of tiles take in between: 2^-9 each, of the largest there is.
        bound = (2**-6 if dtype == torch.bfloat16 else 2e-5) * float(theirs.nan_to_num().abs().max())
        error = float((ours.float() - theirs.float()).nan_to_num().abs().max())
        assert error <= bound, f"{what}: {error} is more than {bound}"
