"""Several ranks in real processes that communicate through gloo, against one rank and against transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file

from benchmarks.described import handshake_model
from forebay.protocol.constants import COPY_FAILED, COPY_OK
from forebay.runner.runner import ModelRunner
from forebay.state.config import RunnerConfig
from tests.hand.rank_cases import found, read_requests
from tests.hand.rank_process import RankGroups
from tests.hand.support import (
    FAMILIES,
    MiniBrain,
    greedy_reference,
    hf_config,
    hub_weights,
    random_model,
    reference_model,
    wire_config,
)
from tests.hand.test_adapters import bring

VOCABULARY = 131
COUNT = 8
ATOL = 1e-4


@pytest.fixture(scope="module")
def groups() -> Iterator[RankGroups]:
    made = RankGroups((2, 4))
    yield made
    made.close()


@cache
def model_of(family: str, kv_heads: int | None = None) -> Any:
    if kv_heads is None:
        return reference_model(family)
    kind, config = FAMILIES[family]
    return random_model(kind, type(config)(**{**config.to_dict(), "num_key_value_heads": kv_heads}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


def wired(model: Any, folder: Path, **changes: Any) -> dict[str, Any]:
    """Writes a checkpoint, unless it exists, and returns the config of a handshake for it."""
    path = folder / f"{id(model)}.safetensors"
    if not path.exists():
        weights = {name: tensor.clone() for name, tensor in hub_weights(model).items()}
        if model.config.tie_word_embeddings:
            del weights["lm_head.weight"]
        save_file(weights, path)
    config = hf_config(model.config, type(model).__name__)
    files = handshake_model(config, [path])
    return wire_config(config, **{"model": files, "load_format": "auto", **changes})


def prompts(count: int) -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(0, VOCABULARY, random.integers(1, 40)).tolist() for _ in range(count)]


SAMPLINGS: list[dict[str, Any]] = [
    # All log-probabilities, because their differences equal those of logits.
    {"logprobs": VOCABULARY},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "top_k": 7, "seed": 6, "logprobs": 3},
    {"temperature": 1.2, "top_p": 0.7, "seed": 7, "repetition_penalty": 1.2},
    {"temperature": 0.9, "min_p": 0.05, "seed": 8, "bias": [[3, 2.0], [120, -1.0]]},
    {"frequency_penalty": 0.6, "presence_penalty": 0.3, "stop_ids": [4, 70], "min_total": 60},
    {"temperature": 1.0, "allowed": [1, 64, 65, 66, 130], "seed": 9},
]


def asked() -> list[dict[str, Any]]:
    return [
        {
            "prompt": prompt,
            "count": COUNT,
            "sampling": SAMPLINGS[number % len(SAMPLINGS)],
            "arrival": number,
            "prompt_logprobs": VOCABULARY if number == 0 else 5 if number % 3 == 0 else -1,
        }
        for number, prompt in enumerate(prompts(len(SAMPLINGS)))
    ]


def alone(
    config: dict[str, Any],
    requests: list[dict[str, Any]],
    chunk: int = 1000,
    adapters: Sequence[dict[str, Any]] = (),
) -> list[dict[str, Any]]:
    """The results of one rank that computes with PyTorch's operators. `adapters`: as in the case `serve`."""
    runner = ModelRunner(RunnerConfig.from_dict(config))
    runner.load(lambda done, total: None)
    if adapters:
        assert not any(bring(runner, adapters))
    served = read_requests(requests)
    MiniBrain(runner, chunk).serve(served, chunk)
    return [found(request) for request in served]


