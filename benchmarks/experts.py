"""A mixture of experts on the CPU: one GGUF file of 1 GB in 4 bits, in the compiled kernels and without them.

    python -m benchmarks.experts --rounds 2

The file is that of `expert_model`. `forebay` keeps experts in the file's blocks and computes the rest in bfloat16;
`forebay-gguf` computes everything in blocks; `forebay-torch` is PyTorch's operators, which need all of it in bfloat16.
llama-server serves the same file where it is installed (`make bench-setup PEERS=llama`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import compare, expert_model, models, records
from benchmarks.cells import markdown, number, spread, table_of
from benchmarks.cpu_model import TEMPLATE
from benchmarks.load import Workload, load, start
from benchmarks.processes import ServerError
from benchmarks.records import Results, Run
from benchmarks.servers import FOREBAY_CPU, LLAMA, Forebay, Llama, Server, Setting

CONCURRENCY = (1, 8)
REQUESTS = {1: 2, 8: 8}
ANSWER = 64
"""Tokens of an answer: half as many as for other models, which have fewer weights."""


def with_file(command: list[str], other: str) -> list[str]:
    """A server's command with this file as its model."""
    return [str(expert_model.path()) if word == other else word for word in command]


@dataclass(frozen=True)
class OurExperts(Forebay):
    """Forebay with the GGUF file."""

    def command(self, setting: Setting, port: int) -> list[str]:
        return with_file(super().command(setting, port), str(models.directory(setting.model)))


@dataclass(frozen=True)
class TheirExperts(Llama):
    """llama.cpp's server with the same GGUF file."""

    def command(self, setting: Setting, port: int) -> list[str]:
        return with_file(super().command(setting, port), str(models.gguf_file(setting.model)))


SERVERS: dict[str, Server] = {
    server.name: server
    for server in (
        OurExperts(FOREBAY_CPU.name, FOREBAY_CPU.backend, note="experts in blocks, the rest in bfloat16"),
        OurExperts("forebay-gguf", FOREBAY_CPU.backend, note="everything in blocks", flags=("--quantization", "gguf")),
        OurExperts(
            "forebay-torch",
            FOREBAY_CPU.backend,
            note="PyTorch's operators, all in bfloat16",
            flags=("--hand", "torch"),
        ),
        TheirExperts(LLAMA.name, LLAMA.backend, LLAMA.note),
    )
}


def workloads(concurrency: Sequence[int]) -> list[Workload]:
    """Generation with rising numbers of streams, and prompts alone."""
    made = []
    for streams in concurrency:
        setting = Setting(model=expert_model.NAME, streams=streams, step_tokens=1024)
        name = f"256/{ANSWER}, {streams} at a time"
        requests = REQUESTS.get(streams, streams)
        made.append(Workload(name, setting, 256 - TEMPLATE["smollm2"], ANSWER, requests, warmup=1))
    setting = Setting(model=expert_model.NAME, streams=1, context=1280, step_tokens=1024)
    made.append(Workload("prefill 1024/1, 1 at a time", setting, 1024 - TEMPLATE["smollm2"], 1, 3, warmup=1))
    return made


def measure(found: Results, server: Server, listed: Sequence[Workload], number: int) -> None:
    """Measures one round of a server."""
    if reason := server.missing():
        found.skipped[server.name] = reason
        return
    setting = compare.largest([workload.setting for workload in listed])
    try:
        with start(server, setting) as running:
            for workload in listed:
                found.runs.append(Run(workload.name, server.name, number, load(server, workload, running)))
    except ServerError as error:
        found.skipped[server.name] = str(error).splitlines()[0]
        compare.say(f"  {server.name} is left out: {error}")


@table_of("experts")
def table(found: Results) -> str:
    """A row for each workload: tokens a second of every server, and the ratios of the first one to the others."""
    servers = list(dict.fromkeys(run.server for run in found.runs))
    first = servers[0]
    head = ["workload", *(f"{server}, tokens/s" for server in servers)]
    head += [f"{first} / {server}" for server in servers[1:]]
    rows = []
    for workload in found.workloads():
        key = "input_throughput" if workload.startswith("prefill") else "output_throughput"
        cells = [number(found.median(workload, server, key)) for server in servers]
        ratios = [spread(found.ratio(workload, first, server, key)) for server in servers[1:]]
        rows.append([workload, *cells, *ratios])
    return markdown(head, rows)


def main() -> None:
    """Runs the command line."""
    flags = compare.parser("A mixture of experts on the CPU.", rounds=2)
    flags.add_argument("--servers", default=" ".join(SERVERS), help="default: %(default)s")
    flags.add_argument("--concurrency", type=compare.numbers, default=list(CONCURRENCY), metavar="N,N")
    asked = flags.parse_args()
    names = asked.servers.replace(",", " ").split()
    expert_model.build()
    found = records.new("experts", asked.rounds)
    found.notes = {name: SERVERS[name].note for name in names}
    for turn, name in records.in_turn(asked.rounds, names):
        compare.say(f"round {turn}, {name}")
        measure(found, SERVERS[name], workloads(asked.concurrency), turn)
        records.save(found, asked.output)
    compare.finish(found, asked.output)


if __name__ == "__main__":
    main()
