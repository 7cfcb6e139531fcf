"""Graphs write what the same steps write without one, on the deferred device; a graph that does not is seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forebay.gpu.choose import VARIABLE
from forebay.runner.runner import ModelRunner
from tests.gpu_device import sanitized
from tests.hand.graph_steps import Beside, differences
from tests.hand.greedy import model_of
from tests.hand.support import runner_of

KEPT: list[torch.Tensor] = []


@pytest.fixture(autouse=True)
def _twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "reference")


def graphs_of(family: str, **changes: Any) -> ModelRunner:
    changes = {"max_running_requests": 6, "chunked_prefill_size": 128, "graph_rows": 6, **changes}
    runner = runner_of(model_of(family), device="deferred", attention_backend="triton", **changes)
    runner.warm_up()
    return runner


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", "float32"), ("qwen3-moe", "bfloat16"), ("deepseek-v3", "float32")]
)
def test_a_graph_is_the_step_that_it_recorded(family: str, dtype: str) -> None:
    assert differences(graphs_of(family, dtype=dtype), 30, 1) == []


def other_memory(beside: Beside) -> None:
    """The logits' memory is another than that of the capture."""
    memory = beside.steps._memory
    # What the graph writes to stays, as otherwise the replay itself would fail.
    KEPT.append(memory.logits)
    object.__setattr__(memory, "logits", memory.logits.clone())


def other_graph(beside: Beside) -> None:
    """Two sizes have each other's graphs."""
    graphs = beside.steps.graphs
    first, second = graphs._decodes[1:3]
    graphs._models[first], graphs._models[second] = graphs._models[second], graphs._models[first]


def greedy_sampler(beside: Beside) -> None:
    """Rows that draw get the largest logit."""
    samplers = beside.steps.graphs._samplers
    samplers.update({(rows, True): samplers[rows, False] for rows, _ in list(samplers)})


@pytest.mark.parametrize("damage", [other_memory, other_graph, greedy_sampler], ids=lambda damage: damage.__name__)
def test_a_graph_of_something_else_is_seen(damage: Any) -> None:
    assert differences(graphs_of("llama"), 30, 1, damage)


def test_a_replay_that_writes_nothing_is_seen() -> None:
    def damage(beside: Beside) -> None:
        beside.steps.graphs._models.update(dict.fromkeys(beside.steps.graphs._models, lambda: None))

    assert len(differences(graphs_of("llama"), 20, 1, damage)) == 20


@pytest.mark.parametrize("family", ["qwen3", "deepseek-v3"])
def test_what_a_sanitizer_watches_on_a_gpu_runs(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    sanitized.main("deferred", family)
    assert "tokens 30" in capsys.readouterr().out
