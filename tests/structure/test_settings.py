"""The configuration of a part has defaults, can be printed, and has times as durations (ADR 72)."""

import re
from pathlib import Path

import pytest

from tests.structure.repository import files, read

DECLARATION = re.compile(
    r"(?:^#\[derive\((?P<derives>[^)]*)\)\]\n)?(?:#\[[^\n]*\]\n)*^pub struct (?P<name>\w*Config) \{", re.M
)
UNITS = re.compile(r"^    pub (\w+_(?:us|ms|s|secs|seconds)): (?:[ui]\d+|usize|f64|Option<[uif]\d+>),", re.M)

NEVER_SHOWN = {
    "BreakerConfig": "the router shows no configuration",
    "HealthConfig": "the router shows no configuration",
    "PairConfig": "the router shows no configuration",
    "RetryConfig": "the router shows no configuration",
    "RouterConfig": "the router shows no configuration",
    "SchedulerConfig": "made in one place, of the engine's settings and the facts of a hand",
    "SimConfig": "holds a clock and a text, which are no settings",
}
WITHOUT_DEFAULT = {"SchedulerConfig": "made in one place, of the engine's settings and the facts of a hand"}
IN_NUMBERS = {"SimConfig.load_us": "the times of profiles are microseconds of a simulated clock"}
LARGE = ("EngineConfig", "HandConfig", "ServerConfig", "SimConfig")
"""Types with so many fields that code must use their defaults."""


SPELLED_OUT = {Path("crates/forebay/src/simulate.rs"): "a simulation of a model has none of the defaults"}


def sources() -> list[Path]:
    return [path for path in files() if path.suffix == ".rs" and path.parts[0] == "crates"]


def body(text: str, start: int) -> str:
    """The text between the brace that ends at `start` and its closing brace."""
    depth = 1
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start:at]
    return text[start:]


def broken(text: str) -> set[str]:
    """The rules that the configuration types in a file break."""
    found = set()
    for match in DECLARATION.finditer(text):
        name, derives = match["name"], re.findall(r"\w+", match["derives"] or "")
        if "Serialize" not in derives and name not in NEVER_SHOWN:
            found.add(f"{name} is not Serialize")
        default = "Default" in derives or f"impl Default for {name} " in text
        if not default and name not in WITHOUT_DEFAULT:
            found.add(f"{name} has no Default")
        for field in UNITS.findall(body(text, match.end())):
            if f"{name}.{field}" not in IN_NUMBERS:
                found.add(f"{name}.{field} is no Duration")
    return found


def spelled_out(text: str) -> list[str]:
    """The beginnings of literals of a large type that set every field."""
    large = "|".join(LARGE)
    literals = re.finditer(rf"(?<!struct )(?<!for )(?<!-> )(?<!-> &)(?<!impl )\b(?:{large}) \{{", text)
    return [body(text, match.end())[:40] for match in literals if ".." not in body(text, match.end())]


def test_configurations_have_defaults_and_can_be_shown() -> None:
    found = {path: broken(read(path)) for path in sources() if path.parts[2] == "src"}
    assert {path: rules for path, rules in found.items() if rules} == {}


def test_exceptions_are_there() -> None:
    declared = {match["name"] for path in sources() for match in DECLARATION.finditer(read(path))}
    assert declared >= {*NEVER_SHOWN, *WITHOUT_DEFAULT, *LARGE}
    assert len(declared) > len(NEVER_SHOWN) + 5


def test_nobody_spells_every_setting() -> None:
    assert {path for path in sources() if spelled_out(read(path))} == set(SPELLED_OUT)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("#[derive(Debug, Default, Serialize)]\npub struct AConfig {\n    pub a: u32,\n}", set()),
        ("#[derive(Serialize)]\npub struct AConfig {\n    pub a: u32,\n}", {"AConfig has no Default"}),
        ("#[derive(Default)]\n#[serde(default)]\npub struct AConfig {\n}", {"AConfig is not Serialize"}),
        (
            "#[derive(Serialize)]\npub struct AConfig {\n    pub wait_us: u64,\n}\nimpl Default for AConfig {\n}",
            {"AConfig.wait_us is no Duration"},
        ),
    ],
)
def test_a_broken_configuration_is_seen(text: str, found: set[str]) -> None:
    assert broken(text) == found


def test_a_literal_without_defaults_is_seen() -> None:
    assert spelled_out("EngineConfig { page_size: 4, ..config() }; fn f() -> EngineConfig {\n}") == []
    assert spelled_out("let config = EngineConfig { page_size: 4 };") == [" page_size: 4 "]