def check(given: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Compares tokens, and all log-probabilities that were requested."""
    for ours, theirs in zip(given, expected, strict=True):
        assert ours["tokens"] == theirs["tokens"]
        for (ids, values), (their_ids, their_values) in zip(ours["logprobs"], theirs["logprobs"], strict=True):
            same(ids, values, their_ids, their_values)
        for (rank, ids, values), (their_rank, their_ids, their_values) in zip(
            ours["of_prompt"], theirs["of_prompt"], strict=True
        ):
            # Rounding may change the order of tokens that are equally likely.
            assert abs(rank - their_rank) <= 1
            same(ids, values, their_ids, their_values)


def same(ids: list[int], values: list[float], their_ids: list[int], their_values: list[float]) -> None:
    np.testing.assert_allclose(values, their_values, atol=ATOL)
    if len(ids) == 1 + VOCABULARY:
        by_id, theirs = (dict(zip(*both, strict=True)) for both in ((ids, values), (their_ids, their_values)))
        assert by_id.keys() == theirs.keys()
        np.testing.assert_allclose(
            [by_id[token] for token in sorted(by_id)], [theirs[t] for t in sorted(theirs)], atol=ATOL
        )


CASES: list[tuple[int, str, int | None, dict[str, Any]]] = [
    *((2, "llama", kv_heads, {}) for kv_heads in (1, 2, 4)),
    (2, "llama-untied-biases", None, {}),
    *((2, "qwen2", kv_heads, {}) for kv_heads in (1, 4)),
    (2, "qwen2-tied", None, {}),
    *((2, "qwen3", kv_heads, {}) for kv_heads in (1, 2)),
    (2, "qwen3", None, {"device": "deferred"}),
    (4, "llama", 1, {}),
    (4, "llama-untied-biases", 2, {}),
    (2, "gemma2", None, {}),
    (2, "gemma3", None, {}),
    (2, "qwen3-moe", None, {}),
    (2, "glm4-moe-bias", None, {}),
    (2, "deepseek-v2-lite", None, {}),
    (2, "deepseek-v3-halves", None, {}),
    # Each rank computes the whole index, and chooses the same positions.
    (2, "deepseek-v32", None, {}),
    (2, "glm-dsa", None, {"expert_parallel": True}),
    (2, "qwen3-moe-some-dense", None, {"expert_parallel": True}),
    (2, "qwen3-moe", None, {"expert_parallel": True, "page_size": 7}),
    (2, "qwen3-moe", None, {"expert_parallel": True, "device": "deferred"}),
    (2, "glm4-moe", None, {"expert_parallel": True}),
    (2, "deepseek-v2", None, {"expert_parallel": True}),
    (4, "deepseek-v3", None, {"expert_parallel": True}),
]


@pytest.mark.parametrize(("world", "family", "kv_heads", "changes"), CASES, ids=lambda value: str(value))
def test_ranks_give_what_one_gives(
    groups: RankGroups, folder: Path, world: int, family: str, kv_heads: int | None, changes: dict[str, Any]
) -> None:
    model = model_of(family, kv_heads)
    config, requests = wired(model, folder, **changes), asked()
    given = groups.run(world, "serve", config=config, requests=requests, chunk=16)
    assert all(rank["requests"] == given[0]["requests"] for rank in given)
    check(given[0]["requests"], alone({**config, "expert_parallel": False}, requests, 16))
    facts = given[0]["facts"]
    assert f"{world} ranks" in facts["device"]


@pytest.mark.parametrize("family", ["qwen3-moe", "glm4-moe", "deepseek-v3"])
def test_experts_of_ranks_give_what_transformers_gives(groups: RankGroups, folder: Path, family: str) -> None:
    model = model_of(family)
    requests: list[dict[str, Any]] = [
        {"prompt": prompt, "count": COUNT, "sampling": {"logprobs": VOCABULARY}} for prompt in prompts(4)
    ]
    config = wired(model, folder, expert_parallel=True)
    given = groups.run(2, "serve", config=config, requests=requests)[0]["requests"]
    for request, ours in zip(requests, given, strict=True):
        tokens, distributions = greedy_reference(model, request["prompt"], COUNT)
        assert ours["tokens"] == tokens
        for (ids, values), distribution in zip(ours["logprobs"], distributions, strict=True):
            np.testing.assert_allclose(values, distribution[ids], atol=ATOL)


def test_random_weights_are_those_of_one_rank(groups: RankGroups) -> None:
    for family in ("llama-untied-biases", "glm4-moe-bias"):
        kind, shape = FAMILIES[family]
        config, requests = wire_config(hf_config(shape, kind.__name__)), asked()[:2]
        expected = alone(config, requests)
        for changes in ({}, {"expert_parallel": True}) if family != "llama-untied-biases" else ({},):
            given = groups.run(2, "serve", config={**config, **changes}, requests=requests)
            check(given[1]["requests"], expected)


@pytest.mark.parametrize("mutant", ["no all-reduce", "wrong slice"])
def test_a_wrong_rank_is_seen(groups: RankGroups, folder: Path, mutant: str) -> None:
    config, requests = wired(model_of("llama", 2), folder), asked()[:3]
    given = groups.run(2, "serve", config=config, requests=requests, mutant=mutant)
    with pytest.raises(AssertionError):
        check(given[0]["requests"], alone(config, requests))


def test_a_rank_that_samples_another_token_is_seen(groups: RankGroups, folder: Path) -> None:
    config = wired(model_of("llama", 2), folder)
    requests = [{"prompt": [1, 2, 3], "count": COUNT}]
    first, second = groups.run(2, "serve", config=config, requests=requests, mutant="another token")
    assert first["requests"] != second["requests"]


def test_collectives(groups: RankGroups) -> None:
    first, second = groups.run(2, "collectives")
    assert first["all_reduce"] == second["all_reduce"] == [100, 102, 104, 106]
    assert first["all_gather"] == second["all_gather"] == [[[0], [1]], [[100], [101]]]
    assert (first["reduce_scatter"], second["reduce_scatter"]) == ([100, 102], [104, 106])
    assert (first["all_to_all"], second["all_to_all"]) == ([0, 1, 100, 101], [2, 3, 102, 103])
    assert first["bfloat16"] == second["bfloat16"] == [3, 3, 3]
    assert first["least"] == second["least"] == 9


@pytest.mark.parametrize(("world", "rounds"), [(2, 120), (4, 30)])
@pytest.mark.parametrize("ties", [False, True])
def test_shards_sample_what_all_logits_give(groups: RankGroups, world: int, rounds: int, ties: bool) -> None:
    kind, shape = FAMILIES["llama"]
    config = wire_config(hf_config(shape, kind.__name__))
    given = groups.run(world, "sample", config=config, rounds=rounds, ties=ties)
    drawn = 0
    for pairs in zip(*given, strict=True):
        (reference, _), ours = pairs[0], [mine for _, mine in pairs]
        assert all(mine == ours[0] for mine in ours)
        for name in ("tokens", "kept", "finite"):
            assert ours[0][name] == reference[name]
        drawn += len(reference["tokens"])
        if reference["logprobs"] is None:
            assert ours[0]["logprobs"] is None
            continue
        (counts, ids, values), (their_counts, their_ids, their_values) = ours[0]["logprobs"], reference["logprobs"]
        assert counts == their_counts
        np.testing.assert_allclose(values, their_values, atol=1e-5)
        assert ties or not np.isfinite(values).all() or ids == their_ids
    assert drawn > 3 * rounds


def test_shards_know_log_probabilities_and_ranks(groups: RankGroups) -> None:
    for given in groups.run(4, "likelihoods"):
        for (their_ids, their_values, their_ranks), (ids, values, ranks) in given:
            assert ids == their_ids
            assert ranks == their_ranks
            np.testing.assert_allclose(values, their_values, atol=1e-5)


def test_ranks_read_their_slices_and_no_more(groups: RankGroups, folder: Path) -> None:
    model = model_of("qwen3-moe")
    sizes = {name: tensor.nbytes for name, tensor in hub_weights(model).items()}
    for changes in ({}, {"expert_parallel": True}):
        read = groups.run(2, "bytes_read", config=wired(model, folder, **changes))
        for name, size in sizes.items():
            found = [of_rank.get(name, 0) for of_rank in read]
            if name.endswith(("norm.weight", "mlp.gate.weight")):
                assert found == [size, size]
            elif "expert_parallel" in changes and ".experts." in name:
                assert sorted(found) == [0, size]
            else:
                assert sum(found) == size
                assert max(found) - min(found) <= size // VOCABULARY
    # Both ranks read the single key-value head.
    model = model_of("llama", 1)
    whole = dict(hub_weights(model))["model.layers.0.self_attn.k_proj.weight"].nbytes
    for of_rank in groups.run(2, "bytes_read", config=wired(model, folder)):
        assert of_rank["model.layers.0.self_attn.k_proj.weight"] == whole
        assert of_rank["model.layers.0.self_attn.q_proj.weight"] == 2 * whole


@pytest.mark.parametrize(
    ("family", "kv_heads", "changes"),
    [
        ("llama", 2, {}),
        ("llama", 1, {"page_size": 7}),
        ("qwen3", None, {"device": "deferred"}),
        ("deepseek-v3", None, {}),
        # The first rank saves pages for both.
        ("deepseek-v3", None, {"host_shared": True}),
        ("deepseek-v32", None, {"host_shared": True, "device": "deferred"}),
        ("qwen3-moe", None, {"expert_parallel": True}),
    ],
    ids=lambda value: str(value),
)
def test_each_rank_saves_and_restores_its_part_of_a_block(
    groups: RankGroups, folder: Path, family: str, kv_heads: int | None, changes: dict[str, Any]
) -> None:
    model = model_of(family, kv_heads)
    config = wired(model, folder, host_ratio=2.0, kv_checksum=True, **changes)
    prompt, count = [7 * at % VOCABULARY for at in range(23)], 5
    expected = greedy_reference(model, prompt, count)[0]
    memory = str(folder / f"{family}.pages") if "host_shared" in changes else ""
    given = groups.run(2, "restore", config=config, prompt=prompt, count=count, memory=memory)
    whole = len(prompt) // config["page_size"]
    for rank in given:
        assert rank["tokens"] == expected
        assert rank["errors"] == [COPY_OK] * whole
        assert rank["facts"]["host_page_count"] == 2 * rank["facts"]["page_count"]
    if memory:
        return
    # If one rank's copies fail, the other rank still reports its own as successful.
    given = groups.run(2, "restore", config=config, prompt=prompt, count=count, damaged=1)
    assert [rank["errors"] for rank in given] == [[COPY_OK] * whole, [COPY_FAILED] * whole]


def test_ranks_agree_on_the_host_pages_that_fit(groups: RankGroups, folder: Path) -> None:
    config = wired(model_of("llama"), folder, host_ratio=1e6, host_fits=True)
    given = groups.run(2, "facts", config=config, available=[1 << 30, 900 << 20])
    (pages,) = {facts["host_page_count"] for facts in given}
    (page_bytes,) = {facts["page_bytes"] for facts in given}
    assert 0.5 * config["host_share"] * (900 << 20) < pages * page_bytes <= config["host_share"] * (900 << 20)


SIX = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    (
        "llama",
        {"num_attention_heads": 9, "num_key_value_heads": 3},
        {},
        "9 query heads can't be split over 2 ranks: use 1",
    ),
    ("llama", SIX, {}, "3 key-value heads and 2 ranks"),
    ("llama", {"intermediate_size": 97}, {}, "an intermediate size of 97 can't be split over 2 ranks: use 1"),
    ("qwen3-moe", {"moe_intermediate_size": 25}, {}, "experts with an intermediate size of 25"),
    ("qwen3-moe", {"num_experts": 7}, {"expert_parallel": True}, "experts whose number is 7"),
    ("qwen3", {}, {"expert_parallel": True}, "Qwen3ForCausalLM has no experts"),
    ("deepseek-v3", {"num_attention_heads": 5, "num_key_value_heads": 5}, {}, "5 query heads"),
    ("llama", {}, {"quantization": "w8a8_int8"}, "computed by the Rust hand"),
    ("llama", {}, {"rank": 2}, "rank 2 of 2"),
]


@pytest.mark.parametrize(("family", "shape", "changes", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_ranks_can_not_split_is_refused(
    family: str, shape: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    kind, config = FAMILIES[family]
    values = {**hf_config(config, kind.__name__), **shape}
    with pytest.raises(ValueError, match=message):
        RunnerConfig.from_dict(wire_config(values, world_size=2, **changes))


def test_a_single_rank_has_no_experts_to_split() -> None:
    kind, config = FAMILIES["qwen3-moe"]
    with pytest.raises(ValueError, match="experts of a single rank"):
        RunnerConfig.from_dict(wire_config(hf_config(config, kind.__name__), expert_parallel=True))


def test_ranks_need_a_place_to_meet() -> None:
    kind, config = FAMILIES["llama"]
    resolved = RunnerConfig.from_dict(wire_config(hf_config(config, kind.__name__), world_size=2))
    with pytest.raises(ValueError, match="no place where they could meet"):
        ModelRunner(resolved)
