"""External programs that check the files of a deployment, and the flags of Forebay's own program."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.binary import ROOT, binary

DEPLOY = ROOT / "deploy"
_FOLDERS = (ROOT / ".venv/deploy/bin", ROOT / ".venv/bin")


def tool(name: str) -> str:
    """The path of a program; skips the test where it is not installed."""
    path = shutil.which(name, path=os.pathsep.join([*map(str, _FOLDERS), os.environ.get("PATH", "")]))
    if path is None:
        pytest.skip(f"{name} is not installed: see docs/operations.md, or `make setup-deploy setup-deploy-go`")
    return path


def run(name: str, *arguments: str | Path, cwd: Path = ROOT, stdin: str | None = None) -> str:
    """The standard output of a program. Fails with all its output if its status is not 0."""
    done = subprocess.run(
        [tool(name), *arguments], cwd=cwd, input=stdin, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{name} {arguments}: status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


@cache
def flags(command: str) -> frozenset[str]:
    """The flags of `forebay COMMAND`, with their dashes."""
    program = binary()
    assert program.is_file(), "run `make build-tests` first"
    done = subprocess.run([program, command, "--help"], capture_output=True, text=True, timeout=60, check=True)
    # A flag begins its line, perhaps after a short form. Aliases are in brackets below it.
    found = re.findall(r"^ +(?:-\w, )?(--[\w-]+)|\[alias(?:es)?: ([^\]]+)\]", done.stdout, re.MULTILINE)
    return frozenset(name for pair in found for text in pair for name in re.findall(r"--[\w-]+", text))


def unknown_flags(command: str, arguments: list[str]) -> list[str]:
    """The `arguments` that look like flags and are no flags of `forebay COMMAND`."""
    given = [argument.split("=")[0] for argument in arguments if argument.startswith("--")]
    return [name for name in given if name not in flags(command)]
