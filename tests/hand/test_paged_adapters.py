"""Adapters in steps whose plans the device reads: the tokens of merged models, with and without graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forebay.compute.graphs import Size
from forebay.compute.paged import PagedSteps
from forebay.gpu import reference
from forebay.gpu.choose import VARIABLE
from forebay.protocol.constants import PLACE_FAILED_DIGEST, PLACE_OK
from forebay.runner.runner import ModelRunner
from forebay.state.slots import PlanError
from tests.hand.greedy import COUNT, model_of, prompts
from tests.hand.support import MiniBrain, Request, Sampling, greedy_reference, runner_of
from tests.hand.test_adapters import LORA, bring, write

GRAPHS = pytest.mark.parametrize("graph_rows", [0, 6], ids=["eager", "graphs"])


@pytest.fixture(autouse=True)
def _twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "reference")


def paged(family: str, graph_rows: int, **changes: Any) -> ModelRunner:
    changes = {"max_running_requests": 6, "chunked_prefill_size": 64, "lora": LORA, **changes}
    runner = runner_of(
        model_of(family), device="deferred", attention_backend="triton", graph_rows=graph_rows, **changes
    )
    assert isinstance(runner._steps, PagedSteps)
    runner.warm_up()
    return runner


@GRAPHS
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("family", ["llama", "llama-untied-biases", "qwen3", "gemma2"])
def test_adapters_in_steps_of_a_gpu_are_those_of_merged_models(
    family: str, lookahead: int, graph_rows: int, tmp_path: Path
) -> None:
    base = model_of(family)
    made = [write(tmp_path, base, number) for number in (1, 2, 3)]
    models = [base, *(merged for _, merged in made)]
    runner = paged(family, graph_rows)
    assert bring(runner, [found for found, _ in made]) == [PLACE_OK] * 3
    requests = [Request(prompt, COUNT, Sampling(logprobs=5), place=at % 4 - 1) for at, prompt in enumerate(prompts(6))]
    MiniBrain(runner, lookahead=lookahead).serve(requests, chunk=16)
    for request in requests:
        tokens, logprobs = greedy_reference(models[request.place + 1], request.prompt, COUNT)
        assert request.tokens == tokens
        for (ids, values), distribution in zip(request.logprobs, logprobs, strict=True):
            np.testing.assert_allclose(values, distribution[torch.from_numpy(ids).long()], atol=1e-4)


@GRAPHS
def test_a_place_gets_another_adapter(graph_rows: int, tmp_path: Path) -> None:
    """The former adapter had modules and ranks that the new one lacks. A kept adapter is restored from the host."""
    base = model_of("llama")
    made = [write(tmp_path, base, number) for number in (1, 2, 3)]
    runner = paged("llama", graph_rows)
    prompt = prompts(1)[0]
    for turn, number in enumerate((2, 0, 1, 2)):
        found, merged = made[number]
        assert bring(runner, [found], first=10 * turn) == [PLACE_OK]
        for place, model in ((0, merged), (-1, base)):
            request = Request(prompt, COUNT, place=place)
            MiniBrain(runner, seed=turn).serve([request], slots=[0])
            assert request.tokens == greedy_reference(model, prompt, COUNT)[0]


def test_a_place_without_an_adapter_is_an_error_of_the_plan(tmp_path: Path) -> None:
    base = model_of("llama")
    found, _ = write(tmp_path, base, 1)
    path = Path(found["files"][0])
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    runner = paged("llama", 0)
    assert bring(runner, [found]) == [PLACE_FAILED_DIGEST]
    with pytest.raises(PlanError, match=r"rows of places \[0\], which have no adapter"):
        MiniBrain(runner).serve([Request(prompts(1)[0], COUNT, place=0)])


def test_a_step_of_the_base_does_the_work_of_a_hand_without_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, calls = model_of("llama"), 0
    add_low_rank = reference.add_low_rank

    def counted(*args: Any) -> None:
        nonlocal calls
        calls += 1
        add_low_rank(*args)

    monkeypatch.setattr(reference, "add_low_rank", counted)
    runner = paged("llama", 0)
    bring(runner, [write(tmp_path, base, 1)[0]])
    MiniBrain(runner).serve([Request(prompts(1)[0], COUNT)])
    assert calls == 0
    MiniBrain(runner).serve([Request(prompts(1)[0], 1, place=0)])
    # Each of three layers has four products: queries with keys and values, outputs, gates with ups, and downs.
    assert calls == 4 * 3
    graphs = paged("llama", 6)._steps.graphs
    assert graphs is not None
    assert graphs.fit(3, 3) == Size(4, 4, mixed=False)
    assert graphs.fit(3, 3, adapted=True) == Size(4, 4, mixed=False, adapted=True)
    assert "each with adapters and without" in str(graphs)
    assert "4 decode rows with adapters" in {str(size) for size in graphs.sizes}


def test_the_memory_of_places_is_what_is_told() -> None:
    runner = paged("llama", 0)
    assert runner._stacks is not None
    held = sum(stack.nbytes for stack in runner._stacks._stacks.values())
    assert held == runner.facts()["lora_bytes"] > 0
