"""GGUF files with layers of several kinds, beside llama.cpp's server: windows, sinks and MXFP4, recurrent states.

    python -m benchmarks.layers --rounds 3

*Gemma 3 270M* is the real model, with windows of 512 positions in five of six layers. *gpt-oss* has random weights in
MXFP4, sinks, and windows of 128; *Qwen3.5* has random weights and gated delta nets in three of four layers. Both
servers read the same files and answer /completions. Answers run to their full length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import compare, delta_model, gemma, gpt_oss_model, models, records
from benchmarks.cells import markdown, number, spread, table_of
from benchmarks.load import Workload, load, start
from benchmarks.processes import ServerError
from benchmarks.records import Results, Run
from benchmarks.servers import FOREBAY_CPU, LLAMA, Forebay, Llama, Server, Setting

CONCURRENCY = (1, 8)
REQUESTS = {1: 4, 8: 16}
PROMPT, ANSWER, LONG = 256, 128, 1024


@dataclass(frozen=True)
class File:
    """A file that both servers read."""

    title: str
    model: str
    """The folder with the file's tokenizer."""
    path: Path
    build: Callable[[], Path]


FILES = {
    "gemma": File("Gemma 3 270M Q4_K_M", gemma.NAME, gemma.path(), gemma.build),
    "gpt-oss": File("gpt-oss shape, MXFP4", gpt_oss_model.NAME, gpt_oss_model.path(), gpt_oss_model.build),
    "qwen3.5": File("Qwen3.5-0.8B shape, Q8_0", delta_model.NAME, delta_model.path(), delta_model.build),
}


@dataclass(frozen=True)
class OurFile(Forebay):
    """Forebay with the file."""

    def command(self, setting: Setting, port: int) -> list[str]:
        return _with_file(super().command(setting, port), models.directory(setting.model), setting)


@dataclass(frozen=True)
class TheirFile(Llama):
    """llama.cpp's server with the same file."""

    def command(self, setting: Setting, port: int) -> list[str]:
        return _with_file(super().command(setting, port), models.gguf_file(setting.model), setting)


def _with_file(command: list[str], other: Path, setting: Setting) -> list[str]:
    (file,) = (file for file in FILES.values() if file.model == setting.model)
    return [str(file.path) if word == str(other) else word for word in command]


SERVERS: list[Server] = [
    OurFile(FOREBAY_CPU.name, "vllm", flags=("--quantization", "gguf")),
    TheirFile(LLAMA.name, "llama-server", LLAMA.note),
]


def workloads(file: File, concurrency: Sequence[int]) -> list[Workload]:
    """Generation with rising numbers of streams, and prompts alone."""
    made = []
    for streams in concurrency:
        setting = Setting(model=file.model, streams=streams, step_tokens=1024)
        name = f"{file.title}: {PROMPT}/{ANSWER}, {streams} at a time"
        made.append(Workload(name, setting, PROMPT, ANSWER, REQUESTS.get(streams, 2 * streams), warmup=1))
    setting = Setting(model=file.model, streams=1, context=1280, step_tokens=1024)
    made.append(Workload(f"{file.title}: prefill {LONG}/1, 1 at a time", setting, LONG, 1, 6, warmup=1))
    return made


def measure(found: Results, server: Server, file: File, concurrency: Sequence[int], number: int) -> None:
    """Measures one round of a server with a file."""
    listed = workloads(file, concurrency)
    setting = compare.largest([workload.setting for workload in listed])
    try:
        with start(server, setting) as running:
            for workload in listed:
                found.runs.append(Run(workload.name, server.name, number, load(server, workload, running)))
    except ServerError as error:
        found.skipped[f"{file.title}: {server.name}"] = str(error).splitlines()[0]
        compare.say(f"  {file.title}: {server.name} is left out: {error}")


@table_of("layers")
def table(found: Results) -> str:
    """A row for each file and workload: tokens a second of both servers, and their ratio."""
    ours, theirs = (server.name for server in SERVERS)
    head = ["file", "workload", f"{ours}, tokens/s", f"{theirs}, tokens/s", f"{ours} / {theirs}"]
    rows = []
    for name in found.workloads():
        title, _, workload = name.partition(": ")
        key = "input_throughput" if workload.startswith("prefill") else "output_throughput"
        cells = [number(found.median(name, server, key)) for server in (ours, theirs)]
        rows.append([title, workload, *cells, spread(found.ratio(name, ours, theirs, key))])
    return markdown(head, rows)


def main() -> None:
    """Runs the command line."""
    flags = compare.parser("GGUF files with layers of several kinds, beside llama.cpp.", rounds=3)
    flags.add_argument("--files", default=" ".join(FILES), help="default: %(default)s")
    flags.add_argument("--concurrency", type=compare.numbers, default=list(CONCURRENCY), metavar="N,N")
    asked = flags.parse_args()
    if reason := LLAMA.missing():
        raise SystemExit(reason)
    files = [FILES[name] for name in asked.files.replace(",", " ").split()]
    found = records.new("layers", asked.rounds)
    found.notes = {server.name: server.note for server in SERVERS if server.note}
    if FILES["gemma"] in files and (reason := gemma.missing()):
        files.remove(FILES["gemma"])
        found.skipped[FILES["gemma"].title] = reason
    for file in files:
        file.build()
    by_name = {server.name: server for server in SERVERS}
    for turn, name in records.in_turn(asked.rounds, list(by_name)):
        for file in files:
            compare.say(f"round {turn}, {file.title}, {name}")
            measure(found, by_name[name], file, asked.concurrency, turn)
            records.save(found, asked.output)
    compare.finish(found, asked.output)


if __name__ == "__main__":
    main()
