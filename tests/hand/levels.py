"""The levels of instructions that the compiled kernels have loops for."""

from __future__ import annotations

import json
import re
import subprocess
from functools import cache
from pathlib import Path

from tests.binary import binary

LEVELS = {
    "amx": "amx_tile",
    "avx512bf16": "avx512_bf16",
    "avx512vnni": "avx512_vnni",
    "avx512": "avx512dq",
    "avxvnni": "avx_vnni",
    "avx2": "avx2",
    "baseline": "",
}
"""All levels, best first, and the feature that Linux lists for each."""


@cache
def features() -> set[str]:
    """The processor's features, under the names that Linux gives them."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {word for line in lines if line.startswith("flags") for word in line.split()} | {""}


@cache
def built() -> set[str]:
    """The levels that the program has kernels for: `FOREBAY_LEVELS` can leave some out of a build."""
    done = subprocess.run([binary(), "doctor", "--json", "--offline"], capture_output=True, text=True, check=False)
    (says,) = (one["says"] for one in json.loads(done.stdout)["findings"] if one["what"] == "CPU kernels")
    found = re.search(r"this program has ([^;]+)", says)
    assert found, says
    return set(found[1].split(", "))
