"""GGUF files in their own bits, beside llama.cpp's server: the same files, prompts and decoding, and their perplexity.

    python -m benchmarks.quantised --rounds 3 --text GSM8K_TEST.jsonl
    python -m benchmarks.quantised --model qwen2.5-coder-0.5b

llama.cpp's own `llama-quantize` makes the files of a model in bfloat16. Forebay serves them with
`--quantization gguf`: weights stay in the file's blocks where its kernels have a loop for them. Perplexities are of
GSM8K's text, as `llama-perplexity` takes them: windows of 512 tokens, whose second halves count.
"""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks import accuracy, coder, compare, cpu_model, models, records
from benchmarks.cells import markdown, number, spread, table_of
from benchmarks.described import described
from benchmarks.load import Workload, load, start
from benchmarks.processes import ServerError
from benchmarks.records import Results, Run
from benchmarks.servers import FOREBAY_CPU, LLAMA, Forebay, Llama, Server, Setting
from forebay.weights.cache import cache_directory

RESULTS = {"smollm2": "quantised", coder.NAME: "quantised_coder"}
"""The names of the results, by model."""
FORMATS = ("Q4_0", "Q4_1", "Q4_K_M", "Q8_0")
CONCURRENCY = (1, 8, 32)
WINDOW = accuracy.WINDOW
PERPLEXITY = "perplexity"
EXACT = "multiplied out"
"""The name of the results with weights computed in float32."""
_ESTIMATE = re.compile(r"Final estimate: PPL = ([\d.]+) \+/- ([\d.]+)")


@dataclass(frozen=True)
class File:
    """A model in one of llama.cpp's formats."""

    model: str
    kind: str

    @property
    def path(self) -> Path:
        """The path of the file, which `build` creates."""
        return models.MODELS / f"{self.model}-{self.kind}.gguf"

    def build(self) -> None:
        """Creates a missing file. Raises SystemExit if llama.cpp is not installed."""
        if not self.path.is_file():
            # A file with this name is complete: another process may use it.
            made = self.path.with_suffix(".made")
            command: list[str | Path] = [program("llama-quantize"), models.gguf_file(self.model), made, self.kind]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            made.rename(self.path)


def program(name: str) -> Path:
    """The path of one of llama.cpp's programs. Raises SystemExit."""
    if LLAMA.binary is None:
        raise SystemExit("make bench-setup PEERS=llama")
    return LLAMA.binary.with_name(name)


def with_file(command: list[str], other: Path, file: File) -> list[str]:
    """A server's command with this file as its model."""
    return [str(file.path) if word == str(other) else word for word in command]


@dataclass(frozen=True)
class OurFile(Forebay):
    """Forebay with the file's own blocks."""

    file: File = File("", "")

    def command(self, setting: Setting, port: int) -> list[str]:
        return with_file(super().command(setting, port), models.directory(setting.model), self.file)


@dataclass(frozen=True)
class TheirFile(Llama):
    """llama.cpp's server with the same file."""

    file: File = File("", "")
    flags: tuple[str, ...] = ()

    def command(self, setting: Setting, port: int) -> list[str]:
        command = with_file(super().command(setting, port), models.gguf_file(setting.model), self.file)
        return [*command, *self.flags]


def servers(file: File) -> list[Server]:
    """Both servers with a file."""
    ours = OurFile(FOREBAY_CPU.name, FOREBAY_CPU.backend, flags=("--quantization", "gguf"), file=file)
    return [ours, TheirFile(LLAMA.name, LLAMA.backend, file=file)]


def workloads(file: File, concurrency: Sequence[int]) -> list[Workload]:
    """The workloads of `cpu_model`: prompts alone, and generation with rising numbers of streams."""
    model = file.model
    of_bfloat16 = [cpu_model.prefill(1, model), *(cpu_model.generation(streams, model) for streams in concurrency)]
    return [replace(workload, name=f"{file.kind}: {workload.name}") for workload in of_bfloat16]


def measure(found: Results, file: File, concurrency: Sequence[int], number: int) -> None:
    """Measures one round of a file: each server once, with all workloads."""
    listed = workloads(file, concurrency)
    setting = compare.largest([workload.setting for workload in listed])
    for server in servers(file):
        try:
            with start(server, setting) as running:
                for workload in listed:
                    values = load(server, workload, running)
                    found.runs.append(Run(workload.name, server.name, number, values))
        except ServerError as error:
            found.skipped[f"{file.kind}: {server.name}"] = str(error).splitlines()[0]
            compare.say(f"  {file.kind}: {server.name} is left out: {error}")


