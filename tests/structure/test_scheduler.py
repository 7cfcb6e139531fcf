"""The scheduler's state has four owners: the roster, turns, memory and images (ADR 71)."""

import re
from pathlib import Path

import pytest

from tests.structure.repository import files, inside, read, rust_code

SOURCE = Path("crates/scheduler/src")
MEMORY = SOURCE / "memory"
SETTINGS = SOURCE / "config.rs"
OWNERS = [str(SOURCE / name) for name in ("roster.rs", "turns", "memory", "images", "retirement.rs", "entry.rs")]
_KIND = re.compile(
    r"\.\s*sparse\b|\b(?:was|is|make|keeps)_(?:sparse|nothing)\b|\bSchedulerConfig\s*\{[^}]*\bsparse\b|\bKind::|\bTiers\b"
)


def questions(code: str) -> list[str]:
    """The expressions in Rust code that test which kind of memory is used."""
    return _KIND.findall(rust_code(code))


def sources() -> list[Path]:
    return [path for path in files() if path.suffix == ".rs" and inside(path, [str(SOURCE)])]


def test_the_owners_are_where_this_test_looks() -> None:
    assert all(any(inside(path, [owner]) for path in sources()) for owner in OWNERS)
    assert any(questions(read(path)) for path in sources() if inside(path, [str(MEMORY)]))


def test_only_memory_knows_its_kind() -> None:
    others = [path for path in sources() if path != SETTINGS and not inside(path, [str(MEMORY)])]
    assert not {str(path): found for path in others if (found := questions(read(path)))}


def test_no_owner_names_the_scheduler() -> None:
    owned = [path for path in sources() if inside(path, OWNERS)]
    assert not [str(path) for path in owned if re.search(r"\bScheduler\b", rust_code(read(path)))]


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("if self.config.sparse.is_some() {", True),
        ("let rows = config\n    .sparse\n    .map_or(0, |sparse| sparse.row_pages);", True),
        ("let SchedulerConfig { pages, sparse, .. } = config;", True),
        ("if self.is_sparse(handle) {", True),
        ("if self.keeps_nothing() {", True),
        ("match self.memory.kind { Kind::Nothing => 0,", True),
        ("let tiers = Tiers::new(pages, 0);", True),
        ("// The model may be sparse: config.sparse says so.", False),
        ("Stats { sparse: self.memory.sparse_stats(), ..counters }", False),
        ("let most = entry.pages.longest_row();", False),
    ],
)
def test_the_scan_sees_questions_only(code: str, found: bool) -> None:
    assert bool(questions(code)) is found
