"""Every target of make that a file names exists."""

import re
import shlex
from pathlib import Path

import pytest

from benchmarks import registry
from tests.structure.make import plan, targets
from tests.structure.repository import ROOT, files, read

NAMED = re.compile(r"`make ([^`\n]+)`")
"""A target in text, comments and messages."""
IN_BLOCKS = re.compile(r"^(?:\$ )?make ([a-z][^#\n]*)", re.MULTILINE)
"""A command on its own line."""


def words(command: str) -> list[str]:
    """The targets of a command, without flags, variables and further commands."""
    parts = shlex.split(re.split(r"&&|[;|]", command)[0])
    return [part for part in parts if "=" not in part and not part.startswith("-")]


def missing(path: Path) -> list[str]:
    text = read(path)
    commands = NAMED.findall(text)
    if path.suffix in {".md", ".yml"}:
        commands += IN_BLOCKS.findall(text)
    return [word for command in commands for word in words(command) if word not in targets()]


def test_every_target_that_a_file_names_exists() -> None:
    # The list of changes names targets of its time.
    left_out = {Path("CHANGELOG.md"), Path(__file__).relative_to(ROOT)}
    found = {str(path): names for path in files() if path not in left_out and (names := missing(path))}
    assert not found


def test_continuous_integration_runs_targets() -> None:
    stages = re.findall(r"^\s*(?:tested|make) ([a-z][a-z0-9-]*)", read(Path(".ci/run")), re.MULTILINE)
    lists = re.findall(r"\bsetup\+?=\(([a-z -]+)\)", read(Path(".ci/run")))
    assert {"lint", "test-rust", "wheel-test"} <= set(stages)
    assert {*stages, *" ".join(lists).split()} <= targets()


def test_a_target_that_is_missing_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    block = "```\nmake bench-startup ROUNDS=1\nmake wheel && make bench-none\nmake bench-none # x\n```\n"
    page.write_text(f"`make serve ARGS='--port 1'` and `make no-such`\n\n{block}")
    assert missing(page) == ["no-such", "bench-none"]


@pytest.mark.parametrize("name", sorted(registry.benchmarks()))
def test_what_a_benchmark_needs_is_a_target(name: str) -> None:
    assert set(registry.named(name).needs.split()) <= targets()


def test_suites_are_targets_and_are_chosen_by_name() -> None:
    assert plan("test", "SUITE=moves states") == plan("test-moves", "test-states")
    assert plan("test") == plan("test-rust", "test-python", "test-triton")
    # A variable of the environment does not choose suites, because some systems set it.
    assert plan("test", SUITE="moves") == plan("test")
