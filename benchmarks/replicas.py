"""Four replicas in one brain: how evenly each policy spreads requests, and what that is worth.

    python -m benchmarks.replicas --rounds 3 --only rounds tails

The hands are simulated (an H100 with Llama-3.1-8B by its data sheet), so that only the assignment of requests differs.
The number of requests of each replica is polled; its maximum is the server's own count.
"""

from __future__ import annotations

import http.client
import json
import random
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import compare, models, records
from benchmarks.cells import markdown, number, spread, table_of
from benchmarks.load import Workload, client_command, kept, run_client, start
from benchmarks.processes import ServerError
from benchmarks.records import Results
from benchmarks.servers import ROOT, Forebay, Server, Setting

REPLICAS = 4
CLIENTS = 100
H100 = "h100-llama-3.1-8b"
HALF_SPEED = str(ROOT / "benchmarks/profiles/h100-llama-3.1-8b-half-speed.toml")
SAMPLE_SECONDS = 0.02
PATIENCE_SECONDS = 10.0
SETTING = Setting(model="smollm2", streams=CLIENTS, context=8192, step_tokens=8192)
MORE_KEPT = ("p99_tpot_ms", "p99_e2e_latency_ms")
"""The keys that are kept beside those of `load.KEPT`."""


@dataclass(frozen=True)
class Scenario:
    """The requests that are sent, and their target."""

    key: str
    workload: Workload
    profiles: tuple[str, ...] = (H100,)
    """Profiles of the simulated devices: one for all, or one for each."""
    tail: bool = False
    """Lengths are drawn from a distribution with a heavy tail."""


def _scenario(key: str, name: str, requests: int, *arguments: str, **more: Any) -> Scenario:
    workload = Workload(name, SETTING, 500, 300, requests=requests, warmup=REPLICAS, arguments=arguments)
    return Scenario(key, workload, **more)


PREFIXES = (
    *("--dataset-name", "generated-shared-prefix", "--gsp-num-groups", "24", "--gsp-prompts-per-group", "25"),
    *("--gsp-system-prompt-len", "2048", "--gsp-question-len", "64", "--gsp-output-len", "100"),
)
SCENARIOS = [
    _scenario("rounds", "100 clients, 500 in, 300 out, ending together", 500),
    _scenario("tails", "100 clients, lengths with a heavy tail", 600, tail=True),
    _scenario("prefixes", "100 clients, 24 beginnings of 2048 tokens", 600, *PREFIXES),
    _scenario(
        "slow", "100 clients, 500 in, 300 out, one replica at half speed", 500, profiles=(H100, H100, H100, HALF_SPEED)
    ),
    _scenario("bursts", "bursts, 60 requests/s, 500 in, 300 out", 600, "--request-rate", "60", "--burstiness", "0.05"),
]


@dataclass(frozen=True)
class Policy(Forebay):
    """Forebay with one load-balancing policy."""

    prefix_cache: bool = True
    method: str = "prefix_aware"
    watch_seconds: float = 0.0
    """Seconds between two readings of the loads; 0 if they are exact."""

    def of(self, scenario: Scenario) -> Policy:
        """The same policy on the devices of a scenario."""
        flags: tuple[str, ...] = ("--dp-size", str(REPLICAS), "--load-balance-method", self.method)
        if self.watch_seconds:
            flags += ("--load-watch-interval", str(self.watch_seconds))
        return replace(self, profile=",".join(scenario.profiles), flags=flags)


POLICIES = [
    Policy("prefix_aware", "forebay-chat"),
    Policy("shortest_queue", "forebay-chat", method="shortest_queue"),
    Policy("total_tokens", "forebay-chat", method="total_tokens"),
    Policy("round_robin", "forebay-chat", method="round_robin"),
    Policy("polled every 0.1 s", "forebay-chat", method="shortest_queue", watch_seconds=0.1),
    Policy("polled every 1 s", "forebay-chat", method="shortest_queue", watch_seconds=1.0),
]


