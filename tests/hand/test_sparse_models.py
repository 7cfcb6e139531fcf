"""Models that choose the positions they attend to, against transformers, for any chunks, batches and pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from forebay.attention.cpu import CpuAttention
from forebay.compute.eager import TorchCompute
from forebay.compute.rows import Launch
from forebay.runner.runner import ModelRunner
from forebay.state.config import RunnerConfig
from forebay.weights.errors import ModelError
from tests.hand.greedy import COUNT, expected, model_of, prompts
from tests.hand.support import (
    DEVICES,
    FAMILIES,
    INDEXED,
    MiniBrain,
    PlanBuilder,
    Request,
    Sampling,
    greedy_reference,
    hf_config,
    hub_weights,
    reference_model,
    runner_of,
    wire_config,
)
from tests.index_margins import lower_positions, margins, margins_along, watched

TOP_K = INDEXED["index_topk"]
SPARSE = [family for family in FAMILIES if family.startswith(("deepseek-v32", "glm-dsa"))]


@pytest.mark.parametrize("family", SPARSE)
def test_the_reference_has_no_tie_where_it_is_compared(family: str) -> None:
    """For equal scores transformers chooses arbitrarily, so the tokens after them could not be compared."""
    texts = [prompt + tokens for prompt, tokens in zip(prompts(10), expected(family), strict=True)]
    found = [margin for text in texts for margin in margins_along(model_of(family), text)]
    assert len(found) > 300
    assert min(found) > 1e-6
    assert sum(len(prompt) > 2 * TOP_K for prompt in prompts(10)) > 5


def differences(family: str, runner: ModelRunner) -> float:
    """The largest difference of log-probabilities of the five likeliest tokens. It is infinite if tokens differ."""
    requests = [Request(prompt, COUNT, Sampling(logprobs=5)) for prompt in prompts(3)]
    MiniBrain(runner).serve(requests)
    most = 0.0
    for request in requests:
        tokens, logprobs = greedy_reference(model_of(family), request.prompt, COUNT)
        if request.tokens != tokens:
            return float("inf")
        for (ids, values), distribution in zip(request.logprobs, logprobs, strict=True):
            most = max(most, float(np.abs(values - distribution[torch.from_numpy(ids).long()].numpy()).max()))
    return most


def changed(family: str, **changes: Any) -> ModelRunner:
    """A runner of the family's weights with another config."""
    model = model_of(family)
    config = wire_config(hf_config(model.config, type(model).__name__) | changes)
    runner = ModelRunner(RunnerConfig.from_dict(config))
    runner.model.load_weights(hub_weights(model).items())
    return runner


@pytest.mark.parametrize("family", SPARSE)
def test_the_wrong_rotation_is_noticed(family: str) -> None:
    assert differences(family, changed(family)) < 1e-4
    assert differences(family, changed(family, indexer_rope_interleave=family == "deepseek-v32")) > 0.01


@pytest.mark.parametrize("family", SPARSE)
def test_another_number_of_positions_is_noticed(family: str) -> None:
    for top_k in (TOP_K - 1, TOP_K + 1, 1000):
        assert differences(family, changed(family, index_topk=top_k)) > 0.01


def test_sharing_another_layers_choice_is_noticed() -> None:
    family = "glm-dsa"
    shared = {"indexer_types": ["full", "full", "full", "shared"]}
    with pytest.raises(
        ModelError, match=r"model\.layers\.3\.self_attn\.indexer\.wq_b\.weight, which the model does not"
    ):
        changed(family, **shared)
    runner = changed(family)
    # The last layer uses the choice of the layer before.
    runner.decoder.blocks[3].attention._indexer = None  # type: ignore[union-attr]
    assert differences(family, runner) > 0.01


