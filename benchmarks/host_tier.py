"""The host tier: the gain of a second turn, the cost of saving, and the loss by preemption.

    python -m benchmarks.host_tier --rounds 5

*turn*: a small real model, a KV pool that holds two conversations, and four conversations in turn. Measured is the time
to the first token of a turn whose 1024 tokens were evicted before, and with the tier the time to copy them back. On a
CPU, device and host share memory: the ratio to recomputing is real, but the speed of a copy is not that of a bus.
*write*: a simulated device that takes no time, and prompts that never come again: the brain's CPU time per token.
*overload*: the real model with more requests than its pool holds, compared with `--preemption recompute`.
"""

from __future__ import annotations

import http.client
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks import compare, models, records
from benchmarks.cells import markdown, number, spread, table_of
from benchmarks.load import Workload, load, start
from benchmarks.processes import Running, ServerError
from benchmarks.records import Results
from benchmarks.servers import FOREBAY_CPU, FOREBAY_SIM, SERVED_NAME, Forebay, Setting

OFF, TIER, RECOMPUTE = "off", "tier", "recompute"
FLAGS = ("--enable-hierarchical-cache", "--hicache-ratio", "4")
CONVERSATIONS = 4
TURNS = 12
SHARED = 1024
"""Tokens of a conversation before its next turn."""
ANSWER = 4
"""Tokens of an answer."""

TURN = Workload(
    "turn",
    Setting(model="smollm2", streams=2, context=1200, step_tokens=1024, threads=1),
    SHARED,
    ANSWER,
    requests=CONVERSATIONS * TURNS,
)
WRITE = Workload("write", Setting(model="tiny", streams=64, context=1024, threads=1), 512, 128, requests=1024)
OVERLOAD = Workload(
    "overload",
    # The pool holds half of the tokens that eight requests have at the end.
    Setting(model="smollm2", streams=8, context=512, step_tokens=512, threads=1, pool=1300),
    128,
    180,
    requests=16,
    warmup=1,
)


def real(name: str, *flags: str) -> Forebay:
    """A server with a real hand and a prefix cache."""
    return replace(FOREBAY_CPU, name=name, prefix_cache=True, flags=flags)


def simulated(name: str, *flags: str) -> Forebay:
    """A server with a simulated device and a prefix cache."""
    return replace(FOREBAY_SIM, name=name, prefix_cache=True, flags=flags)


def metrics(running: Running) -> dict[str, float]:
    """Every value of /metrics, by its name and, for copies, the label that tells them apart."""
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    finally:
        connection.close()
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            key, _, value = line.rpartition(" ")
            name, _, labels = key.partition("{")
            way = labels.partition('transfer_type="')[2].partition('"')[0]
            found[f"{name} {way}".strip()] = float(value)
    return found


def first_token_ms(running: Running, prompt: list[int]) -> float:
    """Time to the first chunk of a streamed answer. Raises ServerError."""
    body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=120)
    try:
        begun = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        line = answer.readline()
        taken = time.perf_counter() - begun
        if answer.status != 200:
            raise ServerError(f"status {answer.status}: {line!r}")
        answer.read()
    finally:
        connection.close()
    return 1000 * taken


def prompts() -> Iterator[list[int]]:
    """Conversations, each of which is 7 tokens longer at its next turn."""
    for turn in range(TURNS):
        for who in range(CONVERSATIONS):
            shared = [1000 + (97 * who + 31 * at) % 20000 for at in range(SHARED)]
            yield shared + [3000 + (turn * 13 + at) % 500 for at in range(7)]


def measure_turns(side: Forebay, workload: Workload) -> dict[str, Any]:
    """All turns on a fresh server, without the first one of each conversation. Raises ServerError."""
    with start(side, workload.setting) as running:
        begun = time.perf_counter()
        taken = [first_token_ms(running, prompt) for prompt in prompts()]
        seconds = time.perf_counter() - begun
        found = metrics(running)
    restores = found.get("forebay:restores_total", 0.0)
    copying = found.get("vllm:kv_offload_total_time_total CPU_to_GPU", 0.0)
    steps = found["forebay:steps_total"]
    return {
        "median_ttft_ms": statistics.median(taken[CONVERSATIONS:]),
        "copy_ms_per_restore": 1000 * copying / restores if restores else 0.0,
        "step_ms": 1000 * found["forebay:device_busy_seconds_total"] / steps,
        "output_throughput": ANSWER * len(taken) / seconds,
        "restores": restores,
        "restored_tokens": found.get("sglang:load_back_tokens_total", 0.0),
    }


def measure_overload(side: Forebay, workload: Workload) -> dict[str, Any]:
    """An overload of a fresh server: more requests than its pool holds. Raises ServerError."""
    with start(side, workload.setting) as running:
        values = load(side, workload, running)
        found = metrics(running)
    preemptions = found["vllm:num_preemptions_total"]
    return {
        **values,
        "preemptions": preemptions,
        "recomputed_per_preemption": found["forebay:recomputed_tokens_total"] / max(1.0, preemptions),
    }


def measure_write(side: Forebay, workload: Workload) -> dict[str, Any]:
    """Prompts that never occur again, on a fresh server. Raises ServerError."""
    with start(side, workload.setting) as running:
        return load(side, workload, running)


@table_of("host_tier")
def table(found: Results) -> str:
    """The gain of the tier at a second turn and at an overload, and the cost of saving."""
    rows = [
        [
            "second turn, TTFT ms",
            number(found.median("turn", "off", "median_ttft_ms")),
            number(found.median("turn", "tier", "median_ttft_ms")),
            spread(found.ratio("turn", "tier", "off", "median_ttft_ms")),
        ],
        [
            "of that copying, ms",
            "-",
            number(found.median("turn", "tier", "copy_ms_per_restore")),
            "-",
        ],
        [
            "brain, CPU us a token, nothing to reuse",
            number(found.median("write", "off", "server_cpu_us_per_token")),
            number(found.median("write", "tier", "server_cpu_us_per_token")),
            spread(found.ratio("write", "tier", "off", "server_cpu_us_per_token")),
        ],
        [
            "overload, tokens computed again a preemption",
            number(found.median("overload", "recompute", "recomputed_per_preemption")),
            number(found.median("overload", "tier", "recomputed_per_preemption")),
            "-",
        ],
        [
            "overload, output tokens/s",
            number(found.median("overload", "recompute", "output_throughput")),
            number(found.median("overload", "tier", "output_throughput")),
            spread(found.ratio("overload", "tier", "recompute", "output_throughput")),
        ],
    ]
    return markdown(["", "without", "with the tier", "ratio (least-most)"], rows)


def main() -> None:
    """Runs the command line."""
    asked = compare.parser("What the host tier gives and costs.", rounds=5).parse_args()
    found = records.new("host_tier", asked.rounds)
    models.build(force=False)
    compare.measure_in_turn(found, TURN, [real(OFF), real(TIER, *FLAGS)], asked.rounds, measure_turns)
    compare.measure_in_turn(found, WRITE, [simulated(OFF), simulated(TIER, *FLAGS)], asked.rounds, measure_write)
    sides = [real(RECOMPUTE, *FLAGS, "--preemption", "recompute"), real(TIER, *FLAGS)]
    compare.measure_in_turn(found, OVERLOAD, sides, asked.rounds, measure_overload)
    records.save(found, asked.output)
    print(table(found))


if __name__ == "__main__":
    main()
