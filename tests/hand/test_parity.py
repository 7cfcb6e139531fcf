"""Tokens and log-probabilities against transformers. Tokens do not depend on chunks, batches, pages or slots."""

from functools import cache

import numpy as np
import pytest
import torch

from forebay.runner.runner import ModelRunner
from forebay.state.config import RunnerConfig
from forebay.weights.errors import ModelError
from tests.hand.greedy import COUNT, expected, model_of, prompts
from tests.hand.support import (
    DEVICES,
    FAMILIES,
    MiniBrain,
    PlanBuilder,
    Request,
    Sampling,
    greedy_reference,
    hf_config,
    reference_model,
    runner_of,
    wire_config,
)


@DEVICES
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_and_logprobs_are_those_of_transformers(family: str, device: str, lookahead: int) -> None:
    model = model_of(family)
    requests = [Request(prompt, COUNT, Sampling(logprobs=5)) for prompt in prompts(4)]
    MiniBrain(runner_of(model, device=device), lookahead=lookahead).serve(requests)
    for request in requests:
        tokens, logprobs = greedy_reference(model, request.prompt, COUNT)
        assert request.tokens == tokens
        for (ids, values), token, distribution in zip(request.logprobs, tokens, logprobs, strict=True):
            assert ids[0] == token
            assert len(ids) == 6
            top = distribution.topk(5)
            assert ids[1:].tolist() == top.indices.tolist()
            np.testing.assert_allclose(values[1:], top.values, atol=2e-5)
            assert values[0] == values[1]


@DEVICES
@pytest.mark.parametrize(
    "family",
    [
        *("llama", "qwen3", "gemma2", "gemma3", "qwen3-moe", "glm4-moe"),
        *("deepseek-v2", "deepseek-v3", "deepseek-v32", "glm-dsa-shared"),
    ],
)
@pytest.mark.parametrize("chunk", [1, 3, pytest.param(16, marks=pytest.mark.slow), 1000])
def test_chunks_and_mixed_batches_do_not_change_tokens(family: str, chunk: int, device: str, lookahead: int) -> None:
    requests = [Request(prompt, COUNT, arrival=2 * i) for i, prompt in enumerate(prompts(10))]
    MiniBrain(runner_of(model_of(family), device=device), chunk, lookahead).serve(requests, chunk)
    assert [request.tokens for request in requests] == expected(family)


@DEVICES
@pytest.mark.parametrize(
    "family",
    ["llama-llama3", "gemma3", "qwen3-moe", "glm4-moe", "deepseek-v2", "deepseek-v3", "deepseek-v32", "glm-dsa-shared"],
)
@pytest.mark.parametrize("page_size", [1, pytest.param(4, marks=pytest.mark.slow), 7, 16])
def test_pages_and_slots_do_not_change_tokens(page_size: int, family: str, device: str, lookahead: int) -> None:
    runner = runner_of(model_of(family), page_size=page_size, max_total_tokens=2000, device=device)
    requests = [Request(prompt, COUNT) for prompt in prompts(10)]
    MiniBrain(runner, page_size, lookahead).serve(requests, chunk=16)
    assert [request.tokens for request in requests] == expected(family)


@DEVICES
def test_replay_goes_on_where_it_stopped(device: str, lookahead: int) -> None:
    runner = runner_of(model_of("qwen2"), device=device)
    for kept in (1, 5, COUNT - 1):
        requests = [
            Request(prompt, COUNT, replayed=tokens[:kept])
            for prompt, tokens in zip(prompts(10), expected("qwen2"), strict=True)
        ]
        MiniBrain(runner, kept, lookahead).serve(requests)
        assert [request.tokens for request in requests] == expected("qwen2")