@pytest.mark.parametrize("device", ["cpu", "deferred"])
def test_choosing_everything_gives_what_latent_attention_gives(device: str) -> None:
    """The index and the gathered rows are used, also for queries with fewer positions than they may keep."""
    model = model_of("deepseek-v32")
    dense = reference_model("deepseek-v3")
    weights = {name: tensor for name, tensor in model.state_dict().items() if ".indexer." not in name}
    dense.load_state_dict(weights)
    config = wire_config(hf_config(model.config, "DeepseekV32ForCausalLM") | {"index_topk": 96}, device=device)
    runner = ModelRunner(RunnerConfig.from_dict(config))
    runner.model.load_weights(hub_weights(model).items())
    compute = runner._compute
    assert isinstance(compute, TorchCompute)
    assert compute.choose_from == 96
    compute.choose_from = 0
    requests = [Request(prompt, COUNT, Sampling(logprobs=5)) for prompt in prompts(6)]
    MiniBrain(runner).serve(requests, chunk=16)
    for request in requests:
        tokens, logprobs = greedy_reference(dense, request.prompt, COUNT)
        assert request.tokens == tokens
        for (ids, values), distribution in zip(request.logprobs, logprobs, strict=True):
            np.testing.assert_allclose(values, distribution[torch.from_numpy(ids).long()], atol=1e-4)


