"""What make can make here, and what it would run."""

import os
import re
import subprocess
from functools import cache

from benchmarks import registry
from tests.structure.repository import ROOT


def plan(*arguments: str, **variables: str) -> str:
    """The commands that make would run, with variables of the environment.

    It is as if nothing else were set: `make test PROFILE=release` passes its variables on to the tests.
    """
    environment = {key: value for key, value in os.environ.items() if "MAKE" not in key and "PROFILE" not in key}
    command = ["make", "--dry-run", *arguments]
    answer = subprocess.run(
        command, cwd=ROOT, env={**environment, **variables}, check=True, capture_output=True, text=True
    )
    return answer.stdout


@cache
def targets() -> frozenset[str]:
    """The targets that are not paths, and the benchmarks, which one rule makes."""
    explicit = re.findall(r"^([a-z][a-z0-9-]*):", plan("--print-data-base", "help"), re.MULTILINE)
    return frozenset(explicit) | {f"bench-{name}" for name in registry.benchmarks()}
