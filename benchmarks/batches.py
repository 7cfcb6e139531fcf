"""Streams beside a batch: tokens a second of eight streams, and of a batch that runs beside them.

    python -m benchmarks.batches  # 5 minutes

SmolLM2-135M on the CPU, where arithmetic limits a step, so that each background row makes it longer. Each round runs
the streams alone, beside a batch, and beside a batch without a bound (`--background-share 100`). The batch has more
lines than can finish in that time. The goal is that the streams lose at most 5 %.
"""

from __future__ import annotations

import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import compare, models, records
from benchmarks.cells import markdown, number, spread, table_of
from benchmarks.load import start
from benchmarks.lora import stream
from benchmarks.processes import ServerError
from benchmarks.records import Results, Run
from benchmarks.servers import SERVED_NAME, Forebay, Setting

STREAMS = 8
TOKENS = 256
LINES = 400
LINE_TOKENS = 128
ALONE, BESIDE, UNBOUND = "streams alone", "beside a batch", "beside a batch without a bound"
SETTING = Setting(model="smollm2", streams=2 * STREAMS, context=1024)


def call(url: str, data: bytes | None = None, kind: str = "application/json") -> Any:
    """The JSON answer to a request."""
    request = urllib.request.Request(url, data, {"Content-Type": kind} if data else {})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def begin_batch(url: str) -> str:
    """Uploads a file of requests and starts its batch. Returns the batch's id."""
    body = {"model": SERVED_NAME, "max_tokens": LINE_TOKENS, "temperature": 0, "ignore_eos": True}
    lines = [
        json.dumps(
            {
                "custom_id": str(at),
                "method": "POST",
                "url": "/v1/completions",
                "body": {**body, "prompt": f"A letter to the reader number {at}:"},
            }
        )
        for at in range(LINES)
    ]
    mark = "forebay-benchmark"
    parts = [
        f'--{mark}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n',
        f'--{mark}\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n',
        "\n".join(lines) + f"\r\n--{mark}--\r\n",
    ]
    file = call(f"{url}/v1/files", "".join(parts).encode(), f"multipart/form-data; boundary={mark}")
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    return str(call(f"{url}/v1/batches", json.dumps(asked).encode())["id"])


def generated(url: str) -> float:
    """The tokens that the server has generated since its start."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:generation_tokens_total"))


def measure(url: str) -> dict[str, float]:
    """Tokens a second of all streams, their largest and median gap, and tokens a second of other requests."""
    before = generated(url)
    began = time.perf_counter()
    with ThreadPoolExecutor(STREAMS) as pool:
        jobs = [pool.submit(list, stream(url, SERVED_NAME, f"Story number {at}:", TOKENS)) for at in range(STREAMS)]
        times = [job.result() for job in jobs]
    seconds = time.perf_counter() - began
    others = (generated(url) - before - STREAMS * TOKENS) / seconds
    first, last = max(found[0] for found in times), min(found[-1] for found in times)
    rate = sum(first < at <= last for found in times for at in found) / (last - first)
    gaps = sorted(1e3 * (after - before) for found in times for before, after in pairwise(found))
    return {
        "output_throughput": rate,
        "median_gap_ms": gaps[len(gaps) // 2],
        "p99_gap_ms": gaps[len(gaps) * 99 // 100],
        "batch_throughput": others,
    }


@table_of("batches")
def table(found: Results) -> str:
    """Tokens a second of streams beside a batch, relative to those of the same round without one."""
    head = ["8 streams", "tokens/s", "by alone", "gap p50 ms", "p99 ms", "batch tokens/s"]
    rows = []
    for name in found.servers("batches"):
        values = [number(found.median("batches", name, key)) for key in ("median_gap_ms", "p99_gap_ms")]
        ratio = spread(found.ratio("batches", name, ALONE, "output_throughput"))
        batch = "-" if name == ALONE else number(found.median("batches", name, "batch_throughput"))
        rows.append([name, number(found.median("batches", name, "output_throughput")), ratio, *values, batch])
    return markdown(head, rows)


def main() -> None:
    """Runs the command line."""
    chosen = compare.parser("Streams beside a batch.", rounds=5).parse_args()
    models.build(force=False)
    found = records.new("batches", chosen.rounds)
    found.notes = {"Setting": f"SmolLM2-135M, bfloat16, {STREAMS} streams of {TOKENS} tokens, 16 requests run at most"}
    for turn, name in records.in_turn(chosen.rounds, [ALONE, BESIDE, UNBOUND]):
        with TemporaryDirectory(prefix="forebay-bench-") as folder:
            flags = ["--batch-dir", str(Path(folder) / "batches")]
            if name == UNBOUND:
                flags += ["--background-share", "100"]
            try:
                running = start(Forebay("batches", "forebay-chat", flags=tuple(flags)), SETTING)
            except ServerError as error:
                compare.leave_out(found, name, error)
                continue
            with running:
                measure(running.url)
                if name != ALONE:
                    begin_batch(running.url)
                    before = generated(running.url)
                    while generated(running.url) == before:
                        time.sleep(0.05)
                values = measure(running.url)
                found.runs.append(Run("batches", name, turn, values))
                compare.say(f"  round {turn} {name}: {values}")
    compare.finish(found, chosen.output)


if __name__ == "__main__":
    main()
