"""Recurrent layers in steps whose plans the device reads: the tokens of transformers, with and without graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from forebay.compute.paged import PagedSteps
from forebay.gpu import reference
from forebay.gpu.choose import VARIABLE
from forebay.runner.runner import ModelRunner
from tests.hand import test_recurrent
from tests.hand.late_masks import PATTERN, Late, Step, check_late
from tests.hand.recurrent_models import save
from tests.hand.support import MiniBrain, Request, Sampling
from tests.hand.test_recurrent import COUNT, VOCABULARY, check, check_kept, expected, prompts
from tests.hand.test_rust_hand import settings, torch_runner

GRAPHS = pytest.mark.parametrize("graph_rows", [0, 6], ids=["eager", "graphs"])
MODELS = ["qwen3.5-text", "granite4-h", "kimi-linear"]
"""A gated delta net, Mamba-2 and KDA."""
MORE = ["lfm2-biases", "nemotron-h", "falcon-h1-norm-last"]


@pytest.fixture(autouse=True)
def _twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "reference")


@contextmanager
def runner_of(folder: Path, name: str, graph_rows: int) -> Iterator[ModelRunner]:
    changes: dict[str, Any] = {"attention_backend": "triton", "graph_rows": graph_rows, "chunked_prefill_size": 80}
    runner = torch_runner(settings(save(folder / "model", name), device="deferred", max_running_requests=6, **changes))
    assert isinstance(runner._steps, PagedSteps)
    assert (runner._steps.graphs.count > 0) == (graph_rows > 0)
    yield runner


@GRAPHS
@pytest.mark.parametrize("name", [*MODELS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_tokens_of_recurrent_models_in_steps_of_a_gpu(tmp_path: Path, name: str, graph_rows: int) -> None:
    with runner_of(tmp_path, name, graph_rows) as runner:
        for chunk in (7, 1000):
            requests = [
                Request(prompt, COUNT, Sampling(logprobs=5), arrival=2 * number)
                for number, prompt in enumerate(prompts())
            ]
            MiniBrain(runner, chunk, lookahead=1).serve(requests, chunk)
            check(name, requests)


@GRAPHS
@pytest.mark.parametrize("name", ["qwen3.5-text", "lfm2"])
def test_a_replay_goes_on_where_it_stopped(tmp_path: Path, name: str, graph_rows: int) -> None:
    with runner_of(tmp_path, name, graph_rows) as runner:
        for kept in (1, COUNT - 1):
            wanted = [tokens for tokens, _ in expected(name)]
            again = [
                Request(prompt, COUNT, replayed=tokens[:kept]) for prompt, tokens in zip(prompts(), wanted, strict=True)
            ]
            MiniBrain(runner, 3).serve(again, 5)
            assert [request.tokens for request in again] == wanted


@GRAPHS
@pytest.mark.parametrize("name", ["qwen3-next", "lfm2", "granite4-h"])
def test_a_prefix_goes_on_from_a_kept_state(tmp_path: Path, name: str, graph_rows: int) -> None:
    with runner_of(tmp_path, name, graph_rows) as runner:
        check_kept(name, runner)


@GRAPHS
@pytest.mark.parametrize("name", ["qwen3.5-text", "lfm2"])
@PATTERN
def test_a_row_whose_mask_is_late_says_the_same_later(tmp_path: Path, name: str, late: Late, graph_rows: int) -> None:
    def step_of() -> Step:
        with runner_of(tmp_path, name, graph_rows) as runner:
            return lambda plan, masks: runner.step(plan, lambda: masks)

    check_late(step_of, late, VOCABULARY)


@GRAPHS
def test_states_of_the_step_before_would_show(tmp_path: Path, graph_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If states are not stored, the tokens differ."""
    recur = reference.recur

    def forgets(mixed: Any, a: Any, b: Any, weights: Any, shape: Any, table: Any, rows: Any) -> Any:
        return recur(mixed, a, b, weights, shape, table.clone(), rows)

    monkeypatch.setattr(reference, "recur", forgets)
    with runner_of(tmp_path, "qwen3.5-text", graph_rows) as runner:
        requests = test_recurrent.served(runner)
    assert [request.tokens for request in requests] != [tokens for tokens, _ in expected("qwen3.5-text")]
