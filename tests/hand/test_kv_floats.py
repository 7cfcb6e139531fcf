"""8-bit keys and values on the PyTorch reference operators: the tokens of a model that rounds them, for any steps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.device import DeviceError
from forebay.gpu.choose import VARIABLE
from forebay.protocol.constants import COPY_OK, COPY_RESTORE, COPY_SAVE, ROW_NOT_FINITE, ROW_OK
from forebay.runner.runner import ModelRunner
from forebay.state.config import RunnerConfig
from tests.hand.greedy import greedy_of_8_bits, model_of, prompts
from tests.hand.rank_process import RankGroups
from tests.hand.support import MiniBrain, PlanBuilder, Request, Sampling, greedy_reference
from tests.hand.test_copier import Hand, page
from tests.hand.test_footprint import FREE, config_of, planned
from tests.hand.test_paged import GRAPHS, paged, requests
from tests.hand.test_pooling import pooling
from tests.hand.test_ranks import alone, asked, wired

FP8 = "fp8_e4m3"
EIGHT_BITS: dict[str, Any] = {"kv_cache_dtype": FP8}
ON_TWINS = {"device": "deferred", "attention_backend": "triton", **EIGHT_BITS}
COUNT = 8
VOCABULARY = 131
GREEDY = Sampling(logprobs=VOCABULARY)


@pytest.fixture(autouse=True)
def _twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "reference")


@cache
def stories(family: str, rounds: bool = True) -> list[tuple[list[int], torch.Tensor]]:
    """Greedy tokens of transformers after four prompts, and log-probabilities [count, vocabulary]."""
    way = greedy_of_8_bits if rounds else greedy_reference
    return [way(model_of(family), prompt, COUNT) for prompt in prompts(4)]


def distributions(request: Request) -> torch.Tensor:
    """A request's log-probabilities [count, vocabulary] by token."""
    found = torch.empty(len(request.logprobs), VOCABULARY)
    for line, (ids, values) in zip(found, request.logprobs, strict=True):
        line[torch.from_numpy(ids).long()] = torch.from_numpy(values)
    return found


def served(runner: ModelRunner, chunk: int, lookahead: int = 1) -> list[Request]:
    found = [Request(prompt, COUNT, GREEDY, 2 * number) for number, prompt in enumerate(prompts(4))]
    MiniBrain(runner, chunk, lookahead).serve(found, chunk)
    return found


@GRAPHS
@pytest.mark.parametrize("chunk", [1, 9, 1000])
@pytest.mark.parametrize("family", ["llama", "qwen3", "glm4-moe"])
def test_tokens_and_logits_are_those_of_a_model_that_rounds(family: str, chunk: int, graph_rows: int) -> None:
    exact = stories(family, rounds=False)
    for ours, (tokens, wanted), (_, others) in zip(
        served(paged(family, graph_rows, **EIGHT_BITS), chunk), stories(family), exact, strict=True
    ):
        assert ours.tokens == tokens
        distance = (distributions(ours) - wanted).abs().max()
        # A number halfway between two floats may be rounded to either. The rounding of all numbers has a larger effect.
        assert distance < 0.03 < (others - wanted)[0].abs().max()


@GRAPHS
@pytest.mark.parametrize(("lookahead", "chunk", "page_size"), [(0, 9, 4), (1, 9, 7), (1, 1000, 16)])
def test_tokens_do_not_depend_on_steps_or_company(lookahead: int, chunk: int, page_size: int, graph_rows: int) -> None:
    found = requests()
    MiniBrain(paged("qwen3", graph_rows, page_size=page_size, **EIGHT_BITS), chunk, lookahead).serve(found, chunk)
    assert [request.tokens for request in found] == one_by_one()


@cache
def one_by_one() -> list[list[int]]:
    found = requests()
    for request in found:
        request.arrival = 0
        MiniBrain(paged("qwen3", 0, **EIGHT_BITS)).serve([request], chunk=5)
    return [request.tokens for request in found]


@GRAPHS
def test_a_prefix_in_shared_pages_is_not_computed_again(graph_rows: int) -> None:
    tails = [[9, 100, 3], [77]]
    runner = paged("qwen3", graph_rows, **EIGHT_BITS)
    first = PlanBuilder(1)
    first.slot(0, list(range(8)))
    first.page_writes += [(0, 0, 40), (0, 1, 17)]
    first.row(0, 0, 8, sample=False)
    runner.step(first.build())
    second = PlanBuilder(2)
    for slot, tail in enumerate(tails, start=1):
        second.slot(slot, [*range(8), *tail])
        second.page_writes += [(slot, 0, 40), (slot, 1, 17), (slot, 2, 50 + slot)]
        second.row(slot, 8, len(tail))
    alone_ = [Request([*range(8), *tail], 1) for tail in tails]
    MiniBrain(paged("qwen3", 0, **EIGHT_BITS)).serve(alone_)
    assert runner.step(second.build()).tokens.tolist() == [request.tokens[0] for request in alone_]


def test_pages_of_an_earlier_owner_do_no_harm() -> None:
    runner = paged("qwen3", 0, **EIGHT_BITS)
    for pool in (pool for layer in runner.kv.layers for pool in layer):
        pool.fill_(0x7F)
    expected = [tokens for tokens, _ in stories("qwen3")]
    assert [request.tokens for request in served(runner, 9)] == expected


