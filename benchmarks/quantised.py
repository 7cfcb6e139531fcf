"""GGUF files in their own bits, beside llama.cpp's server: the same files, prompts and decoding, and their perplexity.

    python -m benchmarks.quantised --rounds 3 --text GSM8K_TEST.jsonl

llama.cpp's own `llama-quantize` makes the files of SmolLM2-135M-Instruct in bfloat16. Forebay serves them with
`--quantization gguf`: weights stay in the file's blocks where its kernels have a loop for them. Perplexities are of
GSM8K's text, as `llama-perplexity` takes them: windows of 512 tokens, whose second halves count.
"""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from benchmarks import accuracy, compare, cpu_model, models, records
from benchmarks.cells import markdown, number, spread, table_of
from benchmarks.load import Workload, load, start
from benchmarks.processes import ServerError
from benchmarks.records import Results, Run
from benchmarks.servers import FOREBAY_CPU, LLAMA, Forebay, Llama, Server, Setting
from forebay.weights.cache import cache_directory
from forebay.weights.describe import describe_path

MODEL = "smollm2"
FORMATS = ("Q4_0", "Q4_1", "Q4_K_M", "Q8_0")
CONCURRENCY = (1, 8, 32)
WINDOW = accuracy.WINDOW
PERPLEXITY = "perplexity"
_ESTIMATE = re.compile(r"Final estimate: PPL = ([\d.]+) \+/- ([\d.]+)")


def path_of(kind: str) -> Path:
    """The file of a format."""
    return models.MODELS / f"{MODEL}-{kind}.gguf"


def program(name: str) -> Path:
    """One of llama.cpp's programs. Raises SystemExit."""
    if LLAMA.binary is None:
        raise SystemExit("make bench-setup PEERS=llama")
    return LLAMA.binary.with_name(name)


def build(kind: str) -> None:
    """Makes the file of a format where there is none."""
    target = path_of(kind)
    if not target.is_file():
        # A file of this name is whole: another process may ask for it.
        made = target.with_suffix(".made")
        command: list[str | Path] = [program("llama-quantize"), models.gguf_file(MODEL), made, kind]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        made.rename(target)


def with_file(command: list[str], other: Path, kind: str) -> list[str]:
    """A server's command, with the file of a format in place of another model."""
    return [str(path_of(kind)) if word == str(other) else word for word in command]


@dataclass(frozen=True)
class OurFile(Forebay):
    """Forebay with a file's own blocks."""

    kind: str = ""

    def command(self, setting: Setting, port: int) -> list[str]:
        return with_file(super().command(setting, port), models.directory(setting.model), self.kind)


@dataclass(frozen=True)
class TheirFile(Llama):
    """llama.cpp's server with the same file."""

    kind: str = ""
    flags: tuple[str, ...] = ()

    def command(self, setting: Setting, port: int) -> list[str]:
        command = with_file(super().command(setting, port), models.gguf_file(setting.model), self.kind)
        return [*command, *self.flags]


def servers(kind: str) -> list[Server]:
    """Both, for one format."""
    ours = OurFile(FOREBAY_CPU.name, FOREBAY_CPU.backend, flags=("--quantization", "gguf"), kind=kind)
    return [ours, TheirFile(LLAMA.name, LLAMA.backend, kind=kind)]


def workloads(kind: str, concurrency: Sequence[int]) -> list[Workload]:
    """Those of `cpu_model`: prompts alone, and generation with rising numbers of streams."""
    of_bfloat16 = [cpu_model.prefill(1, MODEL), *(cpu_model.generation(streams, MODEL) for streams in concurrency)]
    return [replace(workload, name=f"{kind}: {workload.name}") for workload in of_bfloat16]


def measure(found: Results, kind: str, concurrency: Sequence[int], number: int) -> None:
    """One round of a format: each server once, with all workloads."""
    listed = workloads(kind, concurrency)
    setting = compare.largest([workload.setting for workload in listed])
    for server in servers(kind):
        try:
            with start(server, setting) as running:
                for workload in listed:
                    values = load(server, workload, running)
                    found.runs.append(Run(workload.name, server.name, number, values))
        except ServerError as error:
            found.skipped[f"{kind}: {server.name}"] = str(error).splitlines()[0]
            compare.say(f"  {kind}: {server.name} is left out: {error}")


