"""Markdown tables and their cells, and the registry of each benchmark's table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.records import Ratio, Results

Table = Callable[[Results], str]
TABLES: dict[str, Table] = {}
"""The registered tables, by the names of benchmarks."""


def table_of(*benchmarks: str) -> Callable[[Table], Table]:
    """Registers the function below it as the table of these benchmarks' results."""

    def register(table: Table) -> Table:
        TABLES.update(dict.fromkeys(benchmarks, table))
        return table

    return register


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table: the first column is text, the others are numbers."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *rows])


def number(value: float | None) -> str:
    """The number with its significant digits, but at least three; a dash if it was not measured."""
    if value is None:
        return "-"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def spread(ratio: Ratio | None) -> str:
    """A ratio, and its minimum and maximum if they differ from it."""
    if ratio is None:
        return "-"
    middle, least, most = (f"{value:.2f}" for value in (ratio.median, ratio.least, ratio.most))
    return middle if least == most else f"{middle} ({least}-{most})"
