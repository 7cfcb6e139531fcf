"""Tables and their cells, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.records import Ratio


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table: the first column is text, the others are numbers."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *rows])


def number(value: float | None) -> str:
    """Three digits or more, and no false ones after them; a dash for what was not measured."""
    if value is None:
        return "-"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def spread(ratio: Ratio | None) -> str:
    """A ratio, with its least and its most where they say something else."""
    if ratio is None:
        return "-"
    middle, least, most = (f"{value:.2f}" for value in (ratio.median, ratio.least, ratio.most))
    return middle if least == most else f"{middle} ({least}-{most})"