def our_perplexity(kind: str, text: str, threads: int) -> dict[str, Any]:
    """Of the kernels' own logits."""
    description = describe_path(path_of(kind), cache_directory())
    ids = Tokenizer.from_file(str(description["tokenizer"])).encode(text, add_special_tokens=False).ids
    windows = [ids[at : at + WINDOW] for at in range(0, len(ids) - WINDOW + 1, WINDOW)][: accuracy.SLOTS]
    with torch.inference_mode():
        model = accuracy.Model(accuracy.Way("gguf", "bfloat16", "gguf"), description, threads)
        found = accuracy.losses(model, windows)[:, WINDOW // 2 :]
    return {"perplexity": math.exp(float(found.mean())), "windows": len(windows)}


def their_perplexity(kind: str, text: str, threads: int) -> dict[str, Any]:
    """Of llama.cpp's own program, on the same windows."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        command: list[str | Path] = [program("llama-perplexity"), "--model", path_of(kind), "--file", file.name]
        command += ["--ctx-size", str(WINDOW), "--chunks", str(accuracy.SLOTS), "--threads", str(threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    estimate = _ESTIMATE.search(done.stdout + done.stderr)
    if estimate is None:
        raise ServerError(f"llama-perplexity ended with status {done.returncode} and no estimate")
    return {"perplexity": float(estimate[1])}


def perplexities(found: Results, kind: str, text: str, threads: int) -> None:
    """Of both, into the results."""
    for server, perplexity in ((FOREBAY_CPU, our_perplexity), (LLAMA, their_perplexity)):
        try:
            values = perplexity(kind, text, threads)
        except ServerError as error:
            found.skipped[f"{kind}: {server.name}, perplexity"] = str(error)
            continue
        found.runs.append(Run(f"{kind}: {PERPLEXITY}", server.name, 1, values))
        compare.say(f"  {kind}: {server.name}: perplexity {values['perplexity']:.3f}")


@table_of("quantised")
def table(found: Results) -> str:
    """A row for each format and workload: tokens a second of both, and their perplexities."""
    ours, theirs = FOREBAY_CPU.name, LLAMA.name
    head = ["file", "workload", f"{ours}, tokens/s", f"{theirs}, tokens/s", f"{ours} / {theirs}"]
    rows = []
    for name in found.workloads():
        kind, _, workload = name.partition(": ")
        if workload == "perplexity":
            cells = [f"{value:.3f}" if (value := found.median(name, who, workload)) else "-" for who in (ours, theirs)]
            rows.append([kind, workload, *cells, "-"])
            continue
        key = "input_throughput" if workload.startswith("prefill") else "output_throughput"
        cells = [number(found.median(name, who, key)) for who in (ours, theirs)]
        rows.append([kind, workload, *cells, spread(found.ratio(name, ours, theirs, key))])
    order = list(dict.fromkeys(row[0] for row in rows))
    return markdown(head, sorted(rows, key=lambda row: order.index(row[0])))


def main() -> None:
    """The command."""
    flags = compare.parser("GGUF files in their own bits, beside llama.cpp.", rounds=3)
    flags.add_argument("--formats", default=" ".join(FORMATS), help="default: %(default)s")
    flags.add_argument("--concurrency", type=compare.numbers, default=list(CONCURRENCY), metavar="N,N")
    flags.add_argument("--text", type=Path, default=accuracy.EXCERPT, help="GSM8K's test.jsonl, for perplexities")
    asked = flags.parse_args()
    kinds = asked.formats.replace(",", " ").split()
    models.build(force=False)
    for kind in kinds:
        build(kind)
    found = records.new("quantised", asked.rounds)
    found.notes = {LLAMA.name: LLAMA.note}
    text = accuracy.as_text(accuracy.read(asked.text))
    for kind in kinds:
        perplexities(found, kind, text, Setting(model=MODEL, streams=1).threads)
    for round_, kind in records.in_turn(asked.rounds, kinds):
        compare.say(f"round {round_}, {kind}")
        measure(found, kind, asked.concurrency, round_)
        # Hours of measurements outlive what ends them.
        records.save(found, asked.output)
    compare.finish(found, asked.output)


if __name__ == "__main__":
    main()
