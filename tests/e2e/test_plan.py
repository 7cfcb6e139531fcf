"""The memory that `forebay plan` predicts for ranks, compared with the memory that a server reports."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Models, Serve
from tests.e2e.models import Model
from tests.e2e.server import BINARY, CACHE

SHARED = ("--dtype", "float32", "--max-running-requests", "20", "--max-total-tokens", "5000")
READY = re.compile(r"hand ready.* pages=(\d+) .*weight_bytes=(\d+) kv_bytes=(\d+) ")


def plan(*flags: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NO_COLOR": "1", "FOREBAY_CACHE": str(CACHE)}
    return subprocess.run(
        [BINARY, "plan", *flags], env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def planned(folder: Path, model: Model, *flags: str) -> dict[str, Any]:
    file = folder / "plan.json"
    given = plan("--model", model.path, "--device", "cpu", *SHARED, *flags, "--output-file", file)
    assert given.returncode == 0, given.stderr
    found: dict[str, Any] = json.loads(file.read_text())
    return found


ARRANGEMENTS: list[Any] = [
    ("llama", (), 1),
    pytest.param("llama", ("--dp-size", "2"), 2, marks=pytest.mark.slow),
    pytest.param("llama", ("--tp-size", "2"), 1, marks=pytest.mark.slow),
    ("llama", ("--tp-size", "2", "--dp-size", "2"), 2),
    ("smollm2", ("--dtype", "auto"), 1),
    ("qwen3", ("--kv-cache-dtype", "int8"), 1),
    ("nemotron-3", (), 1),
    pytest.param("falcon-h1", (), 1, marks=pytest.mark.slow),
    ("qwen3-moe", (), 1),
    ("deepseek-v3", (), 1),
    ("qwen3-moe", ("--tp-size", "2", "--enable-expert-parallel"), 1),
    ("qwen3-moe", ("--dp-size", "2", "--enable-dp-attention"), 1),
]


@pytest.mark.parametrize(("family", "flags", "groups"), ARRANGEMENTS, ids=lambda value: str(value))
def test_a_server_takes_what_was_planned(
    serve: Serve,
    models: Models,
    tmp_path_factory: pytest.TempPathFactory,
    family: str,
    flags: tuple[str, ...],
    groups: int,
) -> None:
    model = models(family)
    memory = planned(tmp_path_factory.mktemp("plan"), model, *flags)
    server = serve(model, *SHARED, *flags)
    told = [tuple(map(int, numbers)) for numbers in READY.findall(server.log())]
    ranks = memory["ranks"]
    assert memory["groups"] == groups
    of_group = (
        ranks[0]["page_count"],
        sum(rank["weight_bytes"] for rank in ranks),
        sum(rank["kv_bytes"] for rank in ranks),
    )
    assert told == [of_group] * groups
    hands = server.hands()
    assert len(hands) == groups * len(ranks)


def test_a_table_says_what_each_rank_needs(models: Models) -> None:
    path = models("qwen3-moe").path
    given = plan(
        "--model", path, "--device-memory", "0.1", "--dp-size", "2", "--enable-dp-attention", "--page-size", "4"
    )
    assert given.returncode == 0, given.stderr
    assert "bfloat16 on cuda, pages of 4 tokens" in given.stdout
    assert "Hands     2: a step group, each a replica; their experts are divided" in given.stdout
    assert re.search(r"Room for  \d+ tokens for each replica, \d+ in all", given.stdout)


@pytest.mark.parametrize(
    ("family", "flags", "told"),
    [
        ("llama", ("--max-total-tokens", "4000", "--tp-size", "3"), "query heads can't be split over 3 ranks"),
        ("llama", ("--max-total-tokens", "4000", "--dp-size", "2", "--enable-dp-attention"), "no experts"),
        ("llama", ("--max-total-tokens", "4000", "--tp-size", "2", "--ep-size", "3"), "--ep-size 3"),
        ("llama", (), "--device-memory"),
        ("llama", ("--device-memory", "0.001", "--mem-fraction-static", "0.01"), "no memory for a single page"),
    ],
)
def test_what_can_not_be_planned_is_said(models: Models, family: str, flags: tuple[str, ...], told: str) -> None:
    given = plan("--model", models(family).path, *flags)
    assert given.returncode != 0
    assert told in given.stderr


def test_the_plan_of_a_traffic_finds_the_replicas_itself(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 300, "output_length": 9, "hash_ids": [1]}\n')
    traffic = ("--trace", trace, "--sim-profile", "h100-llama-3.1-8b", "--slo", "ttft:500")
    for flags, told in (
        (("--dp-size", "2"), "a plan for traffic computes the number of replicas"),
        (("--tp-size", "2", "--enable-expert-parallel"), "--enable-expert-parallel needs --model"),
        (("--device-memory", "80"), "cannot be used with"),
        (("--dtype", "float32"), "cannot be used with"),
    ):
        refused = plan(*traffic, *flags)
        assert refused.returncode != 0
        assert told in refused.stderr
    assert plan(*traffic, "--tp-size", "2").returncode == 0
    assert "--trace" in plan("--slo", "ttft:500").stderr
    assert "cannot be used with" in plan(*traffic, "--model", tmp_path).stderr


def test_an_interpreter_without_the_package_is_told(models: Models, tmp_path: Path) -> None:
    # A virtual environment in which no package is installed.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    given = plan("--model", models("llama").path, "--device-memory", "8", "--python", tmp_path / "bin" / "python")
    assert given.returncode != 0
    assert "has no forebay: run `pip install 'forebay[torch]'`" in given.stderr
    assert "Traceback" not in given.stderr


def test_the_best_split_of_a_traffic_is_found(tmp_path: Path) -> None:
    # Long prompts beside long answers: when they share steps, tokens are late.
    entries = [
        {"timestamp": 100 * at, "input_length": 12_000 if at % 3 else 300, "output_length": 60 if at % 3 else 400}
        for at in range(300)
    ]
    trace, output = tmp_path / "trace.jsonl", tmp_path / "plan.json"
    trace.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    flags = (
        "--trace",
        trace,
        "--sim-profile",
        "h100-llama-3.1-8b",
        "--slo",
        "ttft:3000",
        "--slo",
        "tpot:14",
        "--router",
        "least-loaded",
    )
    given = plan(*flags, "--pd", "auto", "--max-replicas", "4", "--output-file", output)
    assert given.returncode == 0, given.stderr
    found = json.loads(output.read_text())
    both, *splits = found["tried"]
    assert "pd" not in both
    assert [outcome["pd"]["split"]["prefill"] for outcome in splits] == [1, 2, 3]
    assert all(outcome["completed"] == 300 for outcome in found["tried"])
    best = max(splits, key=lambda outcome: (outcome["goodput"], -outcome["ttft_ms"]["p90"]))
    assert (found["split"], found["answer"]) == (best["pd"]["split"], None)
    assert best["pd"]["handed"] == 200
    assert best["goodput"] > both["goodput"]
    assert f"Best split: {found['split']['prefill']}:{found['split']['decode']}" in given.stdout
    one = plan(*flags, "--pd", "1:3", "--output-file", output)
    assert one.returncode == 0, one.stderr
    assert json.loads(output.read_text())["tried"] == [both, splits[0]]
    for more, why in [
        (("--pd", "1:0"), "expected auto, or a split such as 1:2"),
        (("--pd", "auto", "--max-replicas", "1"), "--pd auto: --max-replicas from 2 on"),
        (("--pd", "1:1", "--hicache-write-policy", "write_back"), "--hicache-write-policy has to be write_through"),
        (("--pd", "1:1", "--hicache-ratio", "0"), "--pd: it needs a host tier"),
    ]:
        refused = plan(*flags, *more)
        assert refused.returncode != 0
        assert why in refused.stderr
