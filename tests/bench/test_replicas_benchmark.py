"""The benchmark of replicas: the commands, the computed values, and the sampler of a server's metrics."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import pytest

from benchmarks import replicas
from benchmarks.records import Results, Run


def test_balance_is_the_servers_peak_and_the_mean_of_the_spreads() -> None:
    counts = [[0, 0], [25, 25], [28, 22], [3, 0]]
    assert replicas.balance(counts, [28, 26]) == {"most_at_one": 28.0, "mean_spread": 3.0}
    assert replicas.balance([], []) == {"most_at_one": 0.0, "mean_spread": 0.0}


@pytest.mark.parametrize("scenario", replicas.SCENARIOS, ids=lambda scenario: scenario.key)
def test_every_policy_is_started_with_its_flags(scenario: replicas.Scenario) -> None:
    for policy in replicas.POLICIES:
        command = policy.of(scenario).command(scenario.workload.setting, 1234)

        def value(flag: str, command: list[str] = command) -> str:
            return command[command.index(flag) + 1]

        assert value("--dp-size") == "4"
        assert value("--load-balance-method") == policy.method
        assert len(value("--sim-profile").split(",")) in (1, 4)
        assert ("--load-watch-interval" in command) == (policy.watch_seconds > 0)
        assert "--disable-radix-cache" not in command


def test_lengths_have_a_heavy_tail_and_are_the_same_for_a_seed(tmp_path: Path) -> None:
    replicas.heavy_tail(tmp_path / "a", 500, seed=1)
    replicas.heavy_tail(tmp_path / "b", 500, seed=1)
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text()
    rows = [json.loads(line) for line in (tmp_path / "a").read_text().splitlines()]
    tokens = sorted(row["output_tokens"] for row in rows)
    assert tokens[-1] > 5 * tokens[len(tokens) // 2]
    assert all(row["prompt"] and 1 <= row["output_tokens"] <= 1500 for row in rows)


def test_the_sampler_asks_until_it_is_told_to_stop() -> None:
    looks = [Event() for _ in range(3)]
    states = [{"requests": 3, "requests_peak": 7}, {"requests": 1, "requests_peak": 5}]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            next((look for look in looks if not look.is_set()), looks[-1]).set()
            body = json.dumps({"internal_states": states}).encode()
            self.send_response(200 if self.path == "/server_info" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        with replicas.Sampler(server.server_port) as sampler:
            assert looks[-1].wait(30)
        server.shutdown()
    assert sampler.error is None
    assert len(sampler.counts) >= 3
    assert sampler.counts[0] == [3, 1]
    assert sampler.peaks == [7, 5]


def test_a_server_that_is_gone_is_an_error() -> None:
    with replicas.Sampler(1) as sampler:
        pass
    assert isinstance(sampler.error, OSError)


def test_the_table_compares_with_the_first_policy() -> None:
    found = Results(benchmark="replicas", date="2026-11-21", machine={}, rounds=1)
    for policy, most, throughput in (("prefix_aware", 25.0, 100.0), ("polled", 28.0, 80.0)):
        values = {"most_at_one": most, "mean_spread": 1.0, "output_throughput": throughput}
        values |= {"p99_ttft_ms": 10.0, "mean_tpot_ms": 2.0, "p99_tpot_ms": 3.0}
        found.runs.append(Run(workload="rounds", server=policy, round=1, values=values))
    lines = replicas.table(found).splitlines()
    assert lines[2].startswith("| rounds | prefix_aware | 25.0 |")
    assert lines[3].startswith("| rounds | polled | 28.0 |")
    assert "| 0.80 |" in lines[3]
