"""Models that transformers' code computes inside the hand give the tokens of `generate`, however prompts are cut."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forebay.attention.states import StatePiece
from forebay.protocol.plan import Plan
from forebay.runner.runner import ModelRunner
from forebay.state.checks import PlanError
from forebay.state.recurrent import SlotStates
from forebay.weights.errors import ModelError, UnsupportedModelError
from tests.hand.called_models import ARCHITECTURES, PLAIN, VOCABULARY, WITH_STATES, called_runner, calls_of, model_of
from tests.hand.late_masks import PATTERN, Late, Step, check_late
from tests.hand.support import EVERYTHING, MiniBrain, PlanBuilder, Request, Sampling

COUNT = 12
TOLERANCE = {"states": 1e-3, "attention": 1e-4}
"""Recurrent layers add in another order if their input comes in chunks."""
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0 + 0.2 * at for at in range(8)],
    "long_factor": [3.0 + 0.5 * at for at in range(8)],
}
QUICK = ("gemma2", "gpt_oss", "llama4_text", "gemma4_text", "mimo_v2_flash", "qwen3_5_text", "granitemoehybrid")
"""Architectures that have a cap, sinks, chunks, layers of different shapes, or states."""


def prompts() -> list[list[int]]:
    random = np.random.default_rng(5)
    return [random.integers(5, VOCABULARY - 8, length).tolist() for length in (3, 29, 1, 13)]


def reference(model: Any, prompt: list[int], **more: Any) -> tuple[list[int], torch.Tensor]:
    """The greedy tokens of transformers with its eager attention, and their log-probabilities."""
    ask = {"max_new_tokens": COUNT, "min_new_tokens": COUNT, "do_sample": False, "pad_token_id": 0}
    more |= {"eos_token_id": None, "return_dict_in_generate": True, "output_logits": True}
    given = model.generate(torch.tensor([prompt]), **ask, **more)
    return given.sequences[0, len(prompt) :].tolist(), torch.cat(given.logits).log_softmax(-1)


@cache
def known(name: str) -> tuple[Any, list[tuple[list[int], torch.Tensor]]]:
    model = model_of(name)
    return model, [reference(model, prompt) for prompt in prompts()]


def fill_with_nan(runner: ModelRunner) -> None:
    """Fills all pages with NaN, so that reading an unwritten position shows in the result."""
    for layer in runner.kv.layers:
        for pool in layer:
            pool.fill_(torch.nan)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES]
)
def test_tokens_and_logprobs_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, wanted = known(name)
    runner = called_runner(model, tmp_path)
    fill_with_nan(runner)
    requests = [Request(prompt, COUNT, Sampling(logprobs=5), arrival=2 * at) for at, prompt in enumerate(prompts())]
    MiniBrain(runner, lookahead=1).serve(requests, chunk=7)
    tolerance = TOLERANCE["states" if name in WITH_STATES else "attention"]
    for request, (tokens, logprobs) in zip(requests, wanted, strict=True):
        assert request.tokens == tokens
        for (_, values), token, distribution in zip(request.logprobs, tokens, logprobs, strict=True):
            assert abs(values[0] - distribution[token]) < tolerance
            np.testing.assert_allclose(values[1:], distribution.topk(5).values, atol=tolerance)


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_5_text"])
@pytest.mark.parametrize("device", ["cpu", "deferred"])
@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.slow), 5, 1000])
def test_chunks_do_not_change_tokens(name: str, device: str, chunk: int, tmp_path: Path) -> None:
    model, wanted = known(name)
    runner = called_runner(model, tmp_path, device=device)
    runner.warm_up()
    requests = [Request(prompt, COUNT, arrival=at) for at, prompt in enumerate(prompts())]
    MiniBrain(runner, chunk, lookahead=1).serve(requests, chunk)
    assert [request.tokens for request in requests] == [tokens for tokens, _ in wanted]


def test_log_probabilities_of_prompts_come_from_the_models_own_head(tmp_path: Path) -> None:
    model, _ = known("gemma2")
    runner = called_runner(model, tmp_path)
    request = Request(prompts()[1], 1, prompt_logprobs=0)
    MiniBrain(runner).serve([request], chunk=11)
    with torch.no_grad():
        logits = model(torch.tensor([request.prompt])).logits[0].log_softmax(-1)
    wanted = [float(logits[at, token]) for at, token in enumerate(request.prompt[1:])]
    np.testing.assert_allclose([values[0] for _, _, values in request.of_prompt], wanted, atol=1e-4)


def test_a_row_goes_on_where_its_states_are_and_nowhere_else(tmp_path: Path) -> None:
    model, wanted = known("qwen3_5_text")
    runner = called_runner(model, tmp_path)
    request = Request(prompts()[1], COUNT)
    MiniBrain(runner).serve([request])
    assert request.tokens == wanted[1][0]
    states = runner.states
    assert states is not None
    seen = len(request.prompt) + COUNT - 1
    for start in (seen - 1, seen + 1):
        with pytest.raises(PlanError, match=f"slot {request.slot} begins at position {start}"):
            states.read(_row(request.slot, start))
    (row,) = _pieces(states, _row(request.slot, seen))
    assert row.source == row.target, "a row without a mask copies no state"
    # Only the last position of a masked row may be computed again.
    _, ahead = _pieces(states, _row(request.slot, seen + 1, 3, masked=True))
    assert ahead.source != ahead.target
    for _ in range(2):
        (again,) = _pieces(states, _row(request.slot, seen + 3, masked=True))
        assert again == ahead._replace(first=0)
    with pytest.raises(PlanError, match=f"begins at position {seen + 1}"):
        states.read(_row(request.slot, seen + 1))
    assert _pieces(states, _row(request.slot, seen + 4))[0].source == again.target


def _pieces(states: SlotStates, plan: Plan) -> list[StatePiece]:
    return list(states.read(plan).pieces(np.zeros(1, np.int64), plan.rows[:, 2].astype(np.int64)))


def _row(slot: int, start: int, length: int = 1, masked: bool = False) -> Plan:
    builder = PlanBuilder()
    builder.row(slot, start, length, masked=masked)
    return builder.build()


def test_a_prefix_goes_on_from_a_kept_state(tmp_path: Path) -> None:
    model, _ = known("qwen3_5_text")
    runner = called_runner(model, tmp_path, page_size=16)
    prefix = (prompts()[1] * 2)[:32]
    first = PlanBuilder(1)
    first.slot(0, prefix)
    first.page_writes += [(0, 0, 7), (0, 1, 3)]
    first.row(0, 0, 32, sample=False)
    first.state_saves.append((0, 4))
    runner.step(first.build())
    second = PlanBuilder(2)
    for slot, token in ((1, 9), (2, 77)):
        second.slot(slot, [*prefix, token])
        second.page_writes += [(slot, 0, 7), (slot, 1, 3), (slot, 2, 8 + slot)]
        second.row(slot, 32, 1)
        second.state_loads.append((slot, 4))
    found = runner.step(second.build()).tokens.tolist()
    assert found == [reference(model, [*prefix, token])[0][0] for token in (9, 77)]


@pytest.mark.parametrize("name", ["gemma2", "qwen3_5_text"])
@PATTERN
def test_a_row_whose_mask_is_late_says_the_same_later(name: str, late: Late, tmp_path: Path) -> None:
    """If the mask of a whole prompt is late, only its last position is computed again, from the states before it."""

    def step_of() -> Step:
        runner = called_runner(known(name)[0], tmp_path)
        return lambda plan, masks: runner.step(plan, lambda: masks)

    check_late(step_of, late, VOCABULARY)


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_5_text"])
def test_penalties_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, _ = known(name)
    requests = [Request(prompt, COUNT, Sampling(repetition_penalty=1.4)) for prompt in prompts()]
    MiniBrain(called_runner(model, tmp_path), lookahead=1).serve(requests, chunk=7)
    assert [request.tokens for request in requests] == [
        reference(model, prompt, repetition_penalty=1.4)[0] for prompt in prompts()
    ]


def test_a_seed_and_every_parameter_say_the_same_in_any_company(tmp_path: Path) -> None:
    model, _ = known("qwen3_5_text")
    runner = called_runner(model, tmp_path)

    def asked() -> list[Request]:
        return [
            Request(prompt, COUNT, replace(EVERYTHING, seed=at, min_total=0)) for at, prompt in enumerate(prompts())
        ]

    together, alone = asked(), asked()
    MiniBrain(runner, lookahead=1).serve(together, chunk=7)
    for request in alone:
        MiniBrain(runner).serve([request])
    assert [request.tokens for request in together] == [request.tokens for request in alone]


@pytest.mark.parametrize(("context", "prompt"), [(96, 29), (16, 3)])
def test_rotary_frequencies_follow_the_context_and_no_request(context: int, prompt: int, tmp_path: Path) -> None:
    """The context length of a server chooses one of two sets of frequencies, so other requests have no influence.

    transformers chooses for each request: the short set up to 16 tokens, the long set beyond.
    """
    model = model_of("phi3", rope_parameters=LONG_ROPE, original_max_position_embeddings=16)
    runner = called_runner(model, tmp_path, context_length=context)
    most = min(COUNT, context - prompt)
    asked = Request(prompts()[0] if prompt == 3 else prompts()[1], most)
    MiniBrain(runner, lookahead=1).serve([asked, Request(prompts()[0], most), Request([9], most)], chunk=7)
    assert asked.tokens == reference(model, asked.prompt)[0][:most]
    short = [Request(prompts()[0], most) for _ in range(2)]
    MiniBrain(runner).serve(short[:1])
    MiniBrain(runner).serve([short[1], Request(prompts()[1][: context - most], most)])
    assert short[0].tokens == short[1].tokens


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bloom", "has an attention of its own"),
        ("falcon", "has an attention of its own"),
        ("mpt", "has an attention of its own"),
        ("doge", "makes an attention mask of its own"),
        ("deepseek_v4", "needs more than attention and states provide"),
        ("deepseek_v32", "needs more than attention and states provide"),
        ("minimax_m3_vl_text", "needs more than attention and states provide"),
        ("inkling_text", "passes the argument position_bias to attention"),
        ("bert", "attends to positions behind its own"),
    ],
)
def test_a_probe_refuses_what_keeps_more_than_pages_and_states(name: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        calls_of(name, tmp_path)


def test_a_probe_finds_shapes_and_arguments(tmp_path: Path) -> None:
    found = calls_of("gemma4_text", tmp_path)
    assert {(shape.heads, shape.key_size, shape.value_size) for shape in found.kept} == {(2, 16, 16), (2, 32, 32)}
    assert found.uses == ("window",)
    assert found.state_bytes == 0
    assert calls_of("gpt_oss", tmp_path).uses == ("sinks", "window")
    assert calls_of("gemma2", tmp_path).uses == ("cap", "window")
    assert calls_of("llama4_text", tmp_path).uses == ("chunk",)
    mixed = calls_of("qwen3_5_text", tmp_path)
    assert len(mixed.kept) == 2
    # Two layers, each with the last inputs of a convolution in bfloat16 and a float32 state of four heads.
    assert mixed.state_bytes == 2 * (2 * 128 * 4 + 4 * 4 * 16 * 16)


def test_weights_that_a_checkpoint_lacks_are_named(tmp_path: Path) -> None:
    model, _ = known("gemma2")
    runner = called_runner(model, tmp_path)
    weights = dict(model.state_dict())
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ModelError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        runner.model.load_weights(weights.items())


def test_what_there_is_not_is_refused(tmp_path: Path) -> None:
    model, _ = known("qwen3_5_text")
    for changes, what in (
        ({"world_size": 2}, "ranks"),
        ({"attention_backend": "triton"}, "attention backend triton"),
        ({"host_ratio": 2.0}, "for whose states there is no host tier"),
        ({"quantization": "w8a8_int8"}, "quantization w8a8_int8"),
    ):
        with pytest.raises(ValueError, match=what):
            called_runner(model, tmp_path, **changes)


assert set(QUICK) <= {*PLAIN, *WITH_STATES}
