"""Marks the cases of slow_cases.txt as slow."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

LIST = Path(__file__).with_name("slow_cases.txt")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the listed cases. Raises `UsageError` if a line names no case of a file that was collected as a whole."""
    by_file: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.nodeid.partition("::")[0], []).append(item)
    # With --last-failed only the failed cases are collected.
    whole = not any("::" in argument for argument in config.args) and not config.getoption("lf", False)
    for line in LIST.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = re.compile(re.escape(line).replace(r"\*", ".*"))
        cases = by_file.get(line.partition("::")[0], [])
        found = [item for item in cases if pattern.fullmatch(item.nodeid)]
        if cases and whole and not found:
            raise pytest.UsageError(f"{LIST.name}: no case is called {line}")
        for item in found:
            item.add_marker(pytest.mark.slow)
