"""The targets of make, and the commands that it would run."""

import os
import re
import subprocess
from functools import cache

from benchmarks import registry
from tests.structure.repository import ROOT


def plan(*arguments: str, **variables: str) -> str:
    """The commands that make would run with these variables in the environment.

    Variables of the running make are removed, because `make test PROFILE=release` passes its own to the tests.
    """
    environment = {key: value for key, value in os.environ.items() if "MAKE" not in key and "PROFILE" not in key}
    command = ["make", "--dry-run", *arguments]
    answer = subprocess.run(
        command, cwd=ROOT, env={**environment, **variables}, check=True, capture_output=True, text=True
    )
    return answer.stdout


@cache
def targets() -> frozenset[str]:
    """The targets whose names are not paths, and the targets of benchmarks, which share one rule."""
    explicit = re.findall(r"^([a-z][a-z0-9-]*):", plan("--print-data-base", "help"), re.MULTILINE)
    return frozenset(explicit) | {f"bench-{name}" for name in registry.benchmarks()}
