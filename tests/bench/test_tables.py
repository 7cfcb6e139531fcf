from __future__ import annotations

import re
from typing import Any

import pytest

from benchmarks import (
    ablations,
    chart,
    cpu_model,
    egress,
    host_ceiling,
    intake,
    records,
    router,
    servers,
    tables,
)
from benchmarks.beside import client_share
from benchmarks.cells import number, spread
from benchmarks.records import Ratio, Results, Run
from benchmarks.servers import ROOT
from benchmarks.studies import agreement, profile
from tests.bench.measured import measured, values


@pytest.mark.parametrize(("value", "shown"), [(None, "-"), (12345.6, "12346"), (43.21, "43.2"), (0.123, "0.12")])
def test_numbers_have_three_digits_or_more(value: float | None, shown: str) -> None:
    assert number(value) == shown


def test_a_ratio_shows_its_spread_if_it_has_one() -> None:
    assert spread(Ratio(2.0, 1.5, 2.25)) == "2.00 (1.50-2.25)"
    assert spread(Ratio(2.0, 1.999, 2.001)) == "2.00"
    assert spread(None) == "-"


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines() if row.startswith("|")]


def test_the_host_table_has_a_row_for_each_server_and_our_ratio_to_it() -> None:
    ours, peer = servers.FOREBAY_CPU.name, servers.VLLM.name
    found = measured(
        "host_ceiling",
        [
            ("64", ours, 1, values(200.0)),
            ("64", peer, 1, values(100.0, client_cpu_us_per_token=5.0)),
            ("64", ours, 2, values(90.0)),
            ("64", peer, 2, values(30.0)),
        ],
    )
    head, _, first, second = cells(host_ceiling.table(found))
    assert [len(row) for row in (first, second)] == [len(head)] * 2
    assert head[-1] == f"{ours} / this"
    assert (first[1], first[2], first[-1]) == (ours, "145", "1.00")
    assert (second[1], second[2], second[-1]) == (peer, "65.0", "2.50 (2.00-3.00)")
    assert first[head.index("of which")] == "python 8.00, brain 2.00"
    assert first[head.index("chunks/s")] == "72.5"


def test_a_client_that_uses_more_than_a_third_is_marked() -> None:
    runs = [("64", name, 1, values(1.0, client_cpu_us_per_token=cpu)) for name, cpu in [("a", 2.0), ("b", 4.0)]]
    found = measured("host_ceiling", runs)
    assert client_share(found, "64", "a") == "20%"
    assert client_share(found, "64", "b") == "40% (!)"


def test_prefill_counts_input_tokens() -> None:
    name = servers.FOREBAY_CPU.name
    generation, prefill = cpu_model.generation(8).name, cpu_model.prefill(1).name
    found = measured(
        "cpu_model",
        [
            (generation, name, 1, values(200.0, input_throughput=1.0)),
            (prefill, name, 1, values(1.0, input_throughput=300.0)),
        ],
    )
    rows = [row for row in cells(cpu_model.table(found)) if row[0] in (generation, prefill)]
    assert [row[:3] for row in rows] == [[generation, name, "200"], [prefill, name, "300"]]


def test_an_ablation_is_on_by_off() -> None:
    case = "lookahead: chat"
    found = measured("ablations", [(case, "on", 1, values(300.0)), (case, "off", 1, values(200.0, mean_itl_ms=4.0))])
    found.elsewhere = {"lookahead": "x1.20"}
    _, _, row = cells(ablations.table(found))
    assert row == ["lookahead", "chat", "300", "200", "1.50", "1.00", "0.50", "1.00", "-", "-", "x1.20"]


def test_agreement_shows_our_number_by_theirs() -> None:
    found = measured("agreement", [("w", "ours", 1, values(101.0)), ("w", "theirs", 1, values(100.0))])
    _, _, ours, theirs = cells(agreement.table(found))
    assert ours[:3] == ["w", "ours", "101"]
    assert theirs[:3] == ["w", "theirs", "100 [1.01]"]


