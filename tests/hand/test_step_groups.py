"""Ranks with their own tokens share experts through gloo: compared with one rank and with transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.protocol.plan import Plan
from forebay.runner.runner import ModelRunner
from forebay.state.config import RunnerConfig
from forebay.state.slots import PlanError
from tests.hand.rank_process import RankGroups
from tests.hand.support import FAMILIES, greedy_reference, hf_config, hub_weights, wire_config
from tests.hand.test_ranks import ATOL, COUNT, SAMPLINGS, VOCABULARY, alone, check, model_of, prompts, wired

CHUNK = 16


@pytest.fixture(scope="module")
def groups() -> Iterator[RankGroups]:
    made = RankGroups((2, 4))
    yield made
    made.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("groups")


def asked(world: int) -> list[list[dict[str, Any]]]:
    """Requests for each rank. The first rank has most and starts alone. The last one has a single late request."""
    requests: list[list[dict[str, Any]]] = [[] for _ in range(world)]
    for number, prompt in enumerate(prompts(2 * len(SAMPLINGS))):
        late = number == 1
        rank = world - 1 if late else number % max(1, world - 1)
        request = {
            "prompt": prompt,
            "count": COUNT,
            "sampling": SAMPLINGS[number % len(SAMPLINGS)],
            "arrival": 40 if late else number,
            "prompt_logprobs": VOCABULARY if number == 0 else 5 if number % 5 == 0 else -1,
        }
        requests[rank].append(request)
    return requests


CASES: list[tuple[int, str, dict[str, Any]]] = [
    (2, "qwen3-moe", {}),
    (2, "qwen3-moe", {"page_size": 7}),
    (2, "qwen3-moe", {"device": "deferred"}),
    (2, "qwen3-moe-some-dense", {}),
    (2, "glm4-moe", {}),
    (2, "glm4-moe-bias", {}),
    (2, "deepseek-v2", {}),
    (2, "deepseek-v32", {}),
    (4, "qwen3-moe", {}),
    (4, "deepseek-v3", {}),
]


@pytest.mark.parametrize(("world", "family", "changes"), CASES, ids=lambda value: str(value))
def test_each_rank_gives_what_one_gives(
    groups: RankGroups, folder: Path, world: int, family: str, changes: dict[str, Any]
) -> None:
    config, requests = wired(model_of(family), folder, **changes), asked(world)
    given = groups.run(world, "serve_group", config=config, requests=requests, chunk=CHUNK)
    for rank in range(world):
        check(given[rank]["requests"], alone(config, requests[rank], CHUNK))
    assert given[-1]["idle"] > 10, "the last rank took part without tokens"
    facts = given[0]["facts"]
    assert f"{world} ranks" in facts["device"]
    # Each rank has its own pages, with all heads.
    alone_facts = ModelRunner(RunnerConfig.from_dict(config)).facts()
    assert facts["page_bytes"] == alone_facts["page_bytes"]


def test_ranks_give_what_transformers_gives(groups: RankGroups, folder: Path) -> None:
    model = model_of("qwen3-moe")
    requests: list[list[dict[str, Any]]] = [
        [{"prompt": prompt, "count": COUNT, "sampling": {"logprobs": VOCABULARY}} for prompt in some]
        for some in (prompts(4)[:3], prompts(4)[3:])
    ]
    given = groups.run(2, "serve_group", config=wired(model, folder), requests=requests)
    for of_rank, answers in zip(requests, given, strict=True):
        for request, ours in zip(of_rank, answers["requests"], strict=True):
            tokens, distributions = greedy_reference(model, request["prompt"], COUNT)
            assert ours["tokens"] == tokens
            for (ids, values), distribution in zip(ours["logprobs"], distributions, strict=True):
                np.testing.assert_allclose(values, distribution[ids], atol=ATOL)


def test_terms_that_are_not_added_up_are_seen(groups: RankGroups, folder: Path) -> None:
    config, requests = wired(model_of("qwen3-moe"), folder), asked(2)
    given = groups.run(2, "serve_group", config=config, requests=requests, mutant="no sum")
    with pytest.raises(AssertionError):
        check(given[0]["requests"], alone(config, requests[0]))


@pytest.mark.parametrize("world", [2, 4])
def test_rows_find_their_way_back(groups: RankGroups, world: int) -> None:
    counts = groups.run(world, "exchange", rounds=60)
    assert counts == [counts[0]] * world
    assert counts[0] > 100


def test_ranks_read_their_experts_and_all_of_the_rest(groups: RankGroups, folder: Path) -> None:
    model = model_of("qwen3-moe")
    sizes = {name: tensor.nbytes for name, tensor in hub_weights(model).items()}
    config = wired(model, folder, expert_parallel=True, step_group=True)
    read = groups.run(2, "bytes_read", config=config)
    for name, size in sizes.items():
        found = [of_rank.get(name, 0) for of_rank in read]
        assert sorted(found) == ([0, size] if ".experts." in name else [size, size]), name


class Alone:
    """A group whose other rank does not exist."""

    rank, world = 0, 2

    def least(self, number: int) -> int:
        return number


def runner_of(**changes: Any) -> ModelRunner:
    kind, shape = FAMILIES["qwen3-moe"]
    values = wire_config(hf_config(shape, kind.__name__), **changes)
    return ModelRunner(RunnerConfig.from_dict(values), meet=lambda device: Alone())  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("tokens", [[], [0, 3, 0], [1, 3]])
def test_a_plan_that_is_not_the_rank_s_is_refused(tokens: list[int]) -> None:
    runner = runner_of(world_size=2, expert_parallel=True, step_group=True)
    with pytest.raises(PlanError, match="rank 0 of 2 has 0 tokens"):
        runner.launch(Plan(step=1, group=np.array(tokens, np.int32)))
    # A step without tokens on any rank is accepted.
    assert runner.launch(Plan(step=1, group=np.zeros(2, np.int32)).staged()).collect().step == 1


def test_a_rank_without_a_group_has_no_use_for_its_tokens() -> None:
    with pytest.raises(PlanError, match="has no step group"):
        runner_of().launch(Plan(step=1, group=np.array([0, 3], np.int32)))


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("qwen3", {}, {}, "Qwen3ForCausalLM has no experts that ranks could share"),
    ("qwen3-moe", {"num_experts": 7}, {}, "7 experts can't be divided among 2 ranks: use 1"),
    ("qwen3-moe", {}, {"expert_parallel": False}, "experts must be split by rank"),
    ("qwen3-moe", {}, {"lora": {"places": 1, "rank": 8, "kept": 0}}, "adapters are not served with whole experts"),
    ("qwen3-moe", {}, {"quantization": "w8a8_int8"}, "computed by the Rust hand"),
]


@pytest.mark.parametrize(("family", "shape", "changes", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_ranks_can_not_share_is_refused(
    family: str, shape: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    kind, config = FAMILIES[family]
    values = {**hf_config(config, kind.__name__), **shape}
    given = {"world_size": 2, "expert_parallel": True, "step_group": True, **changes}
    with pytest.raises(ValueError, match=message):
        RunnerConfig.from_dict(wire_config(values, **given))


def test_heads_need_not_be_divisible() -> None:
    kind, config = FAMILIES["qwen3-moe"]
    values = {**hf_config(config, kind.__name__), "num_attention_heads": 3, "num_key_value_heads": 3}
    RunnerConfig.from_dict(wire_config(values, world_size=2, expert_parallel=True, step_group=True))
