"""Benchmarks of two builds of Forebay in turns: which processes start, and the table."""

from __future__ import annotations

from pathlib import Path

from benchmarks.records import Results, Run
from benchmarks.servers import FOREBAY_SIM, Setting
from benchmarks.studies import build_turns


def test_each_side_starts_its_own_build() -> None:
    old, new = build_turns.sides(FOREBAY_SIM, Path("/old/forebay"), Path("/new/forebay"))
    setting = Setting(model="tiny", streams=8)
    assert [old.command(setting, 1)[0], new.command(setting, 1)[0]] == ["/old/forebay", "/new/forebay"]
    assert old.command(setting, 1)[1:] == new.command(setting, 1)[1:]
    assert old.missing() == "/old/forebay is not there: make build"


def test_the_router_is_left_out_where_nobody_asks_for_it() -> None:
    assert [one.name for one in build_turns.workloads([64, 1024], 0)] == ["64", "1024"]
    with_router = build_turns.workloads([64], 32)
    assert [(one.name, one.setting.streams) for one in with_router] == [("64", 64), (build_turns.ROUTER, 32)]


def test_the_table_pairs_runs_of_the_same_round() -> None:
    found = Results("build_turns")
    for number, (old, new) in enumerate([(2.0, 1.0), (40.0, 50.0), (3.0, 3.0)], 1):
        for server, value in ((build_turns.OLD, old), (build_turns.NEW, new)):
            found.runs.append(Run("64", server, number, {build_turns.KEY: value}))
    row = "| 64 streams | CPU us a token | 3.00 | 3.00 | 1.00 (0.50-1.25) |"
    assert build_turns.table(found).splitlines()[2:] == [row]


def test_a_models_rate_of_prompts_is_that_of_its_input() -> None:
    found = Results("build_turns")
    decode, _, prompts = [workload.name for workload in build_turns.model_workloads("smollm2")]
    for name, key in ((decode, "output_throughput"), (prompts, "input_throughput")):
        for server, value in ((build_turns.OLD, 100.0), (build_turns.NEW, 150.0)):
            found.runs.append(Run(name, server, 1, {key: value}))
    assert build_turns.table(found).splitlines()[2:] == [
        f"| {decode} | tokens a second | 100 | 150 | 1.50 |",
        f"| {prompts} | tokens a second | 100 | 150 | 1.50 |",
    ]