def test_the_intake_table_compares_with_the_row_without_a_burst() -> None:
    gaps = {"median_itl_ms": 5.1, "max_itl_ms": 9.0}
    quiet = values(1.0, p99_itl_ms=6.0, slowest_of_burst_ms=None, **gaps)
    found = measured(
        "intake",
        [
            ("64", "no burst", 1, quiet),
            ("64", "burst", 1, values(1.0, p99_itl_ms=9.0, slowest_of_burst_ms=450.0, **gaps)),
        ],
    )
    _, _, first, second = cells(intake.table(found))
    assert first == ["64", "no burst", "5.10", "6.00", "9.00", "1.00", "-"]
    assert second == ["64", "burst", "5.10", "9.00", "9.00", "1.50", "450"]


def test_the_profile_adds_up() -> None:
    groups = {"a": 6.0, "b": 2.0, "c": 0.001}
    found = measured("profile", [("2048 streams", "direct", 1, values(1.0, groups_us_per_token=groups))])
    text = profile.table(found)
    assert "| a | 6.00 | 75% |" in text
    assert "| all, 2048 streams | 8.00 |  |" in text
    assert "| c |" not in text


def test_the_cost_of_a_chunk_is_compared_with_the_first() -> None:
    def cost(us: float) -> dict[str, Any]:
        return values(1.0, server_cpu_us_per_token=us, server_user_us_per_token=us / 4, p99_itl_ms=3.0)

    runs = [("64", "direct", 1, cost(8.0)), ("64", "naive", 1, cost(12.0))]
    text = egress.table(measured("egress", runs))
    assert "| 64 | direct | 8.00 | 2.00 | - | 0.50 | 2.00 | 3.00 | 1.00 |" in text
    assert "| 64 | naive | 12.0 | 3.00 | - | 0.50 | 2.00 | 3.00 | 1.50 |" in text


def test_the_router_table_compares_with_the_first_row() -> None:
    values = {"p99_ttft_ms": 10.0, "output_throughput": 100.0, "most": 25}
    other = {"p99_ttft_ms": 20.0, "output_throughput": 50.0}
    found = Results(
        "router",
        runs=[Run("seed", "ours", 1, values), Run("seed", "theirs", 1, other)],
    )
    _, _, first, second = cells(router.table(found))
    assert (first[4], second[4], second[7]) == ("1.00", "0.50", "2.00")
    assert (first[8], second[8]) == ("25.0", "-")


def test_what_was_left_out_is_said_below_the_table() -> None:
    found = measured("host_ceiling", [("64", "a", 1, values(1.0))])
    found.skipped = {"vllm": "make bench-setup PEERS=vllm installs it"}
    assert "Left out: vllm (make bench-setup PEERS=vllm installs it)." in tables.render(found)
    assert "A CPU, 2 cores" in tables.render(found)


def test_a_document_is_filled_where_there_are_results_and_nowhere_else() -> None:
    document = "a\n<!-- bench:x -->\nold\nlines\n<!-- /bench -->\nb\n<!-- bench:y -->\nkept\n<!-- /bench -->\n"
    filled = tables.fill(document, {"x": r"| new \1 |"})
    assert filled == document.replace("old\nlines", r"| new \1 |")
    assert tables.fill(filled, {"x": r"| new \1 |"}) == filled


def test_the_pages_and_the_chart_show_what_the_committed_results_say() -> None:
    rendered = tables.committed(records.RESULTS)
    texts = [page.read_text(encoding="utf-8") for page in sorted(tables.PAGES.glob("*.md"))]
    assert [tables.fill(text, rendered) for text in texts] == texts
    shown = [name for text in texts for name in re.findall(r"<!-- bench:([\w-]+) -->", text)]
    assert sorted(shown) == sorted(tables.registered())
    results = {name: records.read(records.RESULTS / f"{name}.json") for name in ("host_ceiling", "cpu_model")}
    assert chart.draw(results) == chart.TARGET.read_text(encoding="utf-8")


def test_no_benchmark_needs_a_study() -> None:
    imports = re.compile(r"(from|import) benchmarks\.studies|from benchmarks import .*\bstudies\b")
    studies = [path for path in sorted((ROOT / "benchmarks").glob("*.py")) if imports.search(path.read_text())]
    assert [path.name for path in studies] == []
    assert any("from benchmarks import" in path.read_text() for path in (ROOT / "benchmarks/studies").glob("*.py"))
