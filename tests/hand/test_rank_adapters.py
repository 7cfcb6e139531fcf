"""Adapters over several ranks, each with its part of the matrices, against one rank and against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hand.rank_process import RankGroups
from tests.hand.support import greedy_reference
from tests.hand.test_adapters import LORA, write
from tests.hand.test_ranks import COUNT, SAMPLINGS, alone, check, model_of, prompts, wired


@pytest.fixture(scope="module")
def groups() -> Iterator[RankGroups]:
    made = RankGroups((2, 4))
    yield made
    made.close()


def asked() -> list[dict[str, Any]]:
    """Requests for three adapters and the base in turn. Every other request is greedy."""
    return [
        {
            "prompt": prompt,
            "count": COUNT,
            "sampling": SAMPLINGS[number % len(SAMPLINGS)] if number % 2 else SAMPLINGS[0],
            "arrival": number,
            "place": number % 4 - 1,
        }
        for number, prompt in enumerate(prompts(12))
    ]


@pytest.mark.parametrize(
    ("world", "family", "kv_heads", "changes"),
    [
        (2, "llama", 2, {}),
        # Both ranks have the single key-value head.
        (2, "llama", 1, {}),
        (4, "llama-untied-biases", 2, {}),
        (2, "qwen2", 4, {}),
        (2, "qwen3", None, {"device": "deferred"}),
        (2, "gemma2", None, {}),
        # Only attention has adapters here, because this family has experts.
        (2, "qwen3-moe", None, {}),
    ],
    ids=lambda value: str(value),
)
def test_a_mixture_over_ranks_is_that_of_one(
    groups: RankGroups, tmp_path: Path, world: int, family: str, kv_heads: int | None, changes: dict[str, Any]
) -> None:
    base = model_of(family, kv_heads)
    made = [write(tmp_path / "adapters", base, number) for number in (1, 2, 3)]
    manifests, models = [found for found, _ in made], [base, *(merged for _, merged in made)]
    config, requests = wired(base, tmp_path, lora=LORA, **changes), asked()
    given = groups.run(world, "serve", config=config, requests=requests, chunk=16, adapters=manifests)
    assert all(rank["requests"] == given[0]["requests"] for rank in given)
    check(given[0]["requests"], alone(config, requests, 16, manifests))
    differ = 0
    for request, ours in zip(requests, given[0]["requests"], strict=True):
        if request["sampling"] is SAMPLINGS[0]:
            tokens = greedy_reference(models[request["place"] + 1], request["prompt"], COUNT)[0]
            assert ours["tokens"] == tokens
            differ += tokens != greedy_reference(base, request["prompt"], COUNT)[0]
    assert differ >= 2, "the adapters change tokens"


def test_a_rank_keeps_its_part_of_the_matrices(groups: RankGroups, tmp_path: Path) -> None:
    base = model_of("llama", 2)
    manifests = [write(tmp_path / "adapters", base, number)[0] for number in (1, 2, 3)]
    config = wired(base, tmp_path, lora=LORA)
    given = groups.run(2, "serve", config=config, requests=asked()[:2], adapters=manifests)
    # A rank has half of the outputs of q, k, v, gate and up, and half of the inputs of o and down.
    sizes = (64 + 32) + 2 * (64 + 16) + (32 + 64) + 3 * (64 + 48)
    for rank in given:
        assert rank["facts"]["lora_bytes"] == 3 * 32 * 3 * sizes * 4
