"""Starts a hand as the brain does. It imports only light modules, because a test runs it to start one hand."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

from tests.binary import binary

PYTHON_PATH = Path(__file__).parents[2] / "python"


def spawn(descriptors: dict[int, int], rust: bool = False) -> int:
    """Starts a hand, in Rust or in Python. Returns its process id.

    `descriptors`: {fd in the hand: fd in this process}.
    """
    # Moves descriptors away from the numbers that the hand's descriptors get.
    sources = {to: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for to, fd in descriptors.items()}
    actions = [(os.POSIX_SPAWN_DUP2, source, to) for to, source in sources.items()]
    environment = {**os.environ, "PYTHONPATH": str(PYTHON_PATH)}
    command = [str(binary()), "hand"] if rust else [sys.executable, "-m", "forebay.worker"]
    try:
        return os.posix_spawn(command[0], command, environment, file_actions=actions)
    finally:
        for source in sources.values():
            os.close(source)
