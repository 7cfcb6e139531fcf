from __future__ import annotations

import pytest

from benchmarks import models, quantised, tables
from benchmarks.records import Results, Run
from benchmarks.servers import Setting


@pytest.mark.parametrize("model", list(quantised.RESULTS))
def test_both_servers_are_given_the_same_file(model: str) -> None:
    setting, file = Setting(model=model, streams=2), quantised.File(model, "Q4_0")
    for server in quantised.servers(file):
        command = server.command(setting, 8000)
        assert command.count(str(file.path)) == 1
        assert str(models.gguf_file(model)) not in command
        assert str(models.directory(model)) not in command


@pytest.mark.parametrize("model", list(quantised.RESULTS))
def test_every_format_has_the_same_workloads(model: str) -> None:
    names = [
        [load.name.partition(": ")[2] for load in quantised.workloads(quantised.File(model, kind), [1, 8])]
        for kind in ("Q4_0", "Q8_0")
    ]
    assert names[0] == names[1] == ["prefill 1024/1, 1 at a time", "256/128, 1 at a time", "256/128, 8 at a time"]


def test_the_table_has_rates_and_perplexities_together() -> None:
    machine = {"cpu": "c", "cores": 2, "memory_gib": 1, "kernel": "6", "python": "3", "torch": "2", "forebay": "0"}
    found = Results(benchmark="quantised", machine={**machine, "commit": "abc"}, rounds=1)
    for server, factor in (("forebay", 1.0), ("llama-server", 2.0)):
        found.runs.append(Run("Q4_0: perplexity", server, 1, {"perplexity": 10.0 * factor}))
        found.runs.append(Run("Q8_0: perplexity", server, 1, {"perplexity": 9.0 * factor}))
        rates = {"output_throughput": 100.0 / factor, "input_throughput": 1.0}
        found.runs.append(Run("Q4_0: 256/128, 1 at a time", server, 1, rates))
        rates = {"output_throughput": 1.0, "input_throughput": 3000.0 / factor}
        found.runs.append(Run("Q4_0: prefill 1024/1, 1 at a time", server, 1, rates))
    rows = [line for line in tables.render(found).splitlines() if line.startswith("| Q")]
    assert rows == [
        "| Q4_0 | perplexity | 10.000 | 20.000 | - |",
        "| Q4_0 | 256/128, 1 at a time | 100 | 50.0 | 2.00 |",
        "| Q4_0 | prefill 1024/1, 1 at a time | 3000 | 1500 | 2.00 |",
        "| Q8_0 | perplexity | 9.000 | 18.000 | - |",
    ]


def test_the_table_of_keys_and_values_has_steps_and_then_perplexities() -> None:
    machine = {"cpu": "c", "cores": 2, "memory_gib": 1, "kernel": "6", "python": "3", "torch": "2", "forebay": "0"}
    found = Results(benchmark="kv_cache", machine={**machine, "commit": "abc"}, rounds=1)
    for kind, factor in (("bfloat16", 1.0), ("int8", 0.5)):
        found.runs.append(Run("m: perplexity", kind, 1, {"perplexity": 3.0 / factor, "token_bytes": 512 * factor}))
        found.runs.append(Run("m: 8 rows behind 256", kind, 1, {"step_ms": 20.0 * factor}))
    rows = [line for line in tables.render(found).splitlines() if line.startswith("| m |")]
    assert rows == ["| m | 8 rows behind 256 | 20.0 | 10.0 | 2.00 |", "| m | 3.0000 | 6.0000 | +100.00% | 512 | 256 |"]