def test_a_key_that_is_no_number_is_told() -> None:
    runner = paged("qwen3", 0, **EIGHT_BITS)
    with torch.no_grad():
        runner.decoder.embedding[5] = torch.nan
    plan = PlanBuilder(1)
    for slot, tokens in enumerate(([3, 4, 5, 6], [3, 4, 6, 7])):
        plan.slot(slot, tokens)
        plan.page_writes.append((slot, 0, slot))
        plan.row(slot, 0, 4)
    assert runner.step(plan.build()).row_errors.tolist() == [ROW_NOT_FINITE, ROW_OK]


@pytest.mark.parametrize(("dtype", "share"), [("float32", 4), ("bfloat16", 2)])
def test_a_page_takes_a_byte_for_each_number(dtype: str, share: int) -> None:
    config = config_of("qwen3", max_total_tokens=None, slots=2000, dtype=dtype, device="cuda")
    ((plain,), (small,)) = planned(config), planned({**config, **EIGHT_BITS})
    assert plain.page_bytes == share * small.page_bytes
    assert small.page_count == share * plain.page_count or small.page_count > plain.page_count
    assert small.kv_bytes == small.page_count * small.page_bytes <= FREE
    kv = ModelRunner(RunnerConfig.from_dict({**config_of("qwen3", dtype=dtype), **ON_TWINS})).kv
    assert kv.page_bytes == small.page_bytes
    assert kv.nbytes == kv.page_count * kv.page_bytes
    # A rank stores the keys and values of its own heads.
    halves = planned({**config, **EIGHT_BITS}, 2)
    assert [2 * rank.page_bytes for rank in halves] == 2 * [small.page_bytes]


def test_a_restored_page_is_the_one_that_was_saved() -> None:
    hand = Hand("qwen3", kv_checksum=True, **ON_TWINS)
    hand.step((7, COPY_SAVE, 1, 5), rows=True)
    assert hand.until_ended(1) == [[7, COPY_OK]]
    saved = page(hand.runner, 1)
    assert any(any(piece) for piece in saved)
    hand.step((9, COPY_RESTORE, 11, 5))
    assert hand.until_ended(1) == [[9, COPY_OK]]
    assert page(hand.runner, 11) == saved


@pytest.fixture
def ranks() -> Iterator[RankGroups]:
    # The ranks inherit this process's environment, which selects the reference operators.
    made = RankGroups((2,))
    yield made
    made.close()


def test_two_ranks_give_what_one_gives(ranks: RankGroups, tmp_path: Path) -> None:
    config, wanted = wired(model_of("qwen3"), tmp_path, **ON_TWINS), asked()
    given = ranks.run(2, "serve", config=config, requests=wanted, chunk=16)
    assert given[0]["requests"] == given[1]["requests"]
    for ours, theirs in zip(given[0]["requests"], alone(config, wanted, 16), strict=True):
        assert ours["tokens"] == theirs["tokens"]


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3", {"attention_backend": None}, "needs the attention backend triton, and torch is in use"),
        ("qwen3", {"attention_backend": "torch"}, "leave --attention-backend off"),
        ("qwen3", {"device": "cpu", "attention_backend": None}, "the device is cpu: leave it off"),
        ("deepseek-v3", {}, "DeepseekV3ForCausalLM has latent rows: leave it off"),
        ("glm-dsa", {}, "has latent rows"),
        ("qwen3", {"kv_cache_dtype": "fp8_e5m2"}, "'fp8_e5m2' is not supported: use null or fp8_e4m3"),
        ("qwen3", {"kv_cache_dtype": "int8"}, "int8 is for the Rust hand on a CPU"),
    ],
)
def test_what_can_not_have_8_bit_floats_says_so(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        ModelRunner(RunnerConfig.from_dict({**config_of(family, page_size=16), **ON_TWINS, **changes}))
    assert "\n" not in str(refused.value)


def test_models_that_pool_and_flash_attention_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("qwen3", page_size=16, **ON_TWINS)
    config["model"]["pooling"] = pooling("last", 64)
    with pytest.raises(ValueError, match="is for models that generate, and this one pools"):
        RunnerConfig.from_dict(config)
    monkeypatch.setattr("forebay.compute.choose.why_not_fa3", lambda device, dtype: None)
    config = config_of("qwen3", **{**ON_TWINS, "attention_backend": "fa3"})
    with pytest.raises(DeviceError, match="needs the attention backend triton, and fa3 is in use"):
        ModelRunner(RunnerConfig.from_dict(config))


def cut_off(x: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
    """Rounds to 8-bit floats towards 0."""
    codes = x.to(torch.float8_e4m3fn).view(torch.uint8)
    return codes - (codes.view(torch.float8_e4m3fn).float().abs() > x.abs()).to(torch.uint8)


MISTAKES = {
    "numbers that are cut off": ("forebay.gpu.reference.layers.kept", cut_off),
    "codes that are read as integers": ("forebay.gpu.reference.attention.numbers", torch.Tensor.float),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = paged("qwen3", 0, **EIGHT_BITS)
    monkeypatch.setattr(*MISTAKES[name])
    first, (tokens, wanted) = served(runner, 9)[0], stories("qwen3")[0]
    assert first.tokens != tokens or (distributions(first) - wanted).abs().max() > 0.03