@pytest.mark.parametrize("device", ["cpu", "deferred"])
def test_a_prefix_shared_by_pages_is_not_computed_again(device: str) -> None:
    runner = runner_of(model_of("qwen3"), device=device)
    prefix = prompts(1, seed=11)[0][:8]
    assert len(prefix) == 8
    first = PlanBuilder(1)
    first.slot(0, prefix)
    first.page_writes += [(0, 0, 40), (0, 1, 17)]
    first.row(0, 0, 8, sample=False)
    assert runner.step(first.build()).tokens.tolist() == []

    tails = [[9, 100, 3], [77]]
    second = PlanBuilder(2)
    for slot, tail in enumerate(tails, start=1):
        second.slot(slot, prefix + tail)
        second.page_writes += [(slot, 0, 40), (slot, 1, 17), (slot, 2, 50 + slot)]
        second.row(slot, 8, len(tail))
    tokens = runner.step(second.build()).tokens.tolist()
    assert tokens == [greedy_reference(model_of("qwen3"), prefix + tail, 1)[0][0] for tail in tails]


@pytest.mark.parametrize("device", ["cpu", "deferred"])
def test_the_next_plan_reads_tokens_the_brain_has_not_seen(device: str) -> None:
    """Launches two plans before the first result is read, as a lookahead of one does."""
    runner = runner_of(model_of("llama"), device=device)
    prompt = prompts(1, seed=5)[0]
    first = PlanBuilder(1)
    first.slot(3, prompt)
    first.page_writes += [(3, index, index) for index in range(24)]
    first.row(3, 0, len(prompt))
    second = PlanBuilder(2)
    second.row(3, len(prompt), 1)
    launched = [runner.launch(plan) for plan in (first.build(), second.build())]
    tokens = [int(step.collect().tokens[0]) for step in launched]
    assert tokens == greedy_reference(model_of("llama"), prompt, 2)[0]


def invariant(count: int) -> list[Request]:
    """Requests that use all features of the sampler."""
    sampling = [
        Sampling(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.3),
        Sampling(temperature=1.1, top_k=7, seed=3, repetition_penalty=0.8),
        Sampling(temperature=0.9, top_p=0.8, seed=4, frequency_penalty=0.7, logprobs=3),
        Sampling(temperature=1.4, min_p=0.02, top_p=0.95, seed=5, bias=((3, 4.0), (9, -2.0))),
        Sampling(stop_ids=(5, 60, 61), min_total=70, presence_penalty=-0.5, bias=((5, 9.0),)),
        Sampling(logprobs=0),
    ]
    return [
        Request(prompt, COUNT, sampling[number % len(sampling)], arrival=number)
        for number, prompt in enumerate(prompts(count, seed=21))
    ]


@cache
def one_by_one() -> list[list[int]]:
    """The tokens of each request alone. Tokens for penalties are counted again at each token, as after a preemption."""
    runner = runner_of(model_of("llama"), max_total_tokens=8 * 96 * 40)
    brain = MiniBrain(runner)
    found = []
    for request in invariant(14):
        tokens: list[int] = []
        for count in range(1, COUNT + 1):
            again = Request(request.prompt, count, request.sampling, replayed=list(tokens))
            brain.pages = list(range(runner.kv.page_count))
            brain.serve([again])
            tokens = again.tokens
        found.append(tokens)
    return found


@DEVICES
@pytest.mark.parametrize("chunk", [9, 1000])
def test_sampling_depends_on_the_request_alone(chunk: int, device: str, lookahead: int) -> None:
    """Counters are kept by slot, and other requests have used the slots before."""
    requests = invariant(14)
    runner = runner_of(model_of("llama"), device=device, max_total_tokens=8 * 96 * 4)
    MiniBrain(runner, chunk, lookahead).serve(requests, chunk)
    assert [request.tokens for request in requests] == one_by_one()


@pytest.mark.parametrize("device", ["cpu", "deferred"])
def test_context_can_be_filled_to_the_last_position(device: str) -> None:
    runner = runner_of(model_of("llama"), context_length=16, page_size=5, device=device)
    request = Request([3, 14, 15, 92, 65, 35, 89, 79, 32, 38], 7)
    MiniBrain(runner).serve([request])
    assert request.tokens == greedy_reference(model_of("llama"), request.prompt, 7)[0]


