"""Layers with a window have their own pages, which are freed when the window has passed them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forebay.protocol.constants import NO_PAGE
from forebay.runner.footprint import footprints
from forebay.runner.runner import ModelRunner
from forebay.state.checks import PlanError
from forebay.state.config import RunnerConfig
from forebay.state.windows import WindowLayers
from tests.hand.support import (
    MiniBrain,
    PlanBuilder,
    Request,
    Sampling,
    hf_config,
    reference_model,
    wire_config,
)
from tests.hand.test_rust_hand import VOCABULARY, in_safetensors, rust, settings, torch_runner

FAMILIES = [
    *("gemma3", "gemma2-one", "mistral-window"),
    *(pytest.param(family, marks=pytest.mark.slow) for family in ("gemma2", "gemma3-windows-only")),
]
PAGE = 4
CHUNKS = range(1, 18)


def facts_of(runner: Any) -> dict[str, Any]:
    facts: dict[str, Any] = runner.facts() if isinstance(runner, ModelRunner) else runner.facts
    return facts


@dataclass
class Run:
    """The pages of a slot for the layers with a window."""

    first: int = 0
    pages: deque[int] = field(default_factory=deque)


class WindowBrain(MiniBrain):
    """Allocates the pages of window layers before each row, and frees pages that the window has passed."""

    def __init__(self, runner: Any, early: int = 0) -> None:
        """`early`: the number of positions by which pages are freed too early."""
        super().__init__(runner, seed=2)
        facts = facts_of(runner)
        self.window, self.size = facts["window"] - early, runner.config.page_size
        self.free = self._random.permutation(facts["window_page_count"]).tolist()
        self.runs: dict[int, Run] = {}
        self.held = 0

    def _admit(self, request: Request, builder: PlanBuilder) -> None:
        super()._admit(request, builder)
        self._release(self.runs.pop(request.slot, Run()).pages)
        self.runs[request.slot] = Run()

    def _advance(self, request: Request, builder: PlanBuilder, chunk: int) -> bool:
        run, start = self.runs[request.slot], request.computed
        sampled = super()._advance(request, builder, chunk)
        passed = max(0, start + 1 - self.window) // self.size
        gone = []
        while run.first < passed and run.pages:
            builder.window_writes.append((request.slot, run.first, NO_PAGE))
            gone.append(run.pages.popleft())
            run.first += 1
        self._release(gone)
        while (run.first + len(run.pages)) * self.size < request.computed:
            # The page that was freed last is the first to be used again.
            builder.window_writes.append((request.slot, run.first + len(run.pages), self.free[-1]))
            run.pages.append(self.free.pop())
        self.held = max(self.held, sum(len(run.pages) for run in self.runs.values()))
        return sampled

    def _release(self, pages: Sequence[int]) -> None:
        self.free += pages
        if isinstance(self.runner, ModelRunner):
            spoil(self.runner, pages)


def spoil(runner: ModelRunner, pages: Sequence[int]) -> None:
    """Fills pages that must not be read with NaN."""
    assert runner.kv.window is not None
    for layer in runner.kv.window_layers:
        for tensor in runner.kv.layers[layer]:
            for page in pages:
                tensor[page * PAGE : (page + 1) * PAGE] = torch.nan


def requests() -> list[Request]:
    random = np.random.default_rng(5)
    samplings = [Sampling(), Sampling(logprobs=5), Sampling(temperature=1.0, seed=3, logprobs=0)]
    lengths = [1, 3, 7, 16, 17, 18, 40, 55, 61]
    return [
        Request(random.integers(0, VOCABULARY, length).tolist(), 20, samplings[number % 3], arrival=number // 3)
        for number, length in enumerate(lengths)
    ]


def compare(ours: Sequence[Request], theirs: Sequence[Request]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.tokens == other.tokens, len(one.prompt)
        for (ids, values), (wanted_ids, wanted) in zip(one.logprobs, other.logprobs, strict=True):
            assert ids.tolist() == wanted_ids.tolist()
            np.testing.assert_allclose(values, wanted, atol=1e-4)


def check(runner: Any, plain: Any) -> None:
    """Compares chunks of several sizes with the results of a runner with one pool."""
    expected = requests()
    MiniBrain(plain, seed=2).serve(expected, 16)
    assert facts_of(runner)["window_page_count"] > 0
    assert facts_of(plain)["window_page_count"] == 0
    for chunk in CHUNKS:
        found = requests()
        WindowBrain(runner).serve(found, chunk)
        compare(found, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_window_part_changes_no_token(tmp_path: Path, family: str) -> None:
    """Both hands are compared with the same hand with one pool."""
    model = in_safetensors(tmp_path, family)
    one_pool = settings(model, page_size=PAGE)
    apart = {**one_pool, "window_ratio": 0.5}
    check(torch_runner(apart), torch_runner(one_pool))
    with rust(tmp_path, apart) as runner, rust(tmp_path, one_pool) as plain:
        check(runner, plain)


@pytest.mark.parametrize("kept", [None, "int8"])
def test_pages_in_the_order_of_the_kernels(tmp_path: Path, kept: str | None) -> None:
    """With pages of 16 positions the kernels read whole groups in place. 8-bit integers need pages of this size."""
    one_pool = settings(in_safetensors(tmp_path, "gemma3"), page_size=16, kv_cache_dtype=kept)
    with rust(tmp_path, {**one_pool, "window_ratio": 0.5}) as runner, rust(tmp_path, one_pool) as plain:
        check(runner, plain)


def test_a_page_that_is_taken_back_too_early_is_noticed(tmp_path: Path) -> None:
    values = {**settings(in_safetensors(tmp_path, "gemma3"), page_size=PAGE), "window_ratio": 0.5}
    with pytest.raises((AssertionError, PlanError, IndexError, RuntimeError)):
        WindowBrain(torch_runner(values), early=1).serve(requests(), 1)
    with rust(tmp_path, values) as runner, pytest.raises(AssertionError, match="without a page"):
        WindowBrain(runner, early=1).serve(requests(), 1)


def test_a_long_request_needs_few_pages(tmp_path: Path) -> None:
    values = {**settings(in_safetensors(tmp_path, "gemma3"), page_size=PAGE), "window_ratio": 0.5}
    runner = torch_runner(values)
    brain = WindowBrain(runner)
    brain.serve([Request(list(range(70)), 20)], 4)
    # With a window of 5 positions and rows of 4, a slot holds at most 4 of its 23 pages.
    assert brain.held <= 4


def runner_config(family: str, **changes: Any) -> RunnerConfig:
    model = reference_model(family)
    values = wire_config(hf_config(model.config, type(model).__name__), window_ratio=0.5, **changes)
    return RunnerConfig.from_dict(values)


def test_both_hands_divide_memory_alike(tmp_path: Path) -> None:
    values = {**settings(in_safetensors(tmp_path, "gemma3"), page_size=PAGE), "window_ratio": 0.3}
    theirs = facts_of(torch_runner(values))
    with rust(tmp_path, values) as runner:
        ours = runner.facts
    for name in ("page_count", "page_bytes", "window", "window_page_count", "window_page_bytes"):
        assert ours[name] == theirs[name], name
    # The hand in Rust counts the null page too.
    assert ours["kv_bytes"] == theirs["kv_bytes"] + theirs["window_page_bytes"]
    [planned] = footprints([RunnerConfig.from_dict(values)], 1 << 30)
    found = (planned.page_count, planned.page_bytes, planned.window_page_count, planned.window_page_bytes)
    names = ("page_count", "page_bytes", "window_page_count", "window_page_bytes")
    assert found == tuple(theirs[name] for name in names)
    assert planned.kv_bytes == theirs["kv_bytes"]


def test_more_tokens_have_room_where_windows_have_their_own_pages() -> None:
    config = replace(runner_config("gemma3", slots=2000), max_total_tokens=None)
    [apart] = footprints([config], 50_000_000)
    [one_pool] = footprints([replace(config, window_ratio=None)], 50_000_000)
    assert apart.page_count > 1.4 * one_pool.page_count
    assert apart.kv_bytes <= 25_000_000
    assert one_pool.window_page_count == 0


ONE_POOL: list[tuple[str, Callable[[], RunnerConfig]]] = [
    ("several ranks", lambda: replace(runner_config("gemma3"), world_size=2)),
    ("the host tier", lambda: replace(runner_config("gemma3"), host_ratio=2.0)),
    ("attention backend triton", lambda: replace(runner_config("gemma3"), device="cuda")),
    ("attention backend triton", lambda: replace(runner_config("gemma3"), attention_backend="triton")),
]


@pytest.mark.parametrize(("why", "config"), ONE_POOL)
def test_where_layers_share_one_pool_the_hand_says_why(why: str, config: Callable[[], RunnerConfig]) -> None:
    found = config()
    windows = WindowLayers.of(found, found.kept_model)
    assert why in windows.one_pool
    assert (windows.ratio, windows.window, windows.count(100)) == (None, 5, 0)


def test_a_window_as_long_as_the_context_is_none() -> None:
    config = runner_config("gemma3-long-windows")
    windows = WindowLayers.of(config, config.kept_model)
    assert (windows.window, windows.ratio, windows.one_pool) == (0, None, "")
