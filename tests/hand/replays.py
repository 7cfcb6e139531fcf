"""Runs the same steps as graph replays and kernel by kernel, at the same padded sizes.

The results are bit-identical.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from forebay.compute.graphs import Graphs, SamplerKind, Size
from forebay.compute.paged import PagedSteps
from forebay.runner.runner import ModelRunner
from tests.hand.support import EVERYTHING, MiniBrain, PlanBuilder, Request, Sampling

DRAWN = [
    Sampling(temperature=0.8, top_p=0.9, top_k=20, seed=3),
    Sampling(temperature=1.1, min_p=0.05, seed=1 << 60),
    Sampling(temperature=1.3, seed=8),
]
WHOLE = [
    Sampling(temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.2, seed=9),
    Sampling(logprobs=3),
    Sampling(presence_penalty=0.4, logprobs=20),
]
SAMPLINGS = {SamplerKind.GREEDY: [Sampling()], SamplerKind.DRAWN: DRAWN, SamplerKind.WHOLE: WHOLE}
NOBODY = -77
BAD = 20
"""One page in this many holds NaN, in one step of eight."""


class Eager(Graphs):
    """Graphs that are not replayed. Their kernels run one by one, in the same memory."""

    def __init__(self, steps: PagedSteps) -> None:
        self.__dict__.update(vars(steps.graphs))
        self._steps = steps

    def model(self, size: Size) -> None:
        steps = self._steps
        steps._compute(steps._memory, steps._at_its_place, size)

    def sample(self, rows: int, kind: SamplerKind) -> None:
        self._steps._choose(self._steps._memory.part(rows, 0), kind)


@dataclass(frozen=True)
class Seen:
    """All state after a step, without padding."""

    tensors: dict[str, torch.Tensor]
    errors: list[int]

    def check(self, other: Seen, what: str) -> None:
        """Fails unless all bits are equal. NaN counts as equal to NaN."""
        assert self.errors == other.errors, f"{what}: rows that are not finite"
        for name, tensor in self.tensors.items():
            known, expected = (torch.nan_to_num(seen.tensors[name], nan=0.125) for seen in (self, other))
            same = known.equal(expected) and tensor.isnan().equal(other.tensors[name].isnan())
            assert same, f"{what}: {name} of the graph differ from those of its kernels"


def possible(runner: ModelRunner, size: Size) -> bool:
    """True if rows that choose no positions can fill a step of this size."""
    top_k = steps_of(runner)._top_k
    return size.chooses or top_k is None or size.tokens <= size.rows * top_k


def sampled_plan(random: np.random.Generator, runner: ModelRunner, size: Size, kind: SamplerKind) -> PlanBuilder:
    """A plan of random rows whose smallest graph is this size. The plan writes each row's slot and pages."""
    config, vocabulary = runner.config, runner.model_config.vocab_size
    graphs, top_k = steps_of(runner).graphs, steps_of(runner)._top_k
    context = config.context_length if size.chooses or top_k is None else top_k
    smaller = [other for other in graphs.sizes if (other.mixed, other.chooses) == (size.mixed, size.chooses)]
    smaller = [other for other in smaller if other < size]
    least_tokens = max((other.tokens for other in smaller if other.tokens < size.tokens), default=0) + 1
    least_rows = max((other.rows for other in smaller if other.tokens == size.tokens), default=0) + 1
    if size.mixed:
        count = int(random.integers(max(least_rows, -(-size.tokens // context)), size.rows + 1))
        count = min(count, size.tokens - 1)
        tokens = int(random.integers(max(least_tokens, count + 1), size.tokens + 1))
    else:
        count = tokens = int(random.integers(least_tokens, size.rows + 1))
    cuts = np.sort(random.choice(np.arange(1, tokens), count - 1, replace=False))
    lengths = [behind - before for before, behind in pairwise([0, *cuts.tolist(), tokens])]
    while max(lengths) > context:
        lengths[int(np.argmin(lengths))] += 1
        lengths[int(np.argmax(lengths))] -= 1
    assert graphs.fit(count, tokens, chooses=size.chooses) == size
    builder, pages = PlanBuilder(1), random.permutation(runner.kv.page_count).tolist()
    for slot, length in zip(random.permutation(config.slots).tolist(), lengths, strict=False):
        start = int(random.integers(context - length + 1))
        if size.chooses and not builder.rows:
            start = config.context_length - length
        asked = SAMPLINGS[kind]
        sampling = asked[slot % len(asked)] if not builder.rows or random.random() < 0.8 else Sampling()
        builder.slot(slot, random.integers(0, vocabulary, start + length).tolist(), sampling)
        for index in range(-(-(start + length) // config.page_size)):
            builder.page_writes.append((slot, index, pages.pop()))
        builder.row(slot, start, length, sample=not builder.rows or bool(random.random() < 0.8))
    return builder


def steps_of(runner: ModelRunner) -> PagedSteps:
    steps = runner._steps
    assert isinstance(steps, PagedSteps)
    return steps


def _computed(runner: ModelRunner, builder: PlanBuilder, size: Size) -> Seen:
    """Computes a plan, after values of earlier steps are erased from the step's memory."""
    steps, pools = steps_of(runner), pools_of(runner)

    def forget() -> None:
        memory = steps._memory
        memory.logits.fill_(torch.nan)
        memory.block.fill_(NOBODY)
        memory.told.fill_(NOBODY)
        for buffer in vars(memory.buffers).values():
            buffer.zero_()

    runner.device.queue(forget)
    result = runner.step(builder.build())
    lines = runner.tables.counts.lines(np.array([slot for slot, *_ in builder.rows]))
    sampling = [row for row, (_, _, _, flags) in enumerate(builder.rows) if flags]
    block, rows = steps._memory.block, torch.tensor(sampling, device=steps._memory.block.device)
    tensors = {
        "logits": steps._memory.logits[: len(builder.rows)].clone(),
        "tokens": block[1 : 1 + size.rows][rows],
        "finite flags": block[1 + size.rows : 1 + 2 * size.rows][rows],
        "kept tokens": runner.tables.token_pool.clone(),
        "counts": runner.tables.counts.table[lines[lines >= 0]],
        "ids of log-probabilities": torch.from_numpy(result.logprob_ids),
        "log-probabilities": torch.from_numpy(result.logprob_values),
        **{f"keys and values ({at})": pool.clone() for at, pool in enumerate(pools)},
    }
    assert block[1 : 1 + size.rows][rows].tolist() == result.tokens.tolist()
    return Seen(tensors, result.row_errors.tolist())


def pools_of(runner: ModelRunner) -> list[torch.Tensor]:
    """The pools of all parts of a page."""
    return [pool for part in runner.kv.parts for pool in part.pools]


@torch.inference_mode()
def check_replays(runner: ModelRunner, steps: int, seed: int, done: Callable[[Size], None] = lambda _: None) -> None:
    """Computes `steps` random plans twice, with each size and kind of sampling in turn, in random order.

    The runner is warm. Pages hold random numbers before each step, and sometimes NaN. `done` is called with each size
    whose results are equal.
    """
    random, own = np.random.default_rng(seed), steps_of(runner)
    graphs, eager, pools = own.graphs, Eager(own), pools_of(runner)
    kinds = [(size, kind) for size in graphs.sizes for kind in SamplerKind if possible(runner, size)]
    assert steps >= len(kinds), f"{len(kinds)} kinds of steps"
    generator = torch.Generator(pools[0].device).manual_seed(seed)
    before = [torch.empty_like(pool) for pool in pools]
    turns: list[tuple[Size, SamplerKind]] = []
    bad = 0
    for number in range(steps):
        turns = turns or [kinds[at] for at in random.permutation(len(kinds))]
        size, kind = turns.pop()
        for pool in before:
            pool.normal_(generator=generator)
            if number % 8 == 3:
                pool.view(runner.kv.page_count, -1)[::BAD] = torch.nan
        builder = sampled_plan(random, runner, size, kind)
        found = []
        for way in (graphs, eager):
            for pool, content in zip(pools, before, strict=True):
                pool.copy_(content)
            runner.tables.token_pool.fill_(0)
            own.graphs = way
            try:
                found.append(_computed(runner, builder, size))
            finally:
                own.graphs = graphs
        bad += any(found[0].errors)
        found[0].check(found[1], f"step {number} of {size}, {kind.value}")
        done(size)
    assert bad, "no step has read NaN"


def serve_everything(runner: ModelRunner) -> int:
    """Serves chunks that fit graphs and larger ones, decode rows, and all kinds of sampling.

    Returns the number of tokens.
    """
    ways = [Sampling(), DRAWN[0], EVERYTHING, Sampling(logprobs=3)]
    tokens = 0
    for chunk in (7, 1000):
        requests = [
            Request(list(range(1, 4 + 5 * at)), 6, ways[at % 4], arrival=at // 2, prompt_logprobs=at % 3 - 1)
            for at in range(16)
        ]
        MiniBrain(runner, lookahead=1).serve(requests, chunk)
        tokens += sum(len(request.tokens) for request in requests)
    return tokens
