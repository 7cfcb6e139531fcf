"""The files for GitHub and similar sites: workflows, hooks, and the form for bug reports."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.binary import ROOT
from tests.deploy.tools import run, tool
from tests.structure.make import targets
from tests.structure.repository import files

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps(workflow: Path) -> list[dict[str, Any]]:
    return [step for job in loaded(workflow)["jobs"].values() for step in job["steps"]]


def test_yaml_is_tidy() -> None:
    found = [str(path) for path in files() if path.suffix in {".yaml", ".yml"} and "templates" not in path.parts]
    assert len(found) > 10
    run("yamllint", "--strict", *found)


def test_actionlint_has_nothing_to_say() -> None:
    run("actionlint", "-shellcheck", tool("shellcheck"), *map(str, WORKFLOWS))


def test_actionlint_sees_mistakes(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(WORKFLOWS[0].read_text(encoding="utf-8").replace("runs-on:", "run-on:"))
    done = subprocess.run([tool("actionlint"), "-shellcheck=", str(wrong)], capture_output=True, check=False)
    assert done.returncode == 1


def test_there_are_workflows() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "wheels.yml"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_may_do_little(workflow: Path) -> None:
    found = loaded(workflow)
    assert found["permissions"] == {"contents": "read"}
    for name, job in found["jobs"].items():
        assert job["timeout-minutes"] <= 180
        assert name == "release" or "permissions" not in job
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned(workflow: Path) -> None:
    names = [step["uses"] for step in steps(workflow) if "uses" in step]
    assert names
    for name in names:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+@(v\d+|[0-9a-f]{40})", name), name


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_what_is_there(workflow: Path) -> None:
    commands = "\n".join(step["run"] for step in steps(workflow) if "run" in step)
    for line in re.findall(r"^make (.+)$", commands, re.MULTILINE):
        for word in shlex.split(line):
            if "=" not in word:
                assert word in targets(), f"make {word}"
    for script in re.findall(r"(?:^|\s)(\.ci/\w+|scripts/\S+)", commands):
        assert (ROOT / script).is_file(), script


def test_ci_runs_what_developers_run() -> None:
    commands = [step.get("run", "") for step in steps(ROOT / ".github/workflows/ci.yml")]
    assert ".ci/run" in commands


def test_wheels_are_made_for_both_processors() -> None:
    found = loaded(ROOT / ".github/workflows/wheels.yml")["jobs"]
    assert {each["arch"] for each in found["wheel"]["strategy"]["matrix"]["include"]} == {"x86_64", "aarch64"}
    assert {each["arch"] for each in found["try"]["strategy"]["matrix"]["include"]} == {"x86_64", "aarch64"}
    assert found["release"]["needs"] == "try"
    assert found["try"]["needs"] == "wheel"


def test_hooks_check_what_lint_checks() -> None:
    (local,) = loaded(ROOT / ".pre-commit-config.yaml")["repos"]
    assert local["repo"] == "local"
    hooks = " ".join(hook["entry"] for hook in local["hooks"])
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert recipe
    profile = re.search(r"^TEST_PROFILE \?= (\w+)", MAKEFILE, re.MULTILINE)
    flags = re.search(r"^CARGO_FLAGS := (.*)", MAKEFILE, re.MULTILINE)
    assert profile
    assert flags
    for line in recipe[1].strip().splitlines():
        command = line.strip().replace("$(BIN)", ".venv/bin")
        command = command.replace("$(CARGO_FLAGS)", flags[1]).replace("$(TEST_PROFILE)", profile[1])
        assert command in hooks, command


def test_pre_commit_takes_its_configuration() -> None:
    run("pre-commit", "validate-config", ".pre-commit-config.yaml")


def test_the_form_asks_for_what_is_needed() -> None:
    form = loaded(ROOT / ".github/ISSUE_TEMPLATE/bug.yml")
    assert {"name", "description", "body"} <= form.keys()
    fields = {field["id"]: field for field in form["body"]}
    assert len(fields) == len(form["body"])
    assert "forebay doctor" in fields["doctor"]["attributes"]["label"]
    for field in fields.values():
        assert field["type"] in {"textarea", "input", "checkboxes", "dropdown", "markdown"}
        assert "label" in field["attributes"]
    assert fields["doctor"]["validations"]["required"] is True
    assert (ROOT / "SECURITY.md").is_file()
