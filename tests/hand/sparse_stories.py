"""Runs two hands of one model with the same steps.

One keeps all pages on the device, the other drops pages and restores them.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from forebay.attention import selection
from forebay.compute.choose import Choice
from forebay.compute.eager import TorchCompute
from forebay.compute.rows import Launch
from forebay.gpu.choose import VARIABLE
from forebay.layers import routing
from forebay.protocol.constants import COPY_OK, COPY_RESTORE, COPY_RESTORE_INDEX, COPY_SAVE, NO_PAGE
from forebay.protocol.result import StepResult
from forebay.runner.host_tier import HostMemory
from forebay.runner.launched import Launched
from forebay.runner.runner import ModelRunner
from tests.hand.greedy import model_of
from tests.hand.support import (
    INDEXED,
    PlanBuilder,
    Sampling,
    runner_of,
)

TOP_K = INDEXED["index_topk"]
CLEAR = 3e-6
"""Margins of scores above this do not depend on the order of additions."""
SIZE = 4
TAIL = 2
"""The last pages of a request, which are never dropped."""
HOST = {"host_ratio": 4.0, "hot_row_tokens": TOP_K, "page_size": SIZE, "kv_checksum": True}
SPARSE = pytest.mark.parametrize("family", ["deepseek-v32", "glm-dsa-shared"])
HANDS: dict[str, dict[str, Any]] = {
    "cpu": {"device": "cpu"},
    "deferred": {"device": "deferred"},
    "kernels": {"device": "deferred", "attention_backend": "triton"},
}
"""The last entry computes as a GPU's hand does, with the PyTorch reference operators."""
EACH_HAND = pytest.mark.parametrize("hand", HANDS.values(), ids=HANDS)
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.8, top_p=0.9, seed=3),
    Sampling(temperature=1.1, top_k=20, repetition_penalty=1.3, seed=9),
]
Logits = dict[int, list[torch.Tensor]]


@pytest.fixture(autouse=True)
def twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the PyTorch reference operators, because kernels need a GPU or Triton's interpreter."""
    monkeypatch.setenv(VARIABLE, "reference")


@pytest.fixture(scope="module")
def logits() -> Iterator[Logits]:
    """All logits, by the `id` of the `TorchCompute` that computed them."""
    found: Logits = {}
    compute = TorchCompute.logits

    def watch(self: TorchCompute, launch: Launch) -> torch.Tensor:
        given = compute(self, launch)
        found.setdefault(id(self), []).append(given)
        return given

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchCompute, "logits", watch)
        yield found


def sparse_runner(family: str, **changes: Any) -> ModelRunner:
    return runner_of(model_of(family), None, HostMemory(os.memfd_create("host"), 0), **{**HOST, **changes})