@dataclass
class Sampler:
    """A thread that polls the number of requests of each replica."""

    port: int
    counts: list[list[int]] = field(default_factory=list)
    """A list for each sample: the requests of each replica."""
    peaks: list[int] = field(default_factory=list)
    """The most requests that each replica had, by the server's own count at the last sample."""
    error: Exception | None = None

    def __enter__(self) -> Sampler:
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_SECONDS)
        try:
            while not self._ending.wait(SAMPLE_SECONDS):
                self._look(connection)
            self._look(connection)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.error = error
        finally:
            connection.close()

    def _look(self, connection: http.client.HTTPConnection) -> None:
        connection.request("GET", "/server_info")
        states = json.loads(connection.getresponse().read())["internal_states"]
        self.counts.append([state["requests"] for state in states])
        self.peaks = [state["requests_peak"] for state in states]


def balance(counts: Sequence[Sequence[int]], peaks: Sequence[int]) -> dict[str, float]:
    """The most requests at one replica, and the mean difference between the fullest and the emptiest."""
    busy = [sample for sample in counts if sum(sample) > 0]
    return {
        "most_at_one": float(max(peaks, default=0)),
        "mean_spread": fmean(max(sample) - min(sample) for sample in busy) if busy else 0.0,
    }


def heavy_tail(path: Path, requests: int, seed: int) -> None:
    """A dataset of log-normal lengths: medians of 200 words and 100 tokens, one in a hundred ten times as long."""
    draw = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(requests):
            words = min(6000, max(4, int(draw.lognormvariate(5.3, 1.0))))
            tokens = min(1500, max(1, int(draw.lognormvariate(4.6, 1.0))))
            prompt = " ".join(draw.choice(("river", "stone", "light", "wind", "seven", "green")) for _ in range(words))
            file.write(json.dumps({"prompt": prompt, "output_tokens": tokens}) + "\n")


def measure(scenario: Scenario, server: Server, workload: Workload, number: int = 0) -> dict[str, Any]:
    """Runs one load while polling the replicas. Returns the kept keys. Raises ServerError."""
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as folder:
        if scenario.tail:
            dataset = Path(folder) / "tail.jsonl"
            heavy_tail(dataset, workload.requests, seed=number)
            arguments = ("--dataset-name", "custom", "--dataset-path", str(dataset))
            workload = replace(workload, arguments=(*workload.arguments, *arguments))
        output = Path(folder) / "run.jsonl"
        with start(server, workload.setting) as running, Sampler(running.port) as sampler:
            run_client(client_command(server, workload, running.url, running.pid, output))
        if sampler.error:
            raise ServerError(f"{server.name}: /server_info: {sampler.error}")
        run = json.loads(output.read_text(encoding="utf-8").splitlines()[-1])
    if run["failed"] or run["completed"] != workload.requests:
        raise ServerError(f"{server.name}: {run['failed']} of {workload.requests} requests failed: {run['errors']}")
    return kept(run) | {key: run[key] for key in MORE_KEPT} | balance(sampler.counts, sampler.peaks)


@table_of("replicas")
def table(found: Results) -> str:
    """The evenness of each policy, and its latencies; the ratios are to the first policy's."""
    head = [
        "scenario",
        "replica chosen by",
        "most at one",
        "mean spread",
        "P99 TTFT ms",
        "TPOT ms",
        "P99 TPOT ms",
        "tokens/s",
    ]
    head += ["tokens/s / first", "P99 TTFT / first"]
    keys = ("most_at_one", "mean_spread", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms", "output_throughput")
    rows = []
    for workload in found.workloads():
        first = found.servers(workload)[0]
        for server in found.servers(workload):
            cells = [number(found.median(workload, server, key)) for key in keys]
            cells += [spread(found.ratio(workload, server, first, key)) for key in ("output_throughput", "p99_ttft_ms")]
            rows.append([workload, server, *cells])
    return markdown(head, rows)


def main() -> None:
    """Runs the command line."""
    flags = compare.parser("How each policy spreads requests over four replicas.", rounds=3)
    keys = [scenario.key for scenario in SCENARIOS]
    flags.add_argument("--only", choices=keys, nargs="+", default=keys, metavar="SCENARIO", help=", ".join(keys))
    chosen = flags.parse_args()
    found = records.new("replicas", chosen.rounds)
    models.build(force=False)
    for scenario in SCENARIOS:
        if scenario.key in chosen.only:
            policies = [policy.of(scenario) for policy in POLICIES]
            compare.measure_in_turn(
                found,
                scenario.workload,
                policies,
                chosen.rounds,
                lambda server, workload, scenario=scenario: measure(scenario, server, workload),  # type: ignore[misc]
            )
    compare.finish(found, chosen.output)


if __name__ == "__main__":
    main()
