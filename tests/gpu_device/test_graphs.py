"""A replay writes what its step writes without a graph, bit by bit; and nothing is compiled once a hand serves."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from tests.hand.graph_steps import differences
from tests.hand.support import reference_model, runner_of


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["qwen3", "glm4-moe", "deepseek-v3"])
def test_a_replay_is_the_step_that_was_captured(family: str, dtype: str) -> None:
    sizes: dict[str, Any] = {
        "slots": 64,
        "max_running_requests": 64,
        "chunked_prefill_size": 512,
        "max_total_tokens": 1 << 14,
    }
    runner = runner_of(reference_model(family), device="cuda", dtype=dtype, graph_rows=64, **sizes)
    runner.warm_up()
    assert differences(runner, 500, 1) == []


SERVE = """
import sys
from typing import Any
from forebay.gpu.kernels.launch import COMPILATIONS
from tests.gpu_device.test_steps import SAMPLINGS, PROMPTS
from tests.hand.support import MiniBrain, Request, reference_model, runner_of

runner = runner_of(reference_model(sys.argv[1]), device="cuda", dtype="bfloat16", graph_rows=6, chunked_prefill_size=64)
runner.warm_up()
compiled = COMPILATIONS.count
COMPILATIONS.seal()
for chunk in (7, 64):
    requests = [Request(prompt, 8, sampling) for prompt in PROMPTS for sampling in SAMPLINGS.values()]
    MiniBrain(runner, lookahead=1).serve(requests, chunk=chunk)
print("compiled before", compiled)
"""


@pytest.mark.parametrize("family", ["qwen3", "glm4-moe", "deepseek-v3"])
def test_nothing_is_compiled_while_a_hand_with_graphs_serves(family: str) -> None:
    """In a process of its own: another test may have had the kernel compiled.

    Without graphs the first step with some number of rows compiles: the parts of rows are a constant of a kernel.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SERVE, family]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=180)
    assert not found.returncode, found.stderr[-3000:]
    assert int(found.stdout.split()[-1]) > 5
