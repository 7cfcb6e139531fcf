"""Models with recurrent layers: the tokens of transformers for any chunks, and states that are saved and loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from benchmarks.described import described
from forebay.state.slots import PlanError
from tests.hand.late_masks import PATTERN, Late, Step, check_late
from tests.hand.recurrent_models import COMPILED, GGUF, MODELS, model_of, save, write_gguf
from tests.hand.support import MiniBrain, PlanBuilder, Request, Sampling, greedy_reference
from tests.hand.test_rust_hand import rust, settings, torch_runner

COUNT = 6
HANDS = pytest.mark.parametrize("hand", ["torch", "rust"])
VOCABULARY = 131
NEAR = 0.25
"""With rounding to few bits, log-probabilities may differ by this much. That of the likeliest token is about -3."""
Q8_0 = gguf.GGMLQuantizationType.Q8_0


def of_hands(names: Iterable[str]) -> Any:
    """Parameters of tests: each model with each hand that computes it."""
    found = [(name, hand) for name in names for hand in ("torch", "rust") if hand == "torch" or name in COMPILED]
    return pytest.mark.parametrize(("name", "hand"), found)


def prompts() -> list[list[int]]:
    """Prompts shorter than a convolution, longer than a chunk of the recurrence, and of lengths in between."""
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
            np.testing.assert_allclose(values[1:], distribution.topk(5).values, rtol=2e-5, atol=1e-4)


@contextmanager
def runner_of(folder: Path, name: str, hand: str = "torch", **changes: Any) -> Iterator[Any]:
    values = settings(save(folder / "model", name), **changes)
    if hand == "rust":
        with rust(folder, values) as runner:
            yield runner
    else:
        yield torch_runner(values)


@of_hands(MODELS)
def test_tokens_are_those_of_transformers_however_prompts_are_cut(tmp_path: Path, name: str, hand: str) -> None:
    with runner_of(tmp_path, name, hand) as runner:
        for chunk in (1, 3, 7, 16, 17, 1000):
            requests = [
                Request(prompt, COUNT, Sampling(logprobs=5), arrival=2 * number)
                for number, prompt in enumerate(prompts())
            ]
            MiniBrain(runner, chunk, lookahead=1).serve(requests, chunk)
            check(name, requests)


@pytest.mark.parametrize(
    ("name", "dtype", "quantization"),
    [
        *((name, "float32", None) for name in ("qwen3.5-text", "qwen3-next", "lfm2-biases", "granite4-h")),
        *((name, "float32", None) for name in ("nemotron-h", "nemotron-3-latent", "falcon-h1-norm")),
        *((name, "bfloat16", None) for name in ("qwen3.5-moe", "nemotron-3", "falcon-h1")),
        ("lfm2", "bfloat16", "w8a8_int8"),
    ],
)
def test_the_rust_hand_gives_the_same_bits_in_any_batch_and_cut(
    tmp_path: Path, name: str, dtype: str, quantization: str | None
) -> None:
    """Log-probabilities are equal to the last bit: alone, beside others in chunks, on one thread and on three."""
    found: list[list[list[float]]] = []
    for threads in (1, 3):
        changes = {"threads": threads, "dtype": dtype, "quantization": quantization}
        with runner_of(tmp_path, name, "rust", **changes) as runner:
            for chunk in (1000, 1, 5, 17):
                requests = [Request(prompt, COUNT, Sampling(logprobs=5)) for prompt in prompts()]
                if chunk == 1000:
                    for request in requests:
                        MiniBrain(runner, chunk).serve([request], chunk)
                else:
                    MiniBrain(runner, chunk, lookahead=1).serve(requests, chunk)
                found.append([[*values] for request in requests for _, values in request.logprobs])
    assert len(found[0]) == COUNT * len(prompts())
    assert all(one == found[0] for one in found)


def near(rust_: list[Request], torch_: list[Request], bound: float) -> None:
    """Compares tokens up to the first one where two tokens are about equally likely."""
    for ours, theirs in zip(rust_, torch_, strict=True):
        for (ids, values), (wanted_ids, wanted) in zip(ours.logprobs, theirs.logprobs, strict=True):
            likely = dict(zip(wanted_ids[1:].tolist(), wanted[1:], strict=True))
            assert wanted[1] - likely[ids[0]] < bound
            assert abs(values[1] - wanted[1]) < bound
            if ids[0] != wanted_ids[0]:
                break


def served(runner: Any) -> list[Request]:
    requests = [Request(prompt, COUNT, Sampling(logprobs=5)) for prompt in prompts()]
    MiniBrain(runner).serve(requests, 17)
    return requests


@pytest.mark.parametrize(
    "name", ["qwen3.5-text", "lfm2", "lfm2-moe", "granite4-h", "nemotron-h-biases", "nemotron-3-latent", "falcon-h1"]
)
def test_both_hands_are_close_in_bfloat16(tmp_path: Path, name: str) -> None:
    """The hands round at different points, which may also change the choice of experts."""
    values = settings(save(tmp_path / "model", name), dtype="bfloat16")
    with rust(tmp_path, values) as runner:
        found = served(runner)
    near(found, served(torch_runner(values)), NEAR)


@pytest.mark.parametrize("device", ["cpu", "deferred"])
@of_hands(["qwen3.5-text", "lfm2", "granite4-h", "nemotron-h", "nemotron-3", "falcon-h1", "kimi-linear"])
def test_every_cut_gives_the_same_tokens(tmp_path: Path, name: str, hand: str, device: str) -> None:
    if (hand, device) == ("rust", "deferred"):
        pytest.skip("a device of PyTorch's hand")
    with runner_of(tmp_path, name, hand, device=device) as runner:
        check_cuts(name, runner)


def check_cuts(name: str, runner: Any) -> None:
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


@of_hands(GGUF)
def test_gguf_files_are_computed_as_transformers_does(tmp_path: Path, name: str, hand: str) -> None:
    values = settings(described(write_gguf(tmp_path / "m.gguf", name), tmp_path))
    if hand == "rust":
        with rust(tmp_path, values) as runner:
            check(name, served(runner))
    else:
        check(name, served(torch_runner(values)))


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("qwen3.5-text", 3 * 4),
        ("qwen3-next", 3 * 6),
        ("lfm2", 3 * 3),
        ("granite4-h", 3 * 5),
        ("nemotron-h", 4 * 5),
        # Only the first products of two layers' experts have blocks, because the inputs of the others are 24 long.
        ("nemotron-3", 2 * 5 + 2 * 6),
        ("falcon-h1", 3 * (5 + 3)),
    ],
)
def test_blocks_of_a_file_are_computed_as_blocks(tmp_path: Path, name: str, parts: int) -> None:
    """Covers fused projections, whose parts are rows of one tensor, and projections of which a few rows are floats."""
    values = settings(described(write_gguf(tmp_path / "m.gguf", name, Q8_0), tmp_path), quantization="gguf")
    with rust(tmp_path, values) as runner:
        found, blocks = served(runner), runner.facts["blocks"]
    assert int(blocks.split(" Q8_0")[0]) > parts
    near(found, served(torch_runner({**values, "quantization": None})), NEAR)


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


@of_hands(["qwen3-next", "qwen3.5-moe", "lfm2", "granite4-h", "nemotron-h", "nemotron-3", "falcon-h1", "kimi-linear"])
def test_a_prefix_goes_on_from_a_kept_state(tmp_path: Path, name: str, hand: str) -> None:
    with runner_of(tmp_path, name, hand) as runner:
        check_kept(name, runner)


def check_kept(name: str, runner: Any) -> None:
    prefix = prompts()[3][:32]
    kept_states(runner, prefix)
    # Two requests begin after the whole prefix, and one begins after its first page.
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


def refused(runner: Any, plan: PlanBuilder, error: str) -> None:
    """Checks that the hand refuses the plan. The hand in Rust sends the error in a frame."""
    with pytest.raises((PlanError, AssertionError), match=error):
        runner.launch(plan.build()).collect()


@HANDS
@pytest.mark.parametrize(
    ("loads", "start", "error"),
    [
        ([], 32, "slot 1 begins at position 32, and the slot's recurrent states have seen others"),
        ([(1, 5)], 32, "slot 1 begins at position 32, and the slot's recurrent states have seen others"),
        ([(0, 2)], 32, "slot 1 begins at position 32, and the slot's recurrent states have seen others"),
        ([(1, 3)], 32, "state page 3 has no state for slot 1"),
        ([(1, 1 << 20)], 32, "copy of a state: .*page"),
    ],
)
def test_a_row_without_its_state_is_an_error_of_the_plan(
    tmp_path: Path, loads: list[tuple[int, int]], start: int, error: str, hand: str
) -> None:
    prefix = prompts()[3][:32]
    with runner_of(tmp_path, "qwen3.5-text", hand) as runner:
        kept_states(runner, prefix)
        plan = PlanBuilder(3)
        plan.slot(1, [*prefix, 9])
        plan.page_writes += [(1, 0, 40), (1, 1, 17), (1, 2, 3)]
        plan.row(1, start, 1)
        plan.state_loads += loads
        refused(runner, plan, error)


@HANDS
def test_a_slot_of_another_request_has_no_state(tmp_path: Path, hand: str) -> None:
    """A new request gets the slot of another one, which ended at the position where the new one begins."""
    prefix = prompts()[3][:32]
    with runner_of(tmp_path, "lfm2", hand) as runner:
        kept_states(runner, prefix)
        plan = PlanBuilder(3)
        plan.slot(0, [*prefix, 9])
        plan.row(0, 32, 1)
        refused(runner, plan, "slot 0 begins at position 32")


@pytest.mark.parametrize("name", ["qwen3.5-text", "lfm2", "granite4-h", "nemotron-h", "falcon-h1", "kimi-linear"])
@PATTERN
def test_a_row_whose_mask_is_late_says_the_same_later(tmp_path: Path, name: str, late: Late) -> None:
    values = settings(save(tmp_path / "model", name))

    def step_of() -> Step:
        runner = torch_runner(values)
        return lambda plan, masks: runner.step(plan, lambda: masks)

    check_late(step_of, late, VOCABULARY)


@pytest.mark.parametrize("name", ["qwen3.5-text", "lfm2", "granite4-h", "nemotron-h", "falcon-h1", "kimi-linear"])
@PATTERN
def test_the_rust_hand_says_the_same_after_late_masks(tmp_path: Path, name: str, late: Late) -> None:
    values = settings(save(tmp_path / "model", name))
    with ExitStack() as stack:

        def step_of() -> Step:
            runner = stack.enter_context(rust(tmp_path, values))
            return lambda plan, masks: runner.launch(
                plan, masks.encode() if plan.rows[:, 3].max() > 1 else b""
            ).collect()

        check_late(step_of, late, VOCABULARY)


@pytest.mark.parametrize(
    ("name", "of_slot"),
    [
        # Three layers with heads of 24 by 40 in 32 bits, and three inputs of 2 * 48 + 240 channels.
        ("qwen3.5-text", 3 * (6 * 24 * 40 * 4 + 3 * 336 * 4)),
        ("lfm2", 3 * 2 * 64 * 4),
        ("granite4-h", 3 * (8 * 24 * 16 * 4 + 3 * (128 + 96) * 4)),
    ],
)
def test_states_are_counted(tmp_path: Path, name: str, of_slot: int) -> None:
    # A given number, zero, and the default: with enough memory, eight pages for each of the eight slots.
    for given, pages in ((5, 5), (0, 0), (None, 64)):
        with runner_of(tmp_path, name, state_pages=given) as runner:
            facts = runner.facts()
            assert (facts["state_bytes"], facts["state_page_count"]) == (of_slot, pages)
            held = sum(table.nbytes for layer in runner._store.layers for table in layer if table is not None)
            assert held == (2 * 8 + pages + 1) * of_slot, "the tables have one row of padding"
            assert len(runner.kv.layers) == 1, "recurrent layers have no pages"
            assert facts["page_bytes"] == 2 * 16 * 2 * runner.model_config.attention.head_dim * 4
        with runner_of(tmp_path, name, "rust", state_pages=given) as runner:
            ready = runner.facts
            assert (ready["state_bytes"], ready["state_page_count"]) == (of_slot, pages)
            assert ready["page_bytes"] == facts["page_bytes"]
            assert not ready["verifies_drafts"]


@pytest.mark.parametrize(
    ("name", "of_slot", "attending"),
    [
        # Heads of 24 by 20 in 32 bits, and three inputs of 120 + 2 * 48 channels.
        ("nemotron-h", 4 * (6 * 24 * 20 * 4 + 3 * 216 * 4), 1),
        ("falcon-h1", 3 * (6 * 24 * 20 * 4 + 3 * 216 * 4), 3),
        ("kimi-linear", 3 * (3 * 24 * 24 * 4 + 3 * 216 * 4), 2),
    ],
)
def test_layers_have_pages_and_states_by_their_parts(tmp_path: Path, name: str, of_slot: int, attending: int) -> None:
    with runner_of(tmp_path, name, state_pages=5) as runner:
        assert runner.facts()["state_bytes"] == of_slot
        held = sum(table.nbytes for layer in runner._store.layers for table in layer if table is not None)
        assert held == (2 * 8 + 5 + 1) * of_slot
        assert len(runner.kv.layers) == attending
        page_bytes = runner.facts()["page_bytes"]
    if name in COMPILED:
        with runner_of(tmp_path, name, "rust", state_pages=5) as runner:
            assert (runner.facts["state_bytes"], runner.facts["state_page_count"]) == (of_slot, 5)
            assert runner.facts["page_bytes"] == page_bytes
