"""GSM8K with Forebay compared with transformers: the counts, the file of results, and its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import records
from benchmarks.cells import markdown, number, table_of
from benchmarks.records import Results, Run

BENCHMARK = "gsm8k"
SERVER = "forebay"

Answers = Sequence[Mapping[str, Any]]
"""Answers by question, as `forebay eval gsm8k --raw-result-file` and the reference write them."""


def counts(ours: Answers, theirs: Answers) -> dict[str, Any]:
    """The row of a model. If the reference has fewer answers, they are compared with the first of ours.

    Raises ValueError if one of our requests failed or the reference has no answer: there is nothing to count then.
    """
    if any(answer["error"] is not None for answer in ours):
        raise ValueError("a request failed: what it would have been answered is not known")
    if not theirs or len(ours) < len(theirs):
        raise ValueError(f"{len(theirs)} answers of the reference can't be compared with {len(ours)} of ours")
    compared = ours[: len(theirs)]
    pairs = list(zip(compared, theirs, strict=True))
    return {
        "questions": len(ours),
        "accuracy": _share(ours, "correct"),
        "invalid": sum(answer["predicted"] is None for answer in ours) / len(ours),
        "compared": len(theirs),
        "accuracy_compared": _share(compared, "correct"),
        "reference_accuracy": _share(theirs, "correct"),
        "same_number": sum(one["predicted"] == other["predicted"] for one, other in pairs),
        "same_text": sum(one["text"] == other["text"] for one, other in pairs),
        "tokens_compared": sum(answer["tokens"] for answer in theirs),
        "least_margin": min(answer["margin"] for answer in theirs),
    }


def _share(answers: Answers, key: str) -> float:
    return sum(bool(answer[key]) for answer in answers) / len(answers)


def record(model: str, values: dict[str, Any], path: Path | None = None) -> Path:
    """Replaces a model's row in the file (default: the committed one); returns the file's results."""
    path = path or records.path_of(BENCHMARK)
    found = records.new(BENCHMARK, rounds=0)
    rows = {run.workload: run for run in records.read(path).runs} if path.is_file() else {}
    # Rows may be from different days, so each states its date.
    measured = f"{found.date} ({found.machine['commit']})"
    rows[model] = Run(model, SERVER, 1, {**values, "measured": measured})
    found.runs = list(rows.values())
    return records.save(found, path)


@table_of(BENCHMARK)
def table(found: Results) -> str:
    """A row for each model."""
    head = ["model", "shots", "questions", "accuracy", "invalid", "compared", "accuracy of these", "by transformers"]
    head += ["same number", "same text", "tokens compared", "least margin", "measured"]
    return markdown(head, [_row(run.workload, run.values) for run in found.runs])


def _row(model: str, of: Mapping[str, Any]) -> list[str]:
    shares = ("accuracy", "invalid", "accuracy_compared", "reference_accuracy")
    accuracy, invalid, compared, reference = (f"{of[key]:.3f}" for key in shares)
    same = [f"{of[key]} of {of['compared']}" for key in ("same_number", "same_text")]
    return [
        *(model, str(of["shots"]), str(of["questions"]), accuracy, invalid, str(of["compared"]), compared, reference),
        *(*same, number(of["tokens_compared"]), f"{of['least_margin']:.2g}", of["measured"]),
    ]
