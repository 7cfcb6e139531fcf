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
    """The path of the brain's `forebay`. A node without this file looks for `forebay` on its `PATH`."""
    join: str
    """`HOST:PORT` of the brain."""
    token: str
    name: str
    hands: int


def command(order: Order) -> list[str]:
    """The command line. It does not contain the token, since process lists would show it; a pipe passes the token.

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
    """The outpost's environment variables. They make only these GPUs visible, or none if hands need no GPU."""
    return {**given, "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else dict(given)


def run(order: Order, gpus: Sequence[object]) -> int:
    """Runs an outpost to its end, or to this process's end. Returns its exit status.

    The kernel ends the outpost with the calling thread, so that thread must live as long.
    """
    child = subprocess.Popen(command(order), stdin=subprocess.PIPE, env=environment(os.environ, gpus))
    try:
        # A process that has already ended reports the reason in its log.
        child.communicate(order.token.encode())
        return child.returncode
    finally:
        child.kill()
        child.wait()


class Outpost:
    """The actor that a cluster creates on a node."""

    def __init__(self, order: Order) -> None:
        self._order = order

    def run(self) -> int:
        """Runs the outpost with the devices that the cluster gave this process. Returns its exit status."""
        import ray

        # The node's own numbers of the GPUs, even if Ray did not set the variable of this process.
        return run(self._order, sorted(ray.get_gpu_ids(), key=str))
