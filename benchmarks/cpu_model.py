"""A real model on the CPU: SmolLM2-135M-Instruct in bfloat16 on two threads.

    python -m benchmarks.cpu_model --rounds 3

256 tokens in and 128 out at several concurrencies, and prompts of 1024 tokens answered with one.
"""

from __future__ import annotations

from benchmarks import compare
from benchmarks.load import Workload
from benchmarks.servers import Setting

SERVERS = ["forebay", "vllm", "vllm-rust", "llama"]
CONCURRENCY = [1, 8, 32, 64]
PREFILL_CONCURRENCY = [1, 8]
TEMPLATE = 31
"""Tokens that SmolLM2's chat template adds to a prompt."""
REQUESTS = {1: 6, 8: 24, 32: 64, 64: 128}


def generation(concurrency: int) -> Workload:
    """256 in, 128 out."""
    setting = Setting(model="smollm2", streams=concurrency, step_tokens=1024)
    requests = REQUESTS.get(concurrency, 2 * concurrency)
    return Workload(f"256/128, {concurrency} at a time", setting, 256 - TEMPLATE, 128, requests, warmup=2)


def prefill(concurrency: int) -> Workload:
    """1024 in, 1 out."""
    setting = Setting(model="smollm2", streams=concurrency, context=1280, step_tokens=1024)
    name = f"prefill 1024/1, {concurrency} at a time"
    return Workload(name, setting, 1024 - TEMPLATE, 1, requests=8 + 2 * concurrency, warmup=2)


def main() -> None:
    """The command."""
    flags = compare.parser("SmolLM2-135M on the CPU.", rounds=3)
    compare.add_servers(flags, SERVERS)
    flags.add_argument("--concurrency", type=compare.numbers, default=CONCURRENCY, metavar="N,N")
    chosen = flags.parse_args()
    workloads = [generation(concurrency) for concurrency in chosen.concurrency]
    workloads += [prefill(concurrency) for concurrency in PREFILL_CONCURRENCY]
    compare.finish(compare.compare("cpu_model", workloads, chosen.servers, chosen.rounds), chosen.output)


if __name__ == "__main__":
    main()
