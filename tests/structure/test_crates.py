"""Dependencies between crates point one way, and the pure crates have no side effects."""

import json
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.structure.repository import ROOT, files, inside, read, rust_code

PURE = {"protocol", "kvcache", "fair", "draft", "fleet", "scheduler", "balance", "dialect", "vision"}
# These crates handle JSON: in the handshake, and in the arguments of calls. Steps use no JSON.
JSON = {"protocol", "dialect"}
CRATES = sorted(path.parent.name for path in (ROOT / "crates").glob("*/Cargo.toml"))
MAY_BE_UNSAFE = [
    "crates/hand",
    "crates/kernels",
    "crates/cpuhand/src/descriptors.rs",
    "crates/server/benches",
    "crates/server/tests/resources",
]

IMPURE_MODULE = re.compile(r"\bstd\s*::\s*(?:time|net|fs)\b|\bstd\s*::\s*\{[^;]*\b(?:time|net|fs)\b")
UNSAFE = re.compile(r"\bunsafe(?:_code)?\b")


@cache
def manifests() -> dict[str, list[dict[str, Any]]]:
    """The direct dependencies of each crate, as cargo describes them, by the crate's folder."""
    command = ["cargo", "metadata", "--no-deps", "--offline", "--format-version", "1"]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    packages = json.loads(output)["packages"]
    return {Path(package["manifest_path"]).parent.name: package["dependencies"] for package in packages}


@cache
def dependencies() -> dict[str, set[str]]:
    """The names of each crate's direct dependencies, by the crate's folder. Those of tests are left out."""
    return {
        crate: {dependency["name"] for dependency in found if dependency["kind"] != "dev"}
        for crate, found in manifests().items()
    }


def ours(names: set[str]) -> set[str]:
    """The folders of those `names` that are crates of this workspace."""
    return {name.removeprefix("forebay-") for name in names if name.startswith("forebay-")}


def sources(crate_folder: str) -> list[Path]:
    return [path for path in files() if path.suffix == ".rs" and inside(path, [crate_folder])]


@cache
def allowed() -> dict[str, set[str]]:
    """The crates that each crate may use, by the map in ARCHITECTURE.md. The program may use all."""
    text = read(Path("ARCHITECTURE.md"))
    rows = re.findall(r"^\| `(\w+)` \| .* \| ([\w, ]*)\|$", text.split("## Map")[1].split("The packages of")[0], re.M)
    arrows = {crate: {name.strip() for name in names.split(",") if name.strip()} for crate, names in rows}
    arrows["forebay"] = ours(dependencies()["forebay"])
    return arrows


def test_every_crate_is_on_the_map() -> None:
    assert set(dependencies()) == set(allowed())


@pytest.mark.parametrize("crate", CRATES)
def test_crates_use_what_the_map_says(crate: str) -> None:
    assert ours(dependencies()[crate]) == allowed()[crate]


def test_arrows_point_one_way() -> None:
    left = dict(allowed())
    while free := [crate for crate, uses in left.items() if not uses & set(left)]:
        for crate in free:
            del left[crate]
    assert not left, f"{sorted(left)} are in a circle"


@pytest.mark.parametrize("crate", sorted(PURE))
def test_pure_crates_have_no_runtime_and_no_json(crate: str) -> None:
    json = {"serde_json"} if crate not in JSON else set()
    forbidden = {name for name in dependencies()[crate] if name in json or name.startswith("tokio")}
    assert not forbidden, f"{crate} must not depend on {sorted(forbidden)}"


@pytest.mark.parametrize("crate", sorted(PURE))
def test_pure_crates_read_no_clock_file_or_socket(crate: str) -> None:
    sinners = [path for path in sources(f"crates/{crate}/src") if IMPURE_MODULE.search(rust_code(read(path)))]
    assert not sinners


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("use std::time::Instant;", True),
        ("use std::{collections::HashMap, fs::File};", True),
        ("let at = std :: net :: TcpStream::connect(a);", True),
        ("use std::collections::HashMap; use crate::time::Clock;", False),
        ("// not std::time\nlet s = \"std::fs\"; /* std::net */ fn f<'a>(x: &'a str) {}", False),
        ("let quote = '\"'; use std::time::Instant; let other = '\"';", True),
        ('let raw = r#"a " std::fs "#;', False),
    ],
)
def test_the_scan_sees_code_only(code: str, found: bool) -> None:
    assert bool(IMPURE_MODULE.search(rust_code(code))) is found


def test_unsafe_is_in_few_places() -> None:
    sinners = [
        path for path in sources("crates") if not inside(path, MAY_BE_UNSAFE) and UNSAFE.search(rust_code(read(path)))
    ]
    assert not sinners


# Dependencies that no code of the crate names. Remove entries from this list, and add none.
UNNAMED = {("cpuhand", "tempfile"), ("replicas", "forebay-protocol")}


def test_every_dependency_is_named() -> None:
    unnamed = set()
    for crate, found in manifests().items():
        code = "\n".join(rust_code(read(path)) for path in sources(f"crates/{crate}"))
        words = set(re.findall(r"\w+", code))
        names = {dependency["rename"] or dependency["name"] for dependency in found}
        unnamed |= {(crate, name) for name in names if name.replace("-", "_") not in words}
    assert unnamed == UNNAMED


@pytest.mark.parametrize("crate", CRATES)
def test_every_crate_takes_the_workspace_lints(crate: str) -> None:
    assert "[lints]\nworkspace = true" in read(Path("crates", crate, "Cargo.toml"))
