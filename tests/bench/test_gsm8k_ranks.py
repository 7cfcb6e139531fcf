"""Differences between the answers of one rank and of several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.studies.gsm8k_ranks import command, differences


def answers(*texts: str) -> list[dict[str, Any]]:
    return [
        {"index": at, "prompt": f"{at}", "text": text, "predicted": int(text.split()[-1])}
        for at, text in enumerate(texts)
    ]


def test_numbers_and_texts_are_told_apart() -> None:
    one = answers("it is 4", "so 5", "hence 6")
    assert differences(one, one) == ([], [])
    assert differences(one, answers("it is 4", "thus 5", "hence 7")) == ([2], [1, 2])
    with pytest.raises(ValueError, match="shorter"):
        differences(one, answers("it is 4"))


def test_both_servers_compute_with_pytorch_on_as_many_threads() -> None:
    one, two = (" ".join(command(Path("forebay"), ranks, 50, 1)) for ranks in (1, 2))
    assert "--device deferred" in one
    assert "--threads 2" in one
    assert "--tp-size 2" in two
    assert "--threads 1" in two
    assert "--device" not in two
