"""Graphs on a GPU give the results of their kernels, and nothing is compiled after the warm-up."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.compute.graphs import Size
from forebay.gpu.kernels.launch import COMPILATIONS
from tests.hand.greedy import model_of
from tests.hand.replays import check_replays, possible, serve_everything, steps_of
from tests.hand.support import runner_of

STEPS = [
    ("qwen3", "float32", 200),
    ("qwen3", "bfloat16", 150),
    ("qwen3-moe", "bfloat16", 100),
    ("deepseek-v3", "bfloat16", 80),
    ("deepseek-v32", "bfloat16", 130),
]
SIZES: dict[str, Any] = {"device": "cuda", "slots": 64, "max_running_requests": 64, "max_total_tokens": 64 * 96}


@pytest.mark.parametrize(("family", "dtype", "steps"), STEPS)
def test_a_replay_is_equal_to_its_kernels(family: str, dtype: str, steps: int) -> None:
    runner = runner_of(model_of(family), dtype=dtype, graph_rows=64, chunked_prefill_size=256, **SIZES)
    runner.warm_up()
    done = set[Size]()
    check_replays(runner, steps, steps, done.add)
    assert done == {size for size in steps_of(runner).graphs.sizes if possible(runner, size)}


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe", "deepseek-v3", "deepseek-v32"])
def test_steps_behind_the_warm_up_compile_nothing(family: str) -> None:
    runner = runner_of(model_of(family), dtype="bfloat16", graph_rows=64, chunked_prefill_size=128, **SIZES)
    runner.warm_up()
    before = COMPILATIONS.count
    # From here on, a launch that compiles a kernel fails with its name.
    COMPILATIONS.seal()
    try:
        serve_everything(runner)
    finally:
        COMPILATIONS.seal(False)
    assert COMPILATIONS.count == before
