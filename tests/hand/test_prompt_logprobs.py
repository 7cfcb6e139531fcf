"""Log-probabilities of prompts equal those of transformers, for any chunks, and never need all logits in memory."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forebay.compute import prompts as prompts_module
from forebay.compute.prompts import slice_bytes, slice_rows
from forebay.gpu.choose import VARIABLE
from forebay.runner.measured import largest_plans
from forebay.runner.runner import ModelRunner
from forebay.state.slots import PlanError
from tests.hand.greedy import model_of
from tests.hand.support import DEVICES, FAMILIES, MiniBrain, PlanBuilder, Request, Sampling, runner_of

VOCABULARY = 131
TOP = 5
SLICE = 7
"""Positions in a slice in these tests. It is small, so that prompts have several slices."""


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts_module, "SLICE_BYTES", 4 * VOCABULARY * SLICE)
    assert slice_rows(VOCABULARY) == SLICE


def requests(count: int = 6, generate: int = 3, **changes: Any) -> list[Request]:
    """Requests for log-probabilities of their prompts, except number 5. Some prompts have a single token."""
    random = np.random.default_rng(5)
    lengths = [40, 1, 23, 2, 57, 31, 60, 9][:count]
    prompts = [random.integers(0, VOCABULARY, length).tolist() for length in lengths]
    return [
        Request(prompt, generate, arrival=number, prompt_logprobs=-1 if number == 5 else TOP - number % 3, **changes)
        for number, prompt in enumerate(prompts)
    ]


@cache
def expected(family: str) -> list[torch.Tensor]:
    """Log-probabilities [length, vocabulary] at each position of the prompts."""
    with torch.inference_mode():
        logits = [model_of(family)(torch.tensor([r.prompt])).logits[0] for r in requests(8)]
    return [of_prompt.float().log_softmax(-1) for of_prompt in logits]


def check(found: list[Request], family: str, atol: float = 1e-4) -> None:
    for request, logprobs in zip(found, expected(family), strict=False):
        wanted = request.prompt[1:] if request.prompt_logprobs >= 0 else []
        assert len(request.of_prompt) == len(wanted)
        for token, (rank, ids, values), distribution in zip(wanted, request.of_prompt, logprobs, strict=False):
            assert rank == 1 + int((distribution > distribution[token]).sum())
            assert ids[0] == token
            assert ids[1:].tolist() == distribution.topk(request.prompt_logprobs).indices.tolist()
            np.testing.assert_allclose(values, distribution[ids.tolist()], atol=atol)


@DEVICES
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_and_values_are_those_of_transformers(family: str, device: str, lookahead: int) -> None:
    found = requests()
    MiniBrain(runner_of(model_of(family), device=device), lookahead=lookahead).serve(found, chunk=16)
    check(found, family)


@cache
def whole(family: str) -> list[list[int]]:
    found = requests(8)
    MiniBrain(runner_of(model_of(family))).serve(found)
    return [request.tokens for request in found]


@pytest.mark.parametrize("chunk", [1, 3, 16])
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "deepseek-v32"])
def test_chunks_and_mixed_batches_change_nothing(family: str, lookahead: int, chunk: int) -> None:
    found = requests(8)
    MiniBrain(runner_of(model_of(family)), chunk, lookahead).serve(found, chunk)
    assert [request.tokens for request in found] == whole(family)
    check(found, family)


def test_beside_rows_that_are_sampled_in_every_way() -> None:
    found = requests(8, sampling=Sampling(temperature=0.8, top_k=5, seed=3, logprobs=2))
    MiniBrain(runner_of(model_of("llama"))).serve(found, chunk=16)
    check(found, "llama")
    assert all(len(ids) == 3 for request in found for ids, _ in request.logprobs)
    silent = requests(8, sampling=Sampling(temperature=0.8, top_k=5, seed=3, logprobs=2))
    for request in silent:
        request.prompt_logprobs = -1
    MiniBrain(runner_of(model_of("llama"))).serve(silent, chunk=16)
    assert [request.tokens for request in silent] == [request.tokens for request in found]


@pytest.mark.parametrize("graph_rows", [0, 6], ids=["eager", "graphs"])
@pytest.mark.parametrize("family", ["llama", "glm4-moe", "deepseek-v3"])
def test_steps_whose_plans_the_device_reads(family: str, graph_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "reference")
    found = requests(8)
    changes: Any = {"max_running_requests": 8, "chunked_prefill_size": 64, "graph_rows": graph_rows}
    runner = runner_of(model_of(family), device="deferred", attention_backend="triton", **changes)
    runner.warm_up()
    MiniBrain(runner, 1, 1).serve(found, chunk=9)
    check(found, family)
    assert [request.tokens for request in found] == whole(family)


class Watch(TorchDispatchMode):
    """Records the largest number of rows of a tensor as wide as the vocabulary."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        for tensor in given if isinstance(given, tuple | list) else [given]:
            if isinstance(tensor, torch.Tensor) and tensor.ndim > 1 and tensor.shape[-1] == VOCABULARY:
                self.most = max(self.most, tensor.numel() // VOCABULARY)
        return given


@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "deepseek-v3"])
def test_no_step_has_the_logits_of_all_positions(family: str) -> None:
    runner = runner_of(model_of(family))
    builder = PlanBuilder(1)
    for slot, request in enumerate(requests(3)):
        builder.slot(slot, request.prompt)
        builder.page_writes += [(slot, index, 20 * slot + index) for index in range(20)]
        builder.row(slot, 0, len(request.prompt))
        if slot != 1:
            builder.prompt_logprobs.append((slot, 1, len(request.prompt) - 1, TOP))
    # The first step arranges the weights, so it runs before the measurement.
    runner.warm_up()
    with Watch() as watch:
        result = runner.step(builder.build())
    assert len(result.prompt_ranks) == 39 + 22
    assert watch.most == SLICE, "61 positions and 3 sampled rows are computed in slices"


