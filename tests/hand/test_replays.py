"""Graphs give the results of their kernels. Here a graph is a list of recorded operators. Wrong graphs are noticed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from forebay.compute.graphs import Size
from forebay.compute.paged import Memory
from forebay.device.recorded import LostMemoryError
from forebay.gpu.choose import VARIABLE
from forebay.runner.runner import ModelRunner
from forebay.state.slots import PlanError
from tests.hand.greedy import model_of
from tests.hand.replays import check_replays, possible, serve_everything, steps_of
from tests.hand.support import runner_of

STEPS = 40
SHOWN = (AssertionError, PlanError, LostMemoryError)


@pytest.fixture(autouse=True)
def _twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "reference")


def cold(family: str = "qwen3") -> ModelRunner:
    sizes: dict[str, Any] = {
        "max_running_requests": 70,
        "slots": 70,
        "max_total_tokens": 70 * 96,
        "chunked_prefill_size": 100,
        "attention_backend": "triton",
    }
    return runner_of(model_of(family), device="deferred", graph_rows=6, **sizes)


def warm(family: str = "qwen3") -> ModelRunner:
    runner = cold(family)
    runner.warm_up()
    return runner


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe", "deepseek-v3", "deepseek-v32"])
def test_a_replay_is_equal_to_its_kernels(family: str) -> None:
    runner, done = warm(family), set[Size]()
    check_replays(runner, STEPS if family == "qwen3" else 36 if family == "deepseek-v32" else 18, 0, done.add)
    assert done == {size for size in steps_of(runner).graphs.sizes if possible(runner, size)}


def test_steps_of_every_kind_are_served() -> None:
    """On a GPU this shows that no kernel is compiled while requests run."""
    assert serve_everything(warm("deepseek-v3")) == 2 * 16 * 6


@pytest.mark.parametrize("family", ["qwen3", "deepseek-v3"])
def test_graphs_read_angles_from_a_table(family: str) -> None:
    """Computed angles would take eleven small kernels at the start of each step."""
    graphs = steps_of(warm(family)).graphs
    for work in graphs._models.values():
        operators = {call.operator for call in work.__self__._calls}  # type: ignore[attr-defined]
        assert torch.ops.aten.index_select.default in operators
        assert not operators & {torch.ops.aten.cos.default, torch.ops.aten.sin.default}


def test_a_plan_that_a_graph_reads_elsewhere_shows() -> None:
    runner = warm()
    steps = steps_of(runner)
    old, steps._input = steps._input, steps._input.clone()
    with pytest.raises(SHOWN):
        check_replays(runner, STEPS, 0)
    del old


def test_memory_that_was_replaced_shows() -> None:
    runner = warm()
    steps = steps_of(runner)
    steps._memory = Memory.make(6, 100, 131, steps._input.device)
    with pytest.raises(SHOWN):
        check_replays(runner, STEPS, 0)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_size_with_memory_of_its_own_shows(mixed: bool) -> None:
    runner = cold()
    steps = steps_of(runner)
    whole = Memory.part

    def part(memory: Memory, rows: int, tokens: int) -> Memory:
        given = whole(memory, rows, tokens)
        if (rows, tokens) != (6, 100 if mixed else 6):
            return given
        return replace(given, logits=memory.logits.flip(0)[:rows])

    steps._memory = memory = steps._memory
    object.__setattr__(memory, "part", partial(part, memory))
    runner.warm_up()
    object.__delattr__(memory, "part")
    with pytest.raises(SHOWN):
        check_replays(runner, STEPS, 0)


def test_a_graph_in_place_of_another_shows() -> None:
    runner = warm()
    models = steps_of(runner).graphs._models
    models[Size(4, 4, mixed=False)] = models[Size(2, 2, mixed=False)]
    with pytest.raises(SHOWN):
        check_replays(runner, STEPS, 0)


def test_a_weight_that_was_replaced_shows() -> None:
    runner = warm()
    norm = runner.decoder.norm
    kept, norm.weight = norm.weight, norm.weight * 1.001
    with pytest.raises(SHOWN):
        check_replays(runner, STEPS, 0)
    del kept