@DEVICES
def test_of_equal_scores_the_lower_positions_win_however_a_request_is_cut(device: str, lookahead: int) -> None:
    """With one index head every second position scores zero. The reference uses Forebay's rule for ties."""
    kind, config = FAMILIES["deepseek-v32"]
    one = type(config)(**{**config.to_dict(), "index_n_heads": 1})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "one-head", (kind, one))
        model = reference_model("one-head")
    ties = 0
    requests = [Request(prompt, COUNT) for prompt in prompts(5, seed=4)]
    with watched(TOP_K, lower_positions) as seen:
        wanted = [greedy_reference(model, request.prompt, COUNT)[0] for request in requests]
    for scores in seen:
        ties += sum(margin == 0 for margin in margins(scores, TOP_K))
    assert ties > 50
    for chunk, page_size in [(3, 4), (1000, 7)]:
        again = [replace(request, arrival=2 * number) for number, request in enumerate(requests)]
        runner = runner_of(model, device=device, page_size=page_size)
        MiniBrain(runner, chunk, lookahead).serve(again, chunk)
        assert [request.tokens for request in again] == wanted


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", SPARSE)
def test_where_pages_lie_changes_not_a_bit_of_the_logits(
    family: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step has the same rows, so that a hand that moves pages can be compared with one that does not."""
    found: list[list[torch.Tensor]] = []
    logits = TorchCompute.logits

    def watch(self: TorchCompute, launch: Launch) -> torch.Tensor:
        found[-1].append(logits(self, launch))
        return found[-1][-1]

    monkeypatch.setattr(TorchCompute, "logits", watch)
    for seed in range(3):
        found.append([])
        brain = MiniBrain(runner_of(model_of(family), dtype=dtype))
        np.random.default_rng(seed).shuffle(brain.pages)
        requests = [Request(prompt, COUNT, arrival=2 * number) for number, prompt in enumerate(prompts(6))]
        brain.serve(requests, chunk=16)
    first, *others = found
    for other in others:
        assert all(torch.equal(*both) for both in zip(first, other, strict=True))


@DEVICES
@pytest.mark.parametrize("family", ["deepseek-v32", "glm-dsa-shared"])
def test_replay_goes_on_where_it_stopped(family: str, device: str, lookahead: int) -> None:
    runner = runner_of(model_of(family), device=device)
    for kept in (1, COUNT - 1):
        requests = [
            Request(prompt, COUNT, replayed=tokens[:kept])
            for prompt, tokens in zip(prompts(10), expected(family), strict=True)
        ]
        MiniBrain(runner, kept, lookahead).serve(requests)
        assert [request.tokens for request in requests] == expected(family)


@pytest.mark.parametrize("device", ["cpu", "deferred"])
@pytest.mark.parametrize("shared", [4, 8, 16])
def test_a_prefix_shared_by_pages_is_not_computed_again(device: str, shared: int) -> None:
    """A page's index keys are shared too. Prefixes end before and after the first query that chooses."""
    family = "glm-dsa-shared"
    runner = runner_of(model_of(family), device=device)
    prefix = prompts(1, seed=12)[0][:shared]
    assert len(prefix) == shared
    pages = [40, 17, 3, 60][: shared // 4]
    first = PlanBuilder(1)
    first.slot(0, prefix)
    first.page_writes += [(0, index, page) for index, page in enumerate(pages)]
    first.row(0, 0, shared, sample=False)
    runner.step(first.build())
    tails = [[9, 100, 3, 44, 12, 3, 8], [77]]
    second = PlanBuilder(2)
    for slot, tail in enumerate(tails, start=1):
        second.slot(slot, prefix + tail)
        second.page_writes += [(slot, index, page) for index, page in enumerate(pages)]
        second.page_writes += [(slot, len(pages) + index, 70 + 2 * slot + index) for index in range(2)]
        second.row(slot, shared, len(tail))
    tokens = runner.step(second.build()).tokens.tolist()
    assert tokens == [greedy_reference(model_of(family), prefix + tail, 1)[0][0] for tail in tails]


@pytest.mark.parametrize("device", ["cpu", "deferred"])
def test_a_request_that_is_not_finite_leaves_its_neighbours_and_heirs_alone(device: str) -> None:
    model = reference_model("glm-dsa-shared")
    with torch.no_grad():
        model.get_input_embeddings().weight[130] = torch.nan
    runner = runner_of(model, max_total_tokens=64, device=device)
    healthy = list(range(1, 14))
    sick = [7, 130, *range(20, 31)]
    builder = PlanBuilder(1)
    for slot, tokens in enumerate([healthy, sick]):
        builder.slot(slot, tokens)
        builder.page_writes += [(slot, index, 4 * slot + index) for index in range(4)]
        builder.row(slot, 0, len(tokens))
    result = runner.step(builder.build())
    assert result.row_errors.tolist() == [0, 1]
    wanted = greedy_reference(model, healthy, 2)[0]
    assert result.tokens[0] == wanted[0]

    # A new request on the pages of the failed one, beside the healthy one.
    builder = PlanBuilder(2)
    builder.slot(1, healthy)
    builder.page_writes += [(1, index, 4 + index) for index in range(4)]
    builder.row(1, 0, len(healthy))
    builder.row(0, len(healthy), 1)
    result = runner.step(builder.build())
    assert not result.row_errors.any()
    assert result.tokens.tolist() == wanted


def test_a_page_that_nobody_wrote_is_an_error() -> None:
    runner = runner_of(model_of("deepseek-v32"))
    builder = PlanBuilder()
    builder.slot(0, list(range(20)))
    builder.page_writes += [(0, 3, 3), (0, 4, 4)]
    builder.row(0, 12, 8)
    with pytest.raises(IndexError):
        runner.step(builder.build())


@pytest.mark.parametrize("family", SPARSE)
def test_in_bfloat16_only_near_ties_are_chosen_otherwise(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first layer is compared, whose input is the same. A difference there changes later layers' inputs."""
    model = reference_model(family)
    runner = runner_of(model, dtype="bfloat16")
    half = model.to(torch.bfloat16)
    found: list[torch.Tensor] = []
    choose = CpuAttention.choose

    def watch(self: CpuAttention, *given: Any) -> torch.Tensor:
        found.append(choose(self, *given))
        return found[-1]

    monkeypatch.setattr(CpuAttention, "choose", watch)
    kept_of_all = others = 0
    for prompt in [prompt for prompt in prompts(10) if len(prompt) > 2 * TOP_K]:
        found.clear()
        MiniBrain(runner).serve([Request(prompt, 1)])
        with watched(TOP_K) as seen, torch.inference_mode():
            half(input_ids=torch.tensor([prompt]))
        for positions, scores in zip(found[0], seen[0][TOP_K:], strict=True):
            cut = scores.sort(descending=True).values[TOP_K - 1]
            kept = scores[positions]
            others += int((kept < cut).sum())
            kept_of_all += len(kept)
            assert float((cut - kept).max()) < 0.1 * float(scores[scores.isfinite()].std())
    assert others < 0.02 * kept_of_all
