"""Models with recurrent layers: the tokens of transformers, however steps are cut, and states that are loaded."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.described import described
from forebay.state.slots import PlanError
from tests.hand.late_masks import PATTERN, Late, Step, check_late
from tests.hand.recurrent_models import GGUF, MODELS, model_of, save, write_gguf
from tests.hand.support import MiniBrain, PlanBuilder, Request, Sampling, greedy_reference
from tests.hand.test_rust_hand import settings, torch_runner

COUNT = 6
VOCABULARY = 131


def prompts() -> list[list[int]]:
    """Prompts shorter than a convolution, longer than a chunk of the recurrence, and between."""
    random = np.random.default_rng(5)
    return [random.integers(3, VOCABULARY, length).tolist() for length in (1, 2, 17, 70)]


@cache
def expected(name: str) -> list[tuple[list[int], torch.Tensor]]:
    return [greedy_reference(model_of(name), prompt, COUNT) for prompt in prompts()]


def check(name: str, requests: list[Request]) -> None:
    for request, (tokens, logprobs) in zip(requests, expected(name), strict=True):
        assert request.tokens == tokens
        for (ids, values), token, distribution in zip(request.logprobs, tokens, logprobs, strict=False):
            assert ids[0] == token
            np.testing.assert_allclose(values[1:], distribution.topk(5).values, atol=1e-4)


def runner_of(folder: Path, name: str, **changes: Any) -> Any:
    return torch_runner(settings(save(folder / "model", name), **changes))


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_transformers_however_prompts_are_cut(tmp_path: Path, name: str) -> None:
    runner = runner_of(tmp_path, name)
    for chunk in (1, 3, 7, 16, 17, 1000):
        requests = [
            Request(prompt, COUNT, Sampling(logprobs=5), arrival=2 * number) for number, prompt in enumerate(prompts())
        ]
        MiniBrain(runner, chunk, lookahead=1).serve(requests, chunk)
        check(name, requests)


@pytest.mark.parametrize("device", ["cpu", "deferred"])
@pytest.mark.parametrize("name", ["qwen3.5-text", "lfm2", "granite4-h"])
def test_every_cut_gives_the_same_tokens(tmp_path: Path, name: str, device: str) -> None:
    runner = runner_of(tmp_path, name, device=device)
    for chunk in range(1, 18):
        requests = [Request(prompt, COUNT, arrival=number) for number, prompt in enumerate(prompts()[1:])]
        MiniBrain(runner, chunk, lookahead=chunk % 2).serve(requests, chunk)
        assert [request.tokens for request in requests] == [tokens for tokens, _ in expected(name)[1:]]
    again = [
        Request(prompt, COUNT, replayed=tokens[:3])
        for prompt, (tokens, _) in zip(prompts(), expected(name), strict=True)
    ]
    MiniBrain(runner, 3).serve(again, 5)
    assert [request.tokens for request in again] == [tokens for tokens, _ in expected(name)]


@pytest.mark.parametrize("name", GGUF)
def test_gguf_files_are_computed_as_transformers_does(tmp_path: Path, name: str) -> None:
    values = settings(described(write_gguf(tmp_path / "m.gguf", name), tmp_path))
    requests = [Request(prompt, COUNT, Sampling(logprobs=5)) for prompt in prompts()]
    MiniBrain(torch_runner(values)).serve(requests, 17)
    check(name, requests)


def kept_states(runner: Any, prefix: list[int]) -> None:
    """Computes a prefix of 32 tokens on pages 40 and 17, and saves the states at 16 and 32 to state pages 5 and 2."""
    for step, (first, page) in enumerate(((0, 5), (16, 2)), start=1):
        plan = PlanBuilder(step)
        if first == 0:
            plan.slot(0, prefix)
            plan.page_writes += [(0, 0, 40), (0, 1, 17)]
        plan.row(0, first, 16, sample=False)
        plan.state_saves.append((0, page))
        assert runner.launch(plan.build()).collect().tokens.tolist() == []


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5-moe", "lfm2", "granite4-h"])
def test_a_prefix_goes_on_from_a_kept_state(tmp_path: Path, name: str) -> None:
    prefix = prompts()[3][:32]
    runner = runner_of(tmp_path, name)
    kept_states(runner, prefix)
    # Two begin behind the whole prefix, and one behind its first page.
    tails = [[9, 100, 3], [77], [*prefix[16:], 5]]
    plan = PlanBuilder(3)
    for slot, tail in enumerate(tails, start=1):
        start = 16 if len(tail) > 3 else 32
        plan.slot(slot, prefix[:start] + tail)
        pages = [40, 17, 50 + slot] if start == 32 else [40, 60, 61]
        plan.page_writes += [(slot, index, page) for index, page in enumerate(pages)]
        plan.row(slot, start, len(tail))
        plan.state_loads.append((slot, 2 if start == 32 else 5))
    found = runner.launch(plan.build()).collect().tokens.tolist()
    wanted = [greedy_reference(model_of(name), prefix + tail, 1)[0][0] for tail in (*tails[:2], [5])]
    assert found == wanted


@pytest.mark.parametrize(
    ("loads", "start", "error"),
    [
        ([], 32, "slot 1 begins at position 32, and the slot's recurrent states have seen others"),
        ([(1, 5)], 32, "slot 1 begins at position 32, and the slot's recurrent states have seen others"),
        ([(0, 2)], 32, "slot 1 begins at position 32, and the slot's recurrent states have seen others"),
        ([(1, 3)], 32, "state page 3 has no state for slot 1"),
        ([(1, 1 << 20)], 32, "copy of a state: page"),
    ],
)
def test_a_row_without_its_state_is_an_error_of_the_plan(
    tmp_path: Path, loads: list[tuple[int, int]], start: int, error: str
) -> None:
    prefix = prompts()[3][:32]
    runner = runner_of(tmp_path, "qwen3.5-text")
    kept_states(runner, prefix)
    plan = PlanBuilder(3)
    plan.slot(1, [*prefix, 9])
    plan.page_writes += [(1, 0, 40), (1, 1, 17), (1, 2, 3)]
    plan.row(1, start, 1)
    plan.state_loads += loads
    with pytest.raises(PlanError, match=error):
        runner.launch(plan.build())


def test_a_slot_of_another_request_has_no_state(tmp_path: Path) -> None:
    """A new request in a slot whose last one ended at the position where it begins."""
    prefix = prompts()[3][:32]
    runner = runner_of(tmp_path, "lfm2")
    kept_states(runner, prefix)
    plan = PlanBuilder(3)
    plan.slot(0, [*prefix, 9])
    plan.row(0, 32, 1)
    with pytest.raises(PlanError, match="slot 0 begins at position 32"):
        runner.launch(plan.build())


@pytest.mark.parametrize("name", ["qwen3.5-text", "lfm2", "granite4-h"])
@PATTERN
def test_a_row_whose_mask_is_late_says_the_same_later(tmp_path: Path, name: str, late: Late) -> None:
    def step_of() -> Step:
        runner = runner_of(tmp_path, name)
        return lambda plan, masks: runner.step(plan, lambda: masks)

    check_late(step_of, late, VOCABULARY)


@pytest.mark.parametrize(
    ("name", "of_slot"),
    [
        # Three layers: heads of 24 by 40 in 32 bits, and three inputs of 2 * 48 + 240 channels.
        ("qwen3.5-text", 3 * (6 * 24 * 40 * 4 + 3 * 336 * 4)),
        ("lfm2", 3 * 2 * 64 * 4),
        ("granite4-h", 3 * (8 * 24 * 16 * 4 + 3 * (128 + 96) * 4)),
    ],
)
def test_states_are_counted(tmp_path: Path, name: str, of_slot: int) -> None:
    runner = runner_of(tmp_path, name, state_pages=5)
    facts = runner.facts()
    assert (facts["state_bytes"], facts["state_page_count"]) == (of_slot, 5)
    held = sum(table.nbytes for layer in runner._store.layers for table in layer if table is not None)
    assert held == (2 * 8 + 5) * of_slot
    assert len(runner.kv.layers) == 1, "recurrent layers have no pages"
    # With memory enough each slot may have eight.
    assert runner_of(tmp_path, name).facts()["state_page_count"] == 64
    none = runner_of(tmp_path, name, state_pages=0)
    assert none.facts()["state_page_count"] == 0
