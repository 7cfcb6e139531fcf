"""A real model on the CPU: SmolLM2-135M-Instruct in bfloat16 on two threads, or Qwen2.5-Coder-0.5B-Instruct.

    python -m benchmarks.cpu_model --rounds 3
    python -m benchmarks.cpu_model --model qwen2.5-coder-0.5b

256 tokens in and 128 out at several concurrencies, and prompts of 1024 tokens with one output token. A server is
started once a round, for all of them.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks import coder, compare
from benchmarks.beside import servers_table
from benchmarks.cells import table_of
from benchmarks.load import Workload
from benchmarks.records import Results
from benchmarks.servers import FOREBAY_CPU, Setting

SERVERS = ["forebay", "vllm", "vllm-rust", "llama"]
CONCURRENCY = [1, 8, 32, 64]
PREFILL_CONCURRENCY = [1]
TEMPLATE = {"smollm2": 31, coder.NAME: 29}
"""Tokens that a model's chat template adds to a prompt."""
RESULTS = {"smollm2": "cpu_model", coder.NAME: "cpu_coder"}
"""The names of the results, on processors without tiles."""
TILES = "_amx"
"""The suffix of the name for processors with tiles (AMX), which have a separate table."""
REQUESTS = {1: 6, 8: 24}


def generation(concurrency: int, model: str = "smollm2") -> Workload:
    """A workload of 256 tokens in and 128 out."""
    setting = Setting(model=model, streams=concurrency, step_tokens=1024)
    requests = REQUESTS.get(concurrency, concurrency)
    return Workload(f"256/128, {concurrency} at a time", setting, 256 - TEMPLATE[model], 128, requests, warmup=2)


def prefill(concurrency: int, model: str = "smollm2") -> Workload:
    """A workload of 1024 tokens in and 1 out."""
    setting = Setting(model=model, streams=concurrency, context=1280, step_tokens=1024)
    name = f"prefill 1024/1, {concurrency} at a time"
    return Workload(name, setting, 1024 - TEMPLATE[model], 1, requests=8 + 2 * concurrency, warmup=2)


def results_name(model: str, cpuinfo: str) -> str:
    """The name of a model's results on a processor, given its description in Linux."""
    return RESULTS[model] + (TILES if "amx_tile" in cpuinfo.split() else "")


@table_of("cpu_model", "cpu_model_amx", "cpu_coder", "cpu_coder_amx")
def table(found: Results) -> str:
    """A table of generation, and one of prompts alone, which counts input tokens."""
    prefill = {workload for workload in found.workloads() if workload.startswith("prefill")}
    parts = []
    for names, throughput, title in (
        (set(found.workloads()) - prefill, "output_throughput", "Output tokens per second:"),
        (prefill, "input_throughput", "Input tokens per second (CPU still per output token):"),
    ):
        part = Results(**{**vars(found), "runs": [run for run in found.runs if run.workload in names]})
        if part.runs:
            parts.append(f"{title}\n\n{servers_table(part, [FOREBAY_CPU.name], 'workload', throughput)}")
    return "\n\n".join(parts)


def main() -> None:
    """Runs the command line."""
    flags = compare.parser("A real model on the CPU.", rounds=3)
    compare.add_servers(flags, SERVERS)
    flags.add_argument("--model", choices=TEMPLATE, default="smollm2", help="default: %(default)s")
    flags.add_argument("--concurrency", type=compare.numbers, default=CONCURRENCY, metavar="N,N")
    flags.add_argument("--prefill-concurrency", type=compare.numbers, default=PREFILL_CONCURRENCY, metavar="N,N")
    chosen = flags.parse_args()
    model = chosen.model
    if model == coder.NAME:
        if reason := coder.missing():
            raise SystemExit(reason)
        coder.build()
    workloads = [generation(concurrency, model) for concurrency in chosen.concurrency]
    workloads += [prefill(concurrency, model) for concurrency in chosen.prefill_concurrency]
    name = results_name(model, Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    found = compare.compare_together(name, workloads, chosen.servers, chosen.rounds, chosen.output)
    compare.finish(found, chosen.output)


if __name__ == "__main__":
    main()