def our_perplexity(way: accuracy.Way, file: File, text: str, threads: int) -> dict[str, Any]:
    """The perplexity of Forebay's Rust hand."""
    description = described(file.path, cache_directory())
    ids = Tokenizer.from_file(str(description["tokenizer"])).encode(text, add_special_tokens=False).ids
    windows = [ids[at : at + WINDOW] for at in range(0, len(ids) - WINDOW + 1, WINDOW)][: accuracy.SLOTS]
    with accuracy.hand(way, description, threads) as model:
        found = accuracy.losses(model, windows)[:, WINDOW // 2 :]
    return {"perplexity": math.exp(float(found.mean())), "windows": len(windows)}


def their_perplexity(source: File, text: str, threads: int) -> dict[str, Any]:
    """The perplexity of llama.cpp's own program, on the same windows."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        command: list[str | Path] = [program("llama-perplexity"), "--model", source.path, "--file", file.name]
        command += ["--ctx-size", str(WINDOW), "--chunks", str(accuracy.SLOTS), "--threads", str(threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    estimate = _ESTIMATE.search(done.stdout + done.stderr)
    if estimate is None:
        raise ServerError(f"llama-perplexity ended with status {done.returncode} and no estimate")
    return {"perplexity": float(estimate[1])}


def perplexities(found: Results, file: File, text: str, threads: int) -> None:
    """Adds the perplexities of both to the results."""
    asked: dict[str, Callable[[File, str, int], dict[str, Any]]] = {
        FOREBAY_CPU.name: partial(our_perplexity, accuracy.Way("gguf", "bfloat16", "gguf")),
        EXACT: partial(our_perplexity, accuracy.Way(EXACT, "float32", None)),
        LLAMA.name: their_perplexity,
    }
    for name, perplexity in asked.items():
        try:
            values = perplexity(file, text, threads)
        except ServerError as error:
            found.skipped[f"{file.kind}: {name}, perplexity"] = str(error)
            continue
        found.runs.append(Run(f"{file.kind}: {PERPLEXITY}", name, 1, values))
        compare.say(f"  {file.kind}: {name}: perplexity {values['perplexity']:.4f}")


def loss(found: Results, workload: str) -> str:
    """The perplexity of the same weights in float32, and the distance of Forebay's from it."""
    ours, exact = (found.median(workload, name, PERPLEXITY) for name in (FOREBAY_CPU.name, EXACT))
    return f"float32: {exact:.3f}, {ours / exact - 1:+.2%}" if ours and exact else "-"


@table_of(*RESULTS.values())
def table(found: Results) -> str:
    """A row for each format and workload: tokens a second and perplexities of both servers."""
    ours, theirs = FOREBAY_CPU.name, LLAMA.name
    head = ["file", "workload", f"{ours}, tokens/s", f"{theirs}, tokens/s", f"{ours} / {theirs}"]
    rows = []
    for name in found.workloads():
        kind, _, workload = name.partition(": ")
        if workload == "perplexity":
            cells = [f"{value:.3f}" if (value := found.median(name, who, workload)) else "-" for who in (ours, theirs)]
            rows.append([kind, workload, *cells, loss(found, name)])
            continue
        key = "input_throughput" if workload.startswith("prefill") else "output_throughput"
        cells = [number(found.median(name, who, key)) for who in (ours, theirs)]
        rows.append([kind, workload, *cells, spread(found.ratio(name, ours, theirs, key))])
    order = list(dict.fromkeys(row[0] for row in rows))
    return markdown(head, sorted(rows, key=lambda row: order.index(row[0])))


def main() -> None:
    """Runs the command line."""
    flags = compare.parser("GGUF files in their own bits, beside llama.cpp.", rounds=3)
    flags.add_argument("--model", choices=list(RESULTS), default="smollm2", help="default: %(default)s")
    flags.add_argument("--formats", default=" ".join(FORMATS), help="default: %(default)s")
    flags.add_argument("--concurrency", type=compare.numbers, default=list(CONCURRENCY), metavar="N,N")
    flags.add_argument("--text", type=Path, default=accuracy.EXCERPT, help="GSM8K's test.jsonl, for perplexities")
    asked = flags.parse_args()
    files = {kind: File(asked.model, kind) for kind in asked.formats.replace(",", " ").split()}
    models.build(force=False)
    if asked.model == coder.NAME:
        if reason := coder.missing():
            raise SystemExit(reason)
        coder.build()
    for file in files.values():
        file.build()
    found = records.new(RESULTS[asked.model], asked.rounds)
    found.notes = {LLAMA.name: LLAMA.note}
    text = accuracy.as_text(accuracy.read(asked.text))
    for file in files.values():
        perplexities(found, file, text, Setting(model=asked.model, streams=1).threads)
    for round_, kind in records.in_turn(asked.rounds, list(files)):
        compare.say(f"round {round_}, {kind}")
        measure(found, files[kind], asked.concurrency, round_)
        # Save after each file, so that an error loses no hours of measurements.
        records.save(found, asked.output)
    compare.finish(found, asked.output)


if __name__ == "__main__":
    main()
