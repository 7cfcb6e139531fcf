"""The memory that is planned for ranks, compared with what the same ranks allocate."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from forebay.device import cpu
from forebay.runner.footprint import Footprint, footprints
from forebay.runner.runner import ModelRunner
from forebay.state.config import RunnerConfig
from tests.hand.rank_process import RankGroups
from tests.hand.support import FAMILIES, hf_config, wire_config

FREE = 8_000_000
"""Available bytes, too few for all pages."""
GROUP = {"expert_parallel": True, "step_group": True}


@pytest.fixture(scope="module")
def groups() -> Iterator[RankGroups]:
    made = RankGroups((2, 4))
    yield made
    made.close()


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    kind, shape = FAMILIES[family]
    return wire_config(hf_config(shape, kind.__name__), **changes)


def planned(config: dict[str, Any], world: int = 1, free: int = FREE) -> list[Footprint]:
    ranks = ({**config, "rank": rank, "world_size": world} for rank in range(world))
    return footprints(map(RunnerConfig.from_dict, ranks), free)


def told(facts: dict[str, Any]) -> Footprint:
    return Footprint(*(facts[name] for name in ("weight_bytes", "page_bytes", "page_count", "kv_bytes")))


CASES: list[tuple[int, str, dict[str, Any]]] = [
    (2, "llama", {}),
    (2, "llama-untied-biases", {"dtype": "bfloat16"}),
    (2, "qwen2", {}),
    (4, "qwen3", {}),
    (2, "qwen3-moe", {}),
    (2, "qwen3-moe", {"expert_parallel": True}),
    (2, "qwen3-moe", GROUP),
    (4, "qwen3-moe", {**GROUP, "dtype": "bfloat16", "page_size": 7}),
    (2, "qwen3-moe-some-dense", GROUP),
    (2, "glm4-moe-bias", {}),
    (4, "glm4-moe-bias", GROUP),
    (2, "deepseek-v2", {}),
    (2, "deepseek-v3", {"expert_parallel": True}),
    (4, "deepseek-v3", GROUP),
]


@pytest.mark.parametrize("tokens", [768, None], ids=["fixed", "fitting"])
@pytest.mark.parametrize(("world", "family", "changes"), CASES, ids=lambda value: str(value))
def test_ranks_take_what_was_planned(
    groups: RankGroups, world: int, family: str, changes: dict[str, Any], tokens: int | None
) -> None:
    config = config_of(family, max_total_tokens=tokens, slots=2000, **changes)
    taken = groups.run(world, "facts", config=config, available=[FREE] * world)
    assert [told(facts) for facts in taken] == planned(config, world)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3-moe", "glm4-moe", "deepseek-v3", "deepseek-v32"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_rank_takes_what_was_planned(family: str, dtype: str) -> None:
    config = config_of(family, dtype=dtype, max_total_tokens=None, slots=2000)
    with patch.object(cpu, "host_available", lambda: FREE):
        assert [told(ModelRunner(RunnerConfig.from_dict(config)).facts())] == planned(config)


def test_the_rank_with_the_most_weights_decides_about_all_pages() -> None:
    # Two ranks divide a vocabulary of 131 into 66 and 65.
    first, second = planned(config_of("llama", max_total_tokens=None, slots=2000), 2)
    assert first.weight_bytes > second.weight_bytes
    assert first.page_count == second.page_count
    room = FREE // 2 - first.weight_bytes
    assert 0 < first.page_count * first.page_bytes <= room


def test_a_step_group_has_more_room_than_ranks_that_divide_latent_attention() -> None:
    config = config_of("deepseek-v3", max_total_tokens=None, slots=2000)
    divided, group = planned(config, 2, 10 * FREE), planned({**config, **GROUP}, 2, 10 * FREE)
    # If heads are divided, each rank keeps all latent rows. In a step group it keeps only those of its own requests.
    assert divided[0].page_bytes == group[0].page_bytes
    assert 2 * group[0].page_count > 1.5 * divided[0].page_count


REFUSED: list[tuple[str, dict[str, Any], int, int, str]] = [
    ("llama", {}, 3, FREE, "4 query heads can't be split over 3 ranks"),
    ("llama", GROUP, 2, FREE, "no experts that ranks could share"),
    ("llama", {"max_total_tokens": None}, 2, 1000, "no memory for a single page"),
    ("llama", {"quantization": "fp8"}, 1, FREE, "quantised at the start is not planned"),
]


@pytest.mark.parametrize(("family", "changes", "world", "free", "message"), REFUSED, ids=lambda value: str(value)[:30])
def test_what_can_not_be_planned_is_said(
    family: str, changes: dict[str, Any], world: int, free: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        planned(config_of(family, **changes), world, free)


def asked(*lines: Any) -> subprocess.CompletedProcess[str]:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    command = [sys.executable, "-m", "forebay.runner.footprint"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


def test_the_command_answers_a_line_a_rank() -> None:
    config = config_of("qwen3-moe", world_size=2, **GROUP)
    answer = asked(FREE, config, {**config, "rank": 1})
    found = [Footprint(**json.loads(line)) for line in answer.stdout.splitlines()]
    assert found == planned(config, 2)
    refused = asked(FREE, {**config, "world_size": 3})
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.splitlines()[-1] == "error: 8 experts can't be divided among 3 ranks: use 2"