@dataclass
class Life:
    """A request in both runners."""

    slot: int
    text: list[int]
    """Known tokens: the prompt, and the sampled tokens whose results were collected."""
    prompt_len: int
    sampling: Sampling
    count: int = 0
    """The number of tokens when the steps in flight are done."""
    computed: int = 0
    plain: list[int] = field(default_factory=list)
    """The request's pages in the runner that keeps all pages on the device."""
    hot: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)
    saved: set[int] = field(default_factory=set)
    rows: list[int] = field(default_factory=list)
    arriving: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By ticket: the index of a page that is being restored, and its hot page."""

    def droppable(self) -> list[int]:
        return [index for index in range(len(self.hot) - TAIL) if index in self.saved and self.hot[index] >= 0]


class Both:
    """Two runners of one model that get the same rows in every step. One of them keeps all pages on the device."""

    def __init__(
        self,
        family: str,
        seed: int,
        lookahead: int = 0,
        hand: Mapping[str, Any] = HANDS["cpu"],
        whole: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> None:
        """`whole` configures the hand that keeps all pages on the device.

        None: both hands have the same configuration.
        """
        self.random = np.random.default_rng(seed)
        with pytest.MonkeyPatch.context() as patch:
            # Computes by operators, as the other hand does. If the device read plans, either all queries of a step
            # would choose positions, or none.
            patch.setattr(Choice, "_needs_host", lambda choice, model: True)
            self.whole = runner_of(model_of(family), page_size=SIZE, **(hand if whole is None else whole))
        self.sparse = sparse_runner(family, **{"max_total_tokens": 90 * SIZE, **hand, **changes})
        self.row_pages = self.sparse.config.row_pages
        self.free_plain = list(range(self.whole.kv.page_count))
        self.free = list(range(self.sparse.kv.page_count))
        self.free_host = list(range(self.sparse.host_pages))
        self.slots = list(range(self.whole.config.slots))
        self.lives: list[Life] = []
        self.lookahead = lookahead
        self.flying: deque[tuple[list[Life], list[int], Launched, Launched]] = deque()
        self.saves: dict[int, tuple[Life, int]] = {}
        self.retired: list[int] = []
        self.found = np.zeros(4, np.int64)
        self.selected = 0
        self.events = {"converted": 0, "restored": 0, "came back resident": 0, "came back sparse": 0}
        self.outstanding = 0
        """The number of copies that have not ended."""
        self.done: set[int] = set()
        self._step = self._ticket = 0

    def ticket(self) -> int:
        self._ticket += 1
        return self._ticket

    def builders(self) -> tuple[PlanBuilder, PlanBuilder]:
        self._step += 1
        return PlanBuilder(self._step), PlanBuilder(self._step)

    def admit(self, prompt: list[int], whole: PlanBuilder, sparse: PlanBuilder) -> None:
        sampling = SAMPLINGS[int(self.random.integers(len(SAMPLINGS)))]
        life = Life(self.slots.pop(), prompt, len(prompt), sampling, len(prompt))
        self.lives.append(life)
        self.write(life, whole, sparse)
        self.grow(life, whole, sparse)

    def write(self, life: Life, whole: PlanBuilder, sparse: PlanBuilder) -> None:
        """Writes the slot again, with the request's current pages."""
        for builder in (whole, sparse):
            builder.slot(life.slot, life.text, life.sampling, prompt_len=life.prompt_len)
        whole.page_writes += [(life.slot, index, page) for index, page in enumerate(life.plain)]
        sparse.page_writes += [(life.slot, index, page) for index, page in enumerate(life.hot)]
        sparse.host_writes += [(life.slot, index, page) for index, page in enumerate(life.host)]
        sparse.hot_rows += [(life.slot, index, page) for index, page in enumerate(life.rows)]

    def grow(self, life: Life, whole: PlanBuilder, sparse: PlanBuilder) -> None:
        while len(life.hot) * SIZE < life.count + 1:
            index = len(life.hot)
            life.plain.append(self.free_plain.pop())
            life.hot.append(self.free.pop())
            life.host.append(self.free_host.pop())
            whole.page_writes.append((life.slot, index, life.plain[-1]))
            sparse.page_writes.append((life.slot, index, life.hot[-1]))
            sparse.host_writes.append((life.slot, index, life.host[-1]))

    def drop(self, life: Life, indices: list[int], builder: PlanBuilder) -> list[int]:
        """Drops pages from the slot, and returns the device pages that become free."""
        given = [life.hot[index] for index in indices]
        for index in indices:
            life.hot[index] = NO_PAGE
            builder.page_writes.append((life.slot, index, NO_PAGE))
        return given

    def relieve(self, life: Life, builder: PlanBuilder) -> None:
        """Drops some pages, or restores one."""
        random, can = self.random, life.droppable()
        some = sorted(random.permutation(can)[: random.integers(1, len(can) + 1)].tolist()) if can else []
        # In a slot that is not sparse, queries with at most top-k positions use no index. Results may then differ by
        # rounding.
        if not life.rows and some and life.computed >= TOP_K:
            given = self.drop(life, some, builder)
            while len(given) < self.row_pages:
                given.append(self.free.pop())
            random.shuffle(given)
            life.rows = given[: self.row_pages]
            self.retired += given[self.row_pages :]
            builder.hot_rows += [(life.slot, index, page) for index, page in enumerate(life.rows)]
            self.events["converted"] += 1
        elif life.rows and some and random.random() < 0.5:
            self.retired += self.drop(life, some, builder)
        elif life.rows and not life.arriving:
            away = [index for index, page in enumerate(life.hot) if page < 0]
            if away:
                self.restore(life, int(random.choice(away)), builder)
                self.events["restored"] += 1

    def restore(self, life: Life, index: int, builder: PlanBuilder) -> None:
        ticket, page = self.ticket(), self.free.pop(0)
        life.arriving[ticket] = index, page
        builder.copies.append((ticket, COPY_RESTORE, page, life.host[index]))

    def preempt(self, life: Life) -> None:
        """Preempts a request: it loses its unsaved pages and comes back in another slot."""
        self.rest_of_all()
        keep = 0
        while keep in life.saved and (keep + 1) * SIZE < len(life.text):
            keep += 1
        self.slots.insert(0, life.slot)
        life.slot = self.slots.pop()
        self.retired += [page for page in life.hot + life.rows if page >= 0]
        self.free_plain += life.plain[keep:]
        self.free_host = life.host[keep:] + self.free_host
        life.plain, life.host, life.hot = life.plain[:keep], life.host[:keep], [NO_PAGE] * keep
        life.saved &= set(range(keep))
        life.rows, life.computed, life.count = [], keep * SIZE, len(life.text)
        _, builder = self.builders()
        if self.random.random() < 0.5:
            # As if the device had been lost. No step is in flight here.
            for keys in self.sparse.kv.index_keys:
                stride, layer = self.sparse.kv.index.page_stride, SIZE  # type: ignore[union-attr]
                for page in life.host:
                    keys[page * stride : page * stride + layer] = torch.nan
            builder.copies += [(self.ticket(), COPY_RESTORE_INDEX, NO_PAGE, page) for page in life.host]
        as_sparse = keep * SIZE > TOP_K and self.random.random() < 0.6
        if not as_sparse:
            for index in range(keep):
                self.restore(life, index, builder)
        self.outstanding += len(builder.copies)
        self.take(self.sparse.step(builder.build()))
        self.rest_of_all()
        whole, sparse = self.builders()
        if as_sparse:
            life.rows = [self.free.pop() for _ in range(self.row_pages)]
        self.write(life, whole, sparse)
        self.grow(life, whole, sparse)
        self.whole.step(whole.build())
        self.take(self.sparse.step(sparse.build()))
        self.events["came back sparse" if as_sparse else "came back resident"] += 1

    def rest_of_all(self) -> None:
        """Waits until no step and no copy is in flight."""
        while self.flying:
            self.collect()
        while self.outstanding or any(life.arriving for life in self.lives):
            _, builder = self.builders()
            builder.wait_us = [1000]
            for life in self.lives:
                self.settle(life, builder)
            self.take(self.sparse.step(builder.build()))

    def settle(self, life: Life, builder: PlanBuilder) -> bool:
        """Writes restored pages to the slot's table. True if there were any."""
        ended = [ticket for ticket in life.arriving if ticket in self.done]
        for ticket in ended:
            index, page = life.arriving.pop(ticket)
            life.hot[index] = page
            builder.page_writes.append((life.slot, index, page))
        return bool(ended)

    def advance(self, life: Life, whole: PlanBuilder, sparse: PlanBuilder) -> bool:
        """Adds one row, and saves the pages that it fills."""
        left = life.count - life.computed
        length = 1 if life.rows else min(left, int(self.random.choice([1, 3, 16])))
        sample = length == left
        for builder in (whole, sparse):
            builder.row(life.slot, life.computed, length, sample)
        before, life.computed = life.computed, life.computed + length
        life.count += sample
        for index in range(before // SIZE, life.computed // SIZE):
            ticket = self.ticket()
            self.saves[ticket] = life, index
            sparse.copies.append((ticket, COPY_SAVE, life.hot[index], life.host[index]))
        self.selected += bool(life.rows) * min(TOP_K, life.computed)
        return sample

    def step(self) -> None:
        whole, sparse = self.builders()
        random = self.random
        if len(self.lives) < 4 and random.random() < 0.5:
            prompt = random.integers(0, 131, random.integers(1, 40)).tolist()
            self.admit(prompt, whole, sparse)
        for life in self.lives:
            if not self.settle(life, sparse) and random.random() < 0.25:
                self.relieve(life, sparse)
            self.grow(life, whole, sparse)
        random.shuffle(self.lives)
        sampling = [life for life in self.lives if self.advance(life, whole, sparse)]
        self.outstanding += len(sparse.copies)
        both = self.whole.launch(whole.build()), self.sparse.launch(sparse.build())
        self.flying.append((sampling, self.retired, *both))
        self.retired = []
        while len(self.flying) > self.lookahead:
            self.collect()
        for life in [life for life in self.lives if life.count > 80]:
            self.finish(life)
        if self.lives and random.random() < 0.1:
            self.preempt(self.lives[int(random.integers(len(self.lives)))])

    def finish(self, life: Life) -> None:
        self.rest_of_all()
        self.lives.remove(life)
        self.slots.insert(0, life.slot)
        self.free_plain += life.plain
        self.free += [page for page in life.hot + life.rows if page >= 0]
        self.free_host += life.host

    def collect(self) -> None:
        sampling, retired, whole, sparse = self.flying.popleft()
        expected, result = whole.collect(), sparse.collect()
        assert result.tokens.tolist() == expected.tokens.tolist()
        assert not result.row_errors.any()
        for life, token in zip(sampling, result.tokens.tolist(), strict=True):
            life.text.append(token)
        self.take(result)
        self.free += retired

    def take(self, result: StepResult) -> None:
        assert result.copied[:, 1].tolist() == [COPY_OK] * len(result.copied)
        assert not result.copy_wait_us.size, "no step waits for a save"
        self.outstanding -= len(result.copied)
        self.done.update(result.copied[:, 0].tolist())
        for ticket in result.copied[:, 0].tolist():
            life, index = self.saves.pop(ticket, (None, 0))
            if life is not None:
                life.saved.add(index)
        if result.sparse_rows.size:
            self.found += result.sparse_rows

    def computes(self) -> tuple[int, int]:
        return id(self.whole._compute), id(self.sparse._compute)


def run(both: Both, steps: int, logits: Logits, most: float = 0.0) -> None:
    """Runs steps, and compares tokens and logits. Logits differ by at most `most`."""
    for _ in range(steps):
        both.step()
    while both.flying:
        both.collect()
    whole, sparse = (logits.pop(number) for number in both.computes())
    assert len(whole) == len(sparse) > 0
    distances = [float((one - other).abs().max()) for one, other in zip(whole, sparse, strict=True) if len(one)]
    assert all(distance <= most for distance in distances), f"{max(distances)} in {len(whole)} steps"
    layers = both.whole.decoder.config.num_hidden_layers
    assert both.found[0] == both.selected * layers
    assert both.found[0] == both.found[1:].sum()


@contextmanager
def watched() -> Iterator[list[torch.Tensor]]:
    """Collects the margins between the scores that routers and indexers keep and the other scores.

    Equal zeros have no margin.
    """
    margins: list[torch.Tensor] = []
    route, choose = routing._best, selection.best

    def watch_routes(scores: torch.Tensor, count: int) -> torch.Tensor:
        if scores.shape[1] > count:
            margins.append(of(scores, count))
        return route(scores, count)

    def watch_choices(scores: torch.Tensor, start: int, top_k: int) -> torch.Tensor:
        for query, line in enumerate(scores):
            if start + query >= top_k:
                margins.append(of(line[None, : start + query + 1], top_k))
        return choose(scores, start, top_k)

    def of(scores: torch.Tensor, count: int) -> torch.Tensor:
        ranked = scores.sort(dim=-1, descending=True).values
        last, first = ranked[:, count - 1], ranked[:, count]
        same = (last == 0) & (first == 0) | last.isinf()
        return (last - first).masked_fill(same, 1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "_best", watch_routes)
        patch.setattr(selection, "best", watch_choices)
        yield margins


def run_beside_cpu(
    logits: Logits, family: str, hand: Mapping[str, Any], lookahead: int = 1, most: float = 1e-4, **changes: Any
) -> None:
    """Compares a sequence of steps with a CPU hand that has all pages.

    Tries another sequence if rounding decided a choice. Operators of the two hands add in different orders. So logits
    differ by up to `most`, and nearly equal scores may change order.
    """
    for seed in range(7, 12):
        both = Both(family, seed, lookahead, hand, HANDS["cpu"], **changes)
        with watched() as margins:
            failed: AssertionError | None = None
            try:
                run(both, 100, logits, most)
            except AssertionError as error:
                failed = error
        logits.clear()
        if failed is None:
            assert both.found[3] > 0, "no position was missed"
            return
        if min(float(margin.min()) for margin in margins) >= CLEAR:
            raise failed
    pytest.fail(f"five stories in which rounding may have decided: {failed}")
