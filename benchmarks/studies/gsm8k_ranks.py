"""GSM8K with one rank and with several: how many answers differ.

    make bench-setup PEERS=coder
    python -m benchmarks.studies.gsm8k_ranks --data-path test.jsonl --train-path train.jsonl

Both compute Qwen2.5-Coder-0.5B in float32 with PyTorch's operators, greedily. Sums over ranks differ in the last bits,
so of two nearly equally likely tokens, either may be chosen. An answer differs if the number that is read from it does.
Ranks on a CPU are slow: 50 questions take about a quarter of an hour.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import coder, models
from benchmarks.processes import Running, free_port
from benchmarks.servers import FOREBAY
from benchmarks.studies.gsm8k_reference import read_jsonl

START_SECONDS = 300.0
CONTEXT = 2048

Json = dict[str, Any]


def command(binary: Path, ranks: int, parallel: int, port: int) -> list[str]:
    """The server with this many ranks, each of which has one thread."""
    return [
        *(str(binary), "serve", str(models.directory(coder.NAME)), "--port", str(port)),
        # Otherwise a single rank would use the compiled kernels.
        *("--dtype", "float32", *(("--device", "deferred") if ranks == 1 else ("--tp-size", str(ranks)))),
        *("--threads", str(2 // ranks or 1), "--context-length", str(CONTEXT)),
        *("--max-running-requests", str(parallel), "--max-total-tokens", str(parallel * CONTEXT // 2)),
        *("--load-timeout", str(int(START_SECONDS)), "--log-interval", "0"),
    ]


def answers(chosen: argparse.Namespace, ranks: int, folder: Path) -> list[Json]:
    """The answers in the order of questions, as `forebay eval gsm8k` writes them."""
    port, file = free_port(), folder / f"{ranks}.jsonl"
    started = time.monotonic()
    line = command(chosen.binary, ranks, chosen.parallel, port)
    with Running(line, {"FOREBAY_CACHE": str(models.CACHE)}, port, folder / f"{ranks}.log") as server:
        server.wait_until_ready("/health", START_SECONDS)
        ready = time.monotonic()
        subprocess.run(
            [
                *(chosen.binary, "eval", "gsm8k", "--base-url", server.url),
                *("--data-path", chosen.data_path, "--train-path", chosen.train_path),
                *("--num-questions", str(chosen.num_questions), "--max-new-tokens", str(chosen.max_new_tokens)),
                *("--num-shots", str(chosen.num_shots), "--parallel", str(chosen.parallel)),
                *("--raw-result-file", file),
            ],
            check=True,
        )
        print(
            f"{ranks} ranks: {ready - started:.0f} s to start, {time.monotonic() - ready:.0f} s to answer", flush=True
        )
    return sorted(read_jsonl(file), key=lambda answer: answer["index"])


def differences(one: list[Json], other: list[Json]) -> tuple[list[int], list[int]]:
    """The questions whose extracted numbers differ, and those whose texts differ."""
    pairs = list(zip(one, other, strict=True))
    assert all(mine["prompt"] == theirs["prompt"] for mine, theirs in pairs)
    numbers = [mine["index"] for mine, theirs in pairs if mine["predicted"] != theirs["predicted"]]
    return numbers, [mine["index"] for mine, theirs in pairs if mine["text"] != theirs["text"]]


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Compare GSM8K's answers of one rank and of several.")
    parser.add_argument("--data-path", type=Path, required=True, metavar="FILE", help="GSM8K's test.jsonl")
    parser.add_argument("--train-path", type=Path, required=True, metavar="FILE", help="GSM8K's train.jsonl")
    parser.add_argument("--num-questions", type=int, default=50, metavar="N")
    parser.add_argument("--num-shots", type=int, default=5, metavar="N")
    parser.add_argument("--max-new-tokens", type=int, default=200, metavar="N")
    parser.add_argument("--parallel", type=int, default=50, metavar="N", help="requests at a time")
    parser.add_argument("--tp-size", type=int, default=2, metavar="RANKS")
    parser.add_argument("--binary", type=Path, default=FOREBAY, metavar="FILE")
    chosen = parser.parse_args()
    if reason := coder.missing():
        raise SystemExit(reason)
    coder.build()
    with tempfile.TemporaryDirectory() as folder:
        one, other = (answers(chosen, ranks, Path(folder)) for ranks in (1, chosen.tp_size))
    numbers, texts = differences(one, other)
    right = [sum(answer["correct"] for answer in found) for found in (one, other)]
    print(f"{len(one)} questions: {right[0]} right with one rank, {right[1]} with {chosen.tp_size}")
    print(f"{len(numbers)} answers differ {numbers}, {len(texts)} texts {texts}")


if __name__ == "__main__":
    main()
