"""GSM8K, compared with transformers: the choice of a model, the counts, and the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import coder, models, records, tables
from benchmarks.studies import gsm8k_results
from benchmarks.studies.gsm8k_reference import differences, location

MACHINE = {"cpu": "A CPU", "cores": 2, "memory_gib": 8.0, "kernel": "6.1", "python": "3.11.7", "torch": "2.15.0"}


def answer(index: int, predicted: int | None, label: int, text: str = "", **more: Any) -> dict[str, Any]:
    return {
        "index": index,
        "prompt": f"question {index}",
        "text": text or f"it is {predicted}",
        "predicted": predicted,
        "label": label,
        "correct": predicted == label,
        "tokens": 10 + index,
        "error": None,
        **more,
    }


OURS = [answer(0, 3, 3), answer(1, 5, 6), answer(2, None, 7), answer(3, 8, 8)]
THEIRS = [answer(0, 3, 3, margin=0.5), answer(1, 6, 6, margin=0.25)]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The description of the machine in the results. Tests may change its commit."""
    about = {**MACHINE, "forebay": "0.1.0", "commit": "abc"}
    monkeypatch.setattr(records, "this_machine", lambda: dict(about))
    return about


def test_counts_are_of_what_both_answered_and_accuracy_of_all() -> None:
    assert gsm8k_results.counts(OURS, THEIRS) == {
        "questions": 4,
        "accuracy": 0.5,
        "invalid": 0.25,
        "compared": 2,
        "accuracy_compared": 0.5,
        "reference_accuracy": 1.0,
        "same_number": 1,
        "same_text": 1,
        "tokens_compared": 21,
        "least_margin": 0.25,
    }


def test_what_can_not_be_counted_is_an_error() -> None:
    with pytest.raises(ValueError, match="failed"):
        gsm8k_results.counts([answer(0, None, 3, error="HTTP 500")], THEIRS[:1])
    for ours, theirs in ((OURS[:1], THEIRS), (OURS, [])):
        with pytest.raises(ValueError, match="can't be compared"):
            gsm8k_results.counts(ours, theirs)


def test_questions_beyond_those_of_the_reference_are_no_difference() -> None:
    assert differences([*THEIRS, *OURS[2:]], THEIRS) == []
    assert len(differences(OURS, THEIRS)) == 1


def test_a_model_keeps_one_row_and_the_others_keep_theirs(tmp_path: Path, machine: dict[str, Any]) -> None:
    path = tmp_path / "gsm8k.json"
    values = {"shots": 5, **gsm8k_results.counts(OURS, THEIRS)}
    for model, questions, commit in (("small", 4, "abc"), ("large", 5, "abc"), ("small", 6, "def")):
        machine["commit"] = commit
        gsm8k_results.record(model, {**values, "questions": questions}, path)
    found = records.read(path)
    assert [(run.workload, run.values["questions"]) for run in found.runs] == [("small", 6), ("large", 5)]
    assert [run.values["measured"].split()[-1] for run in found.runs] == ["(def)", "(abc)"]

    rendered = tables.render(found)
    assert "| small | 5 | 6 | 0.500 | 0.250 | 2 | 0.500 | 1.000 | 1 of 2 | 1 of 2 | 21.0 | 0.25 |" in rendered
    assert "| large | 5 | 5 |" in rendered
    assert "rounds" not in rendered


def test_the_second_model_goes_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "MODELS", tmp_path)
    monkeypatch.setattr(coder, "missing", lambda: None)
    with pytest.raises(FileNotFoundError, match=r"benchmarks\.coder makes it"):
        location(coder.NAME)
    models.directory(coder.NAME).mkdir()
    assert location(coder.NAME) == models.directory(coder.NAME)
    assert location(str(tmp_path)) == tmp_path
    with pytest.raises(FileNotFoundError, match="there is no directory"):
        location(str(tmp_path / "nothing"))
