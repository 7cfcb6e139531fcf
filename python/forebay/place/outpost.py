"""An outpost as a child process, on a node of a cluster. This module imports no cluster, so tests need none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Order:
    """The order to run an outpost. It travels to the node, and contains the token."""

    program: str
    """The `forebay` of the brain. A node that lacks this file looks for one on its `PATH`."""
    join: str
    """`HOST:PORT` of the brain."""
    token: str
    name: str
    hands: int


def command(order: Order) -> list[str]:
    """The command line. It lacks the token, which comes through a pipe, so that no list of processes shows it.

    Raises:
        FileNotFoundError: The node has no `forebay`.
    """
    own = os.path.isfile(order.program) and os.access(order.program, os.X_OK)
    program = order.program if own else shutil.which("forebay")
    if program is None:
        raise FileNotFoundError(f"neither {order.program} nor a `forebay` on PATH: the wheel of Forebay brings one")
    line = [program, "worker", "--join", order.join, "--token-file", "/dev/stdin"]
    line += ["--hands", str(order.hands), "--name", order.name, "--parent", str(os.getpid())]
    # The packages are where this code was found.
    return line if "FOREBAY_PYTHON" in os.environ else [*line, "--python", sys.executable]


def environment(given: Mapping[str, str], gpus: Sequence[object]) -> dict[str, str]:
    """The outpost's variables. Only these GPUs are visible to it. None are named if hands need none."""
    return {**given, "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else dict(given)


def run(order: Order, gpus: Sequence[object]) -> int:
    """Runs an outpost to its end, or to this process's end. Returns its exit status.

    The kernel ends the outpost with the calling thread, so that thread has to last.
    """
    child = subprocess.Popen(command(order), stdin=subprocess.PIPE, env=environment(os.environ, gpus))
    try:
        # A process that has ended already reports why in its log.
        child.communicate(order.token.encode())
        return child.returncode
    finally:
        child.kill()
        child.wait()


class Outpost:
    """The actor, which a cluster creates on a node."""

    def __init__(self, order: Order) -> None:
        self._order = order

    def run(self) -> int:
        """Runs the outpost with the devices that the cluster gave this process. Returns its exit status."""
        import ray

        # The node's own numbers, whether or not Ray has also set the variable of this process.
        return run(self._order, sorted(ray.get_gpu_ids(), key=str))