@pytest.mark.parametrize("device", ["cpu", "deferred"])
def test_a_request_that_is_not_finite_leaves_its_neighbours_and_heirs_alone(device: str) -> None:
    model = reference_model("llama-mha")
    with torch.no_grad():
        model.get_input_embeddings().weight[130] = torch.nan
    runner = runner_of(model, max_total_tokens=32, device=device)
    healthy, sick = [1, 2, 3, 4, 5, 6], [7, 130, 8]
    builder = PlanBuilder(1)
    for slot, tokens in enumerate([healthy, sick, [*healthy, 7, 8, 9]]):
        builder.slot(slot, tokens)
        builder.page_writes += [(slot, 0, 2 * slot), (slot, 1, 2 * slot + 1), (slot, 2, 6)]
        builder.row(slot, 0, len(tokens))
    result = runner.step(builder.build())
    assert result.row_errors.tolist() == [0, 1, 0]
    assert result.tokens[1] == 0

    # A new request on the pages of the failed one. It decodes beside a longer neighbour, so that it is padded.
    builder = PlanBuilder(2)
    builder.slot(1, [9, 9])
    builder.row(1, 0, 1, sample=False)
    builder.row(2, 9, 1)
    assert not runner.step(builder.build()).row_errors.any()
    builder = PlanBuilder(3)
    builder.row(1, 1, 1)
    builder.row(2, 10, 1)
    result = runner.step(builder.build())
    assert not result.row_errors.any()
    assert result.tokens[0] == greedy_reference(model, [9, 9], 1)[0][0]


def test_bfloat16_diverges_from_transformers_only_at_near_ties() -> None:
    model = reference_model("qwen2")
    runner = runner_of(model, dtype="bfloat16")
    requests = [Request(prompt, COUNT) for prompt in prompts(6)]
    MiniBrain(runner).serve(requests)
    half = model.to(torch.bfloat16)
    for request in requests:
        with torch.inference_mode():
            logits = half(input_ids=torch.tensor([request.prompt + request.tokens[:-1]])).logits[0].float()
        of_ours = logits[len(request.prompt) - 1 :]
        chosen = of_ours.gather(1, torch.tensor(request.tokens)[:, None])[:, 0]
        spread = of_ours.std()
        assert ((of_ours.amax(1) - chosen) < 0.1 * spread).all()


def test_dummy_weights_depend_on_the_seed_alone() -> None:
    config = hf_config(FAMILIES["qwen3"][1], "Qwen3ForCausalLM")

    def tokens(seed: int) -> list[int]:
        runner = ModelRunner(RunnerConfig.from_dict(wire_config(config, seed=seed)))
        counts: list[tuple[int, int]] = []
        runner.load(lambda done, total: counts.append((done, total)))
        assert counts[-1][0] == counts[-1][1] == len(counts)
        runner.warm_up()
        request = Request([1, 2, 3], COUNT)
        MiniBrain(runner).serve([request])
        return request.tokens

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


def test_a_checkpoint_must_fit_the_model() -> None:
    model = model_of("llama-untied-biases")
    runner = runner_of(model)
    weights = dict(model.state_dict())
    with pytest.raises(ModelError, match="lacks 1 of"):
        runner.model.load_weights([(n, t) for n, t in weights.items() if n != "model.norm.weight"])
    with pytest.raises(ModelError, match="does not have"):
        runner.model.load_weights([*weights.items(), ("model.extra", torch.zeros(1))])
    with pytest.raises(ModelError, match="the model wants"):
        runner.model.load_weights([("model.norm.weight", torch.zeros(3))])


def test_a_window_that_no_request_exceeds_is_none() -> None:
    mistral = {**hf_config(FAMILIES["llama"][1], "MistralForCausalLM"), "sliding_window": 64}
    shorter, longer = (
        ModelRunner(RunnerConfig.from_dict(wire_config(mistral, context_length=length))) for length in (64, 65)
    )
    windows = [[kind.window for kind in runner.decoder.config.kinds] for runner in (shorter, longer)]
    assert windows == [[None] * 3, [64] * 3]
