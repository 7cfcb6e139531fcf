"""Keys and values of 8 bits (`--kv-cache-dtype int8`) beside bfloat16: the time of steps, memory, and perplexity.

    python -m benchmarks.kv_cache --text GSM8K_TEST.jsonl

Hands run without a server, with GGUF weights as stored, and with keys and values of each type in turn. Steps are decode
rows and prompt chunks after contexts of rising length, on pages in random order. Perplexity is of GSM8K's text in
windows of 2048 tokens, of which attention reads each token from its page.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks import accuracy, coder, compare, models, records
from benchmarks.cells import markdown, number, spread, table_of
from benchmarks.described import described
from benchmarks.in_process import PAGE
from benchmarks.records import Results, Run
from benchmarks.rust_hand import ROW, RustHand
from forebay.weights.cache import cache_directory

KINDS = {"bfloat16": None, "int8": "int8"}
BASE = "bfloat16"
SLOTS = 32
CONTEXTS = (256, 2048, 7680)
ROWS = (1, 8, 32)
PIECE = 512
"""Tokens of a timed prompt chunk."""
WINDOW = 2048
WINDOWS = 4
PERPLEXITY = "perplexity"


def hand(kind: str, description: dict[str, Any], threads: int) -> RustHand:
    """A hand with pages of one format, and a context in each slot."""
    settings: dict[str, Any] = {"quantization": "gguf", "kv_cache_dtype": KINDS[kind]}
    return RustHand(description, slots=SLOTS, context=CONTEXTS[-1] + PIECE, threads=threads, **settings)


def fill(model: RustHand) -> None:
    """Computes tokens in every slot: never-written memory would be read from the CPU's caches in timed steps."""
    random = np.random.default_rng(1)
    for slot in range(SLOTS):
        model.put(slot, random.integers(0, 4096, CONTEXTS[-1] + PIECE).tolist())
        # Only slots of timed steps need the longest context.
        for start in range(0, CONTEXTS[-1] if slot < max(ROWS) else 0, PIECE):
            model.greedy([(slot, start, PIECE)])


def cases() -> dict[str, list[ROW]]:
    """The steps that are timed."""
    decodes = {
        f"{rows} rows behind {context}": [(slot, context, 1) for slot in range(rows)]
        for context in CONTEXTS
        for rows in ROWS
    }
    pieces = {f"{PIECE} tokens of a prompt behind {at}": [(0, at, PIECE)] for at in (0, CONTEXTS[-1])}
    return {**decodes, **pieces}


def speed(found: Results, name: str, ways: dict[str, RustHand]) -> None:
    """Measures steps of both kinds in turn, and adds them to the results."""
    for model in ways.values():
        fill(model)
    for case, rows in cases().items():
        for model in ways.values():
            model.greedy(rows)
        for round_ in range(1, found.rounds + 1):
            for kind, model in ways.items():
                times = [model.step_ms(rows) for _ in range(3)]
                found.runs.append(Run(f"{name}: {case}", kind, round_, {"step_ms": statistics.median(times)}))
        compare.say(f"  {case}: " + ", ".join(f"{kind} {shown(found, f'{name}: {case}', kind)}" for kind in ways))


def shown(found: Results, workload: str, kind: str) -> str:
    """A median in milliseconds."""
    return number(found.median(workload, kind, "step_ms"))


def perplexities(found: Results, name: str, ways: dict[str, RustHand], ids: Sequence[int]) -> None:
    """Adds perplexities of both kinds and the bytes per token to the results."""
    windows = [ids[at : at + WINDOW] for at in range(0, len(ids) - WINDOW + 1, WINDOW)][:WINDOWS]
    for kind, model in ways.items():
        values: dict[str, Any] = {"token_bytes": model.facts["page_bytes"] // PAGE, "windows": len(windows)}
        if windows:
            values[PERPLEXITY] = math.exp(float(accuracy.losses(model, windows).mean()))
        found.runs.append(Run(f"{name}: {PERPLEXITY}", kind, 1, values))
        compare.say(f"  {kind}: {values}")


@table_of("kv_cache")
def table(found: Results) -> str:
    """A row for each step with the milliseconds of both types; then the perplexities."""
    rows, kept = [], []
    for workload in found.workloads():
        name, _, case = workload.partition(": ")
        if case == PERPLEXITY:
            base, ours = (found.median(workload, kind, PERPLEXITY) for kind in KINDS)
            taken = [number(found.median(workload, kind, "token_bytes")) for kind in KINDS]
            loss = f"{ours / base - 1:+.2%}" if base and ours else "-"
            cells = [f"{value:.4f}" if value else "-" for value in (base, ours)]
            kept.append([name, *cells, loss, *taken])
            continue
        times = [shown(found, workload, kind) for kind in KINDS]
        rows.append([name, case, *times, spread(found.ratio(workload, BASE, "int8", "step_ms"))])
    steps = markdown(["model", "step", "bfloat16, ms", "int8, ms", "bfloat16 / int8"], rows)
    head = ["model", "perplexity, bfloat16", "int8", "loss", "bytes a token, bfloat16", "int8"]
    return f"{steps}\n\n{markdown(head, kept)}"


def main() -> None:
    """Runs the command line."""
    flags = compare.parser("Keys and values of 8 bits beside bfloat16.", rounds=5)
    flags.add_argument("--models", default=f"smollm2 {coder.NAME}", help="default: %(default)s")
    flags.add_argument("--text", type=Path, default=accuracy.EXCERPT, help="GSM8K's test.jsonl, for perplexities")
    flags.add_argument("--threads", type=int, default=2)
    asked = flags.parse_args()
    found = records.new("kv_cache", asked.rounds)
    text = accuracy.as_text(accuracy.read(asked.text))
    for name in asked.models.split():
        file = models.default_model()
        if name == coder.NAME:
            if reason := coder.missing():
                found.skipped[name] = reason
                continue
            coder.build()
            file = coder.original()
        description = described(file, cache_directory())
        ids = Tokenizer.from_file(str(description["tokenizer"])).encode(text, add_special_tokens=False).ids
        compare.say(name)
        with ExitStack() as hands:
            ways = {kind: hands.enter_context(hand(kind, description, asked.threads)) for kind in KINDS}
            perplexities(found, name, ways, ids)
            speed(found, name, ways)
        records.save(found, asked.output)
    compare.finish(found, asked.output)


if __name__ == "__main__":
    main()
