"""Adapters on a CPU: tokens a second of the base, of one adapter and of mixtures, and streams beside a load.

    python -m benchmarks.lora  # 6 minutes

A server without adapters and one with eight answer the same prompts, 1 and 8 at a time. Each round has both, in turn.
For the load, an adapter of about 100 MB is loaded while eight other streams run.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

from benchmarks import compare, models, records
from benchmarks.cells import markdown, number, spread, table_of
from benchmarks.load import start
from benchmarks.processes import ServerError
from benchmarks.records import Results, Run
from benchmarks.servers import SERVED_NAME, Forebay, Setting
from scripts.make_adapter import make

FOLDER = models.MODELS / "adapters"
MODEL = "smollm2"
TOKENS = 128
STREAMS = 8
RANK, LARGE_RANK = 16, 80
SECONDS = 600.0
PLAIN, BASE, ONE = "no adapters loaded", "the base", "one adapter"
NAMES = [f"a{at}" for at in range(STREAMS)]
LARGE = "large"


def mixtures(streams: int) -> dict[str, list[str]]:
    """The adapters that the requests of each mixture use."""
    if streams == 1:
        return {BASE: [SERVED_NAME], ONE: NAMES[:1]}
    every = {f"{count} adapters": NAMES[:count] * (streams // count) for count in (4, 8)}
    return {BASE: [SERVED_NAME] * streams, ONE: NAMES[:1] * streams, **every}


def prepare() -> None:
    """Creates the adapters."""
    config = json.loads((models.directory(MODEL) / "config.json").read_text(encoding="utf-8"))
    for at, name in enumerate(NAMES):
        if not (FOLDER / name).is_dir():
            make(config, FOLDER / name, rank=RANK, seed=at)
    if not (FOLDER / LARGE).is_dir():
        make(config, FOLDER / LARGE, rank=LARGE_RANK, seed=len(NAMES))


def stream(url: str, model: str, prompt: str, tokens: int = TOKENS) -> Iterator[float]:
    """The times at which tokens of an answer arrive."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    data = json.dumps({**body, "stream": True}).encode()
    request = urllib.request.Request(url + "/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        for line in response:
            if line.startswith(b"data: {"):
                yield time.perf_counter()


def rate(url: str, names: Sequence[str]) -> float:
    """Tokens a second of concurrent requests, measured once all have their first token."""
    with ThreadPoolExecutor(len(names)) as pool:
        jobs = [pool.submit(list, stream(url, name, f"Story number {at}:")) for at, name in enumerate(names)]
        times = [job.result() for job in jobs]
    first, last = max(found[0] for found in times), min(found[-1] for found in times)
    return sum(first < at <= last for found in times for at in found) / (last - first)


def gaps(url: str, *, load: bool) -> dict[str, float]:
    """The largest and the median gap between tokens of eight streams, with or without a load of an adapter."""
    times: list[list[float]] = [[] for _ in range(STREAMS)]
    loaded: list[tuple[float, float]] = []

    def read(at: int) -> None:
        for moment in stream(url, SERVED_NAME, f"Story number {at}:", 3 * TOKENS):
            times[at].append(moment)

    def bring() -> None:
        begun = time.perf_counter()
        list(stream(url, LARGE, "A", 1))
        loaded.append((begun, time.perf_counter()))

    threads = [threading.Thread(target=read, args=(at,)) for at in range(STREAMS)]
    for thread in threads:
        thread.start()
    while min(len(found) for found in times) < TOKENS // 2:
        time.sleep(0.01)
    begun = time.perf_counter()
    if load:
        bring()
    for thread in threads:
        thread.join()
    found = sorted(after - before for of in times for before, after in pairwise(of) if before >= begun)
    result = {"largest_gap_ms": 1e3 * found[-1], "median_gap_ms": 1e3 * found[len(found) // 2]}
    return {**result, "load_s": loaded[0][1] - loaded[0][0]} if load else result


@table_of("lora")
def table(found: Results) -> str:
    """Tokens a second, and the ratio to the base of the same server and round."""
    rows = []
    for workload in found.workloads():
        if "gap" in workload:
            continue
        for name in found.servers(workload):
            mean = found.median(workload, name, "output_throughput")
            against = spread(found.ratio(workload, name, BASE, "output_throughput"))
            rows.append([f"{workload}: {name}", number(mean), against])
    rates = markdown(["", "tokens/s", "ratio to the base"], rows)
    beside = [
        [name, *(number(found.median("gap", name, key)) for key in ("largest_gap_ms", "median_gap_ms", "load_s"))]
        for name in found.servers("gap")
    ]
    return rates + "\n\n" + markdown(["8 streams", "largest gap, ms", "median gap, ms", "load, s"], beside)


def main() -> None:
    """Runs the command line."""
    flags: Any = compare.parser("Adapters beside the base.", rounds=3)
    chosen = flags.parse_args()
    models.build(force=False)
    prepare()
    found = records.new("lora", chosen.rounds)
    found.notes = {"Model": f"{MODEL}, bfloat16; adapters of all modules, rank {RANK}"}
    modules = [f"{name}={FOLDER / name}" for name in (*NAMES, LARGE)]
    limits = ("--max-loras", str(STREAMS + 1), "--max-lora-rank", str(LARGE_RANK))
    servers = {
        PLAIN: Forebay(PLAIN, "forebay-chat"),
        "adapters": Forebay("adapters", "forebay-chat", flags=("--lora-modules", *modules, *limits)),
    }
    setting = Setting(model=MODEL, streams=2 * STREAMS, context=1024)
    for turn, name in records.in_turn(chosen.rounds, list(servers)):
        try:
            running = start(servers[name], setting)
        except ServerError as error:
            compare.leave_out(found, name, error)
            continue
        with running:
            for streams in (1, STREAMS):
                workload = f"{streams} at a time"
                for label, names in mixtures(streams).items():
                    if name == PLAIN and label != BASE:
                        continue
                    rate(running.url, names)
                    measured = rate(running.url, names)
                    what = PLAIN if name == PLAIN else label
                    found.runs.append(Run(workload, what, turn, {"output_throughput": measured}))
                    compare.say(f"  round {turn} {workload} {what}: {measured:.1f} tokens/s")
            if name != PLAIN:
                for label, load in (("nothing beside", False), ("a load of 100 MB beside", True)):
                    values = gaps(running.url, load=load)
                    found.runs.append(Run("gap", label, turn, values))
                    compare.say(f"  round {turn} {label}: {values}")
    compare.finish(found, chosen.output)


if __name__ == "__main__":
    main()
