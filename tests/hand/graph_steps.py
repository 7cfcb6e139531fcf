"""Graphs beside the same steps without one, at the same padded size: every bit of what they write.

Sizes come in random order, on random rows. Before each run the memory that it writes to is spoiled, and keys and values
are what they were. A graph that reads memory of an earlier step, or writes to another's, differs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from forebay.compute.graphs import Size
from forebay.compute.paged import PagedSteps
from forebay.device import Work
from forebay.protocol.plan import FLAG_SAMPLE, Plan
from forebay.runner.runner import ModelRunner
from forebay.state.staging import StepInputs
from tests.hand.support import PlanBuilder, Sampling


class Beside:
    """A runner with graphs, whose slots all have tokens, pages, and sampling parameters."""

    def __init__(self, runner: ModelRunner, seed: int) -> None:
        assert isinstance(runner._steps, PagedSteps)
        self.runner, self.steps = runner, runner._steps
        self._random = np.random.default_rng(seed)
        self._context = runner.config.context_length
        self._fill()

    def _fill(self) -> None:
        runner, random = self.runner, self._random
        slots, size = runner.config.slots, runner.config.page_size
        each = min(-(-self._context // size), runner.kv.page_count // slots)
        self._context = min(self._context, each * size)
        pages = random.permutation(runner.kv.page_count)[: slots * each].reshape(slots, each).tolist()
        builder = PlanBuilder(0)
        for slot in range(slots):
            tokens = random.integers(0, runner.model_config.vocab_size, self._context).tolist()
            builder.slot(slot, tokens, Sampling(temperature=0.7 * (slot % 2), top_p=0.9, seed=slot))
            builder.page_writes += [(slot, index, page) for index, page in enumerate(pages[slot])]
        runner.step(builder.build())
        for layer in runner.kv.layers:
            for pool in layer:
                pool.normal_()

    def plan(self, size: Size) -> Plan:
        """Random rows of which this is the smallest size."""
        graphs = self.steps.graphs
        while True:
            rows = int(self._random.integers(1, min(size.rows, self.runner.config.slots) + 1))
            tokens = int(self._random.integers(rows, size.tokens + 1)) if size.mixed else rows
            if graphs.fit(rows, tokens) == size:
                break
        # At least one each, and the rest anywhere, as far as a context goes.
        lengths = np.ones(rows, np.int64)
        while lengths.sum() < tokens:
            row = self._random.integers(rows)
            lengths[row] += min(tokens - lengths.sum(), self._context - lengths[row], self._random.integers(1, 40))
        starts = self._random.integers(0, self._context - lengths + 1)
        chosen = self._random.permutation(self.runner.config.slots)[:rows]
        flags = np.full(rows, FLAG_SAMPLE)
        return Plan(rows=np.stack((chosen, starts, lengths, flags), axis=1).astype(np.int32)).staged()

    def run(self, plan: Plan, model: Work, sampler: Work) -> list[torch.Tensor]:
        """Everything that a step writes: logits, the block of results, the token pool, keys and values."""
        device, memory = self.runner.device, self.steps._memory
        pools = [pool for layer in self.runner.kv.layers for pool in layer]
        tokens = self.runner.tables.all_tokens
        before = [pool.clone() for pool in (*pools, tokens)]
        memory.logits.fill_(torch.nan)
        memory.block.fill_(-1)
        self.steps._errors.zero_()
        device.queue(partial(self._receive, plan))
        device.queue(model)
        device.queue(sampler)
        device.event().wait()
        written = [memory.logits.clone(), memory.block.clone(), *(pool.clone() for pool in (*pools, tokens))]
        for pool, old in zip((*pools, tokens), before, strict=True):
            pool.copy_(old)
        return written

    def _receive(self, plan: Plan) -> None:
        self.steps._receive(StepInputs(plan, self.runner.device))

    def differs(self, size: Size, drawn: bool) -> str | None:
        """What a graph and the same step without it write otherwise; None: nothing."""
        steps, plan = self.steps, self.plan(size)
        part = steps._memory.part(size.rows, size.tokens)
        ours = self.run(plan, partial(steps.graphs.model, size), partial(steps.graphs.sample, size.rows, drawn))
        theirs = self.run(
            plan,
            lambda: steps._compute(part, steps._at_its_place, size.mixed),
            partial(steps._choose, part, drawn),
        )
        rows = len(plan.rows)
        # Of padded rows there is nothing to compare: their logits are of the null page's content.
        ours[0], theirs[0] = ours[0][:rows], theirs[0][:rows]
        if not theirs[0].isfinite().all():
            return f"{size}: logits that are no numbers"
        names = ["logits", "results", *["keys or values"] * (len(ours) - 3), "tokens"]
        for name, left, right in zip(names, ours, theirs, strict=True):
            if not _same_bits(left, right):
                return f"{size}: {name} of {rows} rows"
        return None


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


@torch.inference_mode()
def differences(
    runner: ModelRunner, count: int, seed: int, damage: Callable[[Beside], None] | None = None
) -> list[str]:
    """What differs in `count` steps, each captured size among them at least once, in random order."""
    beside = Beside(runner, seed)
    if damage is not None:
        damage(beside)
    random = np.random.default_rng(seed)
    sizes = list(beside.steps.graphs.sizes)
    order = [*sizes, *(sizes[at] for at in random.integers(0, len(sizes), max(0, count - len(sizes))))]
    found = []
    for at in random.permutation(len(order)):
        different = beside.differs(order[at], drawn=bool(random.integers(2)))
        if different is not None:
            found.append(different)
    return found
