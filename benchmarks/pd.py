"""Streams beside long prompts on two cores: with and without separate prefill, with and without a bound of gaps.

    python -m benchmarks.pd --rounds 3  # 15 minutes

SmolLM2-135M, eight streams. Prompts of 4000 tokens come one after the other, each as soon as the one before has its two
tokens. Where there are two hands, each has a thread. Each server first runs the streams alone, then beside prompts.
"""

from __future__ import annotations

import json
import random
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise, takewhile
from statistics import median

from benchmarks import compare, models, records
from benchmarks.cells import markdown, number, spread, table_of
from benchmarks.load import start
from benchmarks.processes import ServerError
from benchmarks.records import Results, Run
from benchmarks.servers import SERVED_NAME, Forebay, Setting

STREAMS = 8
TOKENS = 512
PROMPT = 4000
SECONDS = 60
"""Streams are ended after this many seconds: without a bound of gaps they would take a quarter of an hour."""
WORKLOAD = "8 streams beside prompts of 4000"
SETTING = Setting(model="smollm2", streams=STREAMS + 4, context=4608, step_tokens=1024, pool=32_768)
OFF = ("--decode-gap-ms", "off")
STATES: dict[str, tuple[int, tuple[str, ...]]] = {
    "--pd 1:1": (1, ("--pd", "1:1")),
    "--pd 1:1 --decode-gap-ms off": (1, ("--pd", "1:1", *OFF)),
    "--dp-size 2": (1, ("--dp-size", "2")),
    "--dp-size 2 --decode-gap-ms off": (1, ("--dp-size", "2", *OFF)),
    "one replica": (2, ()),
    "one replica, --decode-gap-ms off": (2, OFF),
}
"""The threads of each hand, and the flags."""


def stream(url: str, prompt: list[int], tokens: int) -> Iterator[float]:
    """The times at which the tokens of an answer arrive."""
    body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    data = json.dumps({**body, "stream": True}).encode()
    request = urllib.request.Request(url + "/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        for line in response:
            if line.startswith(b"data: {"):
                yield time.perf_counter()


def gaps(url: str, chance: random.Random) -> list[float]:
    """The milliseconds between successive tokens of streams, while all of them run, in ascending order."""
    prompts = [[chance.randrange(1000, 40_000) for _ in range(64)] for _ in range(STREAMS)]
    end = time.perf_counter() + SECONDS

    def follow(prompt: list[int]) -> list[float]:
        return list(takewhile(lambda now: now < end, stream(url, prompt, TOKENS)))

    with ThreadPoolExecutor(STREAMS) as pool:
        times = list(pool.map(follow, prompts))
    first, last = max(found[0] for found in times), min(found[-1] for found in times)
    pairs = [pair for found in times for pair in pairwise(found)]
    return sorted(1e3 * (after - before) for before, after in pairs if first <= before and after <= last)


def measure(url: str, chance: random.Random) -> dict[str, float]:
    """Gaps of the streams alone and beside prompts, and the time of a prompt's first token."""
    alone = gaps(url, chance)
    over = threading.Event()
    waits: list[float] = []

    def prompts() -> None:
        while not over.is_set():
            began = time.perf_counter()
            first, *_ = stream(url, [chance.randrange(1000, 40_000) for _ in range(PROMPT)], 2)
            waits.append(1e3 * (first - began))

    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(prompts)
        while not waits and not job.done():
            time.sleep(0.01)
        beside = gaps(url, chance)
        over.set()
        job.result()

    def at(found: list[float], share: float) -> float:
        return found[int(len(found) * share)]

    return {
        "alone_p50_ms": at(alone, 0.5),
        "alone_p99_ms": at(alone, 0.99),
        "p50_ms": at(beside, 0.5),
        "p99_ms": at(beside, 0.99),
        "max_ms": beside[-1],
        "ttft_ms": median(waits),
    }


@table_of("pd")
def table(found: Results) -> str:
    """The gaps of the streams, by the server's flags."""
    head = ["server", "ITL alone p50 ms", "p99", "beside prompts p50 ms", "p99", "most", "p99 by alone"]
    head += ["prompts' TTFT p50 ms", "p99 by one replica"]
    keys = ("alone_p50_ms", "alone_p99_ms", "p50_ms", "p99_ms", "max_ms")
    rows = []
    for name in found.servers(WORKLOAD):
        cells = [number(found.median(WORKLOAD, name, key)) for key in keys]
        by_alone = records.paired_ratio(
            found.by_round(WORKLOAD, name, "p99_ms"), found.by_round(WORKLOAD, name, "alone_p99_ms")
        )
        ttft = number(found.median(WORKLOAD, name, "ttft_ms"))
        rows.append(
            [name, *cells, spread(by_alone), ttft, spread(found.ratio(WORKLOAD, name, "one replica", "p99_ms"))]
        )
    return markdown(head, rows)


def main() -> None:
    """Runs the command line."""
    flags = compare.parser("Streams beside long prompts, with prefill apart from decode and without.", rounds=3)
    flags.add_argument("--only", choices=list(STATES), nargs="+", default=list(STATES), help="servers to measure")
    chosen = flags.parse_args()
    models.build(force=False)
    found = records.new("pd", chosen.rounds)
    found.notes = {
        "Setting": f"SmolLM2-135M, bfloat16, {STREAMS} streams of {TOKENS} tokens or {SECONDS} s, steps of 1024 tokens"
    }
    for turn, name in records.in_turn(chosen.rounds, chosen.only):
        threads, arguments = STATES[name]
        server = Forebay(name, "forebay-chat", flags=arguments, prefix_cache=True)
        try:
            running = start(server, replace(SETTING, threads=threads))
        except ServerError as error:
            compare.leave_out(found, name, error)
            continue
        with running:
            values = measure(running.url, random.Random(turn))
            found.runs.append(Run(WORKLOAD, name, turn, values))
            compare.say(f"  round {turn} {name}: {values}")
    compare.finish(found, chosen.output)


if __name__ == "__main__":
    main()
