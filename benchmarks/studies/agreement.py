"""A check that our load generator reports the same numbers as others of the same server.

    python -m benchmarks.studies.agreement --rounds 5

One Forebay server is loaded in turn by `forebay bench serve`, by `vllm bench serve` and by vLLM's load generator
written in Rust, if that is installed. The order is A B C, A B C, with nothing in between. Requests have the same
lengths and concurrency. The server's steps take a fixed time (or are those of a real model), so that all clients
measure the same behaviour.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import compare, models, records
from benchmarks.cells import markdown, number, spread, table_of
from benchmarks.load import Workload, load, run_client, start
from benchmarks.processes import Running, ServerError
from benchmarks.records import Results, Run
from benchmarks.servers import (
    FOREBAY_CPU,
    SERVED_NAME,
    STEPS_OF_5_MS,
    VENVS,
    VLLM,
    VLLM_RUST,
    Forebay,
    Setting,
)

OURS = "forebay bench serve"
PYTHON = "vllm bench serve"
RUST = "vllm-rs bench serve"
KEYS = ("output_throughput", "mean_ttft_ms", "mean_tpot_ms", "mean_itl_ms", "completed", "failed", "duration")

CASES = [
    (
        Forebay("forebay, steps of 5 ms", "forebay-chat", profile=STEPS_OF_5_MS),
        Workload("simulated steps of 5 ms, 8 streams, 128/128", Setting("smollm2", 8), 128, 128, 160),
    ),
    (
        FOREBAY_CPU,
        Workload("SmolLM2 on the CPU, 8 streams, 225/128", Setting("smollm2", 8), 225, 128, 48, warmup=2),
    ),
]


def other_command(client: str, workload: Workload, url: str, result: Path) -> list[str]:
    """The command of another load generator for the same load, and its output file."""
    program = [str(VLLM_RUST.binary)] if client == RUST else [str(VENVS / "vllm/bin/vllm")]
    setting = workload.setting
    return [
        *(*program, "bench", "serve", "--backend", "openai-chat", "--endpoint", "/v1/chat/completions"),
        *("--base-url", url, "--model", SERVED_NAME, "--tokenizer", str(models.directory(setting.model))),
        *("--dataset-name", "random", "--random-input-len", str(workload.input_tokens)),
        *("--random-output-len", str(workload.output_tokens), "--ignore-eos", "--temperature", "0"),
        *("--num-prompts", str(workload.requests), "--max-concurrency", str(setting.streams)),
        *("--num-warmups", str(workload.warmup), "--disable-tqdm"),
        *("--save-result", "--result-dir", str(result.parent), "--result-filename", result.name),
    ]


def other(client: str, workload: Workload, running: Running) -> dict[str, Any]:
    """Runs another load generator; returns its numbers. Raises ServerError."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_TARGET_DEVICE": "cpu", "VLLM_NO_USAGE_STATS": "1"}
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as folder:
        result = Path(folder) / "result.json"
        run_client(other_command(client, workload, running.url, result), environment)
        found = json.loads(result.read_text(encoding="utf-8"))
    if found["completed"] != workload.requests:
        raise ServerError(f"{client}: {found['completed']} of {workload.requests} requests were completed")
    return {key: found[key] for key in KEYS if key in found}


def clients() -> tuple[list[str], dict[str, str]]:
    """The installed load generators, ours first, and the reasons why others are missing."""
    skipped = {client: reason for client, server in ((PYTHON, VLLM), (RUST, VLLM_RUST)) if (reason := server.missing())}
    return [client for client in (OURS, PYTHON, RUST) if client not in skipped], skipped


def run(found: Results, names: list[str], rounds: int) -> None:
    """Runs every case: one server, and the clients in turn. A client that fails is reported and left out."""
    for server, workload in CASES:
        with start(server, workload.setting) as running:
            for number, client in records.in_turn(rounds, names):
                where = f"{workload.name}: {client}"
                if where in found.skipped:
                    continue
                try:
                    said = load(server, workload, running) if client == OURS else other(client, workload, running)
                except ServerError as error:
                    found.skipped[where] = str(error).splitlines()[0]
                    compare.say(f"  {where} is left out: {error}")
                    continue
                values = {key: said.get(key) for key in KEYS}
                found.runs.append(Run(workload.name, client, number, values))
                compare.say(f"  round {number} {where}: {values['output_throughput']:.1f} tokens/s")


@table_of("agreement")
def table(found: Results) -> str:
    """Each client's numbers of the same server; in brackets the ratio of our number to theirs."""
    keys = {
        "output_throughput": "tokens/s",
        "mean_ttft_ms": "mean TTFT ms",
        "mean_tpot_ms": "mean TPOT ms",
        "mean_itl_ms": "mean ITL ms",
    }
    rows = []
    for workload in found.workloads():
        ours, *others = found.servers(workload)
        rows.append([workload, ours, *(number(found.median(workload, ours, key)) for key in keys)])
        for client in others:
            cells = [
                f"{number(found.median(workload, client, key))} [{spread(found.ratio(workload, ours, client, key))}]"
                for key in keys
            ]
            rows.append([workload, client, *cells])
    return markdown(["workload", "client", *keys.values()], rows)


def main() -> None:
    """Runs the command line."""
    flags = compare.parser("Our load generator against others, on the same server.", rounds=5)
    chosen = flags.parse_args()
    names, skipped = clients()
    if len(names) == 1:
        raise SystemExit(f"there is no other load generator: {skipped[PYTHON]}")
    found = records.new("agreement", chosen.rounds)
    found.skipped = skipped
    models.build(force=False)
    run(found, names, chosen.rounds)
    compare.finish(found, chosen.output)


if __name__ == "__main__":
    main()