def test_a_slice_is_bounded_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for vocabulary in (100, 49_152, 151_936, 10**9):
        rows = slice_rows(vocabulary)
        assert rows == 1 or 4 * vocabulary * rows <= 1 << 25
        assert slice_bytes(vocabulary, 8192) >= 4 * vocabulary * min(rows, 8192)
        assert slice_bytes(vocabulary, 1) < 100 * vocabulary
    config = runner_of(model_of("llama")).config
    wants = [plan.prompt_logprobs[:, 2].sum() for plan in largest_plans(config, 1)]
    assert wants == [config.slots * config.context_length, 0], "one plan fills the step, the other asks for none"
    assert not any(len(plan.prompt_logprobs) for plan in largest_plans(config, 2))


def test_logits_that_are_not_finite_are_the_row_s_error() -> None:
    runner = runner_of(model_of("qwen3-moe"))
    runner.decoder.embedding[7] = torch.nan
    builder = PlanBuilder(1)
    for slot, prompt in enumerate([[3, 7, 5], [3, 4, 5]]):
        builder.slot(slot, prompt)
        builder.page_writes.append((slot, 0, slot))
        builder.row(slot, 0, 2, sample=False)
        builder.prompt_logprobs.append((slot, 1, 2, 0))
    result = runner.step(builder.build())
    assert result.row_errors.tolist() == [1, 0]
    assert len(result.prompt_ranks) == len(result.prompt_ids) == 4


def test_more_than_there_are_is_refused() -> None:
    runner: ModelRunner = runner_of(model_of("llama"))
    builder = PlanBuilder(1)
    builder.slot(0, [3, 4])
    builder.page_writes.append((0, 0, 0))
    builder.row(0, 0, 2)
    builder.prompt_logprobs.append((0, 1, 1, VOCABULARY + 1))
    with pytest.raises(PlanError, match="132 most likely tokens of a vocabulary of 131"):
        runner.step(builder.build())
