"""Two ranks on GPUs give the tokens of one rank. They use NCCL, or the host where both share a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hand.rank_process import RankGroups
from tests.hand.test_ranks import alone, asked, check, model_of, wired

FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("qwen3-moe", {}),
    ("qwen3-moe", {"expert_parallel": True}),
    ("deepseek-v3", {"expert_parallel": True}),
]


@pytest.fixture(scope="module", params=["a GPU each", "one GPU"])
def groups(request: pytest.FixtureRequest) -> Iterator[RankGroups]:
    if request.param == "a GPU each" and torch.cuda.device_count() < 2:
        pytest.skip(f"two ranks need two GPUs to meet by NCCL, and {torch.cuda.device_count()} is visible")
    made = RankGroups((2,), (0, 1) if request.param == "a GPU each" else (0, 0))
    yield made
    made.close()


@pytest.mark.parametrize(("family", "changes"), FAMILIES, ids=lambda value: str(value))
def test_ranks_give_what_one_gives(groups: RankGroups, tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    config, requests = wired(model_of(family), tmp_path, device="cuda", **changes), asked()
    given = groups.run(2, "serve", config=config, requests=requests, chunk=16)
    assert all(rank["requests"] == given[0]["requests"] for rank in given)
    assert given[0]["facts"]["device"].endswith("2 ranks, without graphs")
    check(given[0]["requests"], alone({**config, "expert_parallel": False}, requests, 16))
