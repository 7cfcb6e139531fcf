"""Files of a Rust crate that need each other are in one folder. So a folder can be read without the ones around it."""

from pathlib import Path

import pytest

from tests.structure.repository import files, read
from tests.structure.rust_modules import arrows, circles, folder, modules

KNOWN = {"engine": 4}
"""The number of a crate's files in dependency cycles across folders. Numbers may only become smaller."""


def across(root: Path, texts: dict[Path, str]) -> list[set[Path]]:
    """The dependency cycles of a crate whose files are in several folders."""
    found = circles(arrows(modules(root, texts)))
    return [circle for circle in found if len({folder(file, texts) for file in circle}) > 1]


def roots() -> list[Path]:
    return [path for path in files() if path.match("crates/*/src/lib.rs") or path.match("crates/*/src/main.rs")]


@pytest.mark.parametrize("root", roots(), ids=lambda root: root.parts[1])
def test_circles_stay_in_one_folder(root: Path) -> None:
    texts = {path: read(path) for path in files() if path.suffix == ".rs" and path.is_relative_to(root.parent)}
    found = across(root, texts)
    shown = [", ".join(sorted(str(file.relative_to(root.parent)) for file in circle)) for circle in found]
    assert sum(len(circle) for circle in found) == KNOWN.get(root.parts[1], 0), shown


CRATE = {
    "lib.rs": "mod a;\nmod b;\nmod c;\npub use a::A;",
    "a.rs": "mod deep;\npub use deep::Deep;\nuse crate::c;\npub struct A(c::C);",
    "a/deep.rs": "use super::A;\npub struct Deep(A);",
    "b/mod.rs": "mod tests_only;\nuse crate::a::Deep;\npub struct B(Deep);",
    "b/tests_only.rs": "",
    "c.rs": "pub struct C;",
}


def crate(**changed: str) -> list[set[str]]:
    """The dependency cycles across folders of `CRATE` with changed texts. `a__deep` is the file `a/deep.rs`."""
    texts = CRATE | {name.replace("__", "/") + ".rs": text for name, text in changed.items()}
    found = across(Path("src/lib.rs"), {Path("src", name): text for name, text in texts.items()})
    return [{str(file.relative_to("src")) for file in circle} for circle in found]


def test_a_module_and_its_folder_are_one() -> None:
    assert crate() == []


@pytest.mark.parametrize(
    ("c", "circle"),
    [
        ("use crate::b::B;\npub struct C(B);", {"a.rs", "a/deep.rs", "b/mod.rs", "c.rs"}),
        ("use crate::{b::{self}, a as _};\npub struct C(b::B);", {"a.rs", "a/deep.rs", "b/mod.rs", "c.rs"}),
        ("pub struct C;\nfn f(_: &super::b::B) {}", {"a.rs", "a/deep.rs", "b/mod.rs", "c.rs"}),
        ("pub struct C(Box<crate::a::Deep>);", {"a.rs", "a/deep.rs", "c.rs"}),
        ("use crate::a::*;\npub struct C(A);", {"a.rs", "c.rs"}),
        ("/// Used by [`crate::b::B`].\npub struct C;\n#[cfg(test)]\nmod tests {\n    use crate::b::B;\n}", set()),
        ("pub use crate::b::B;\npub struct C;", set()),
    ],
)
def test_a_circle_is_found_through_any_form_of_path(c: str, circle: set[str]) -> None:
    assert crate(c=c) == ([circle] if circle else [])
