"""An outpost as a child process, on a node of a cluster. This module imports no cluster library, so tests need none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Order:
    """The order to run an outpost. It is sent to the node, and includes the token."""

    program: str
    """The path of the brain's `forebay`. A node without this file looks for `forebay` on its `PATH`."""
    join: str
    """`HOST:PORT` of the brain."""
    token: str
    name: str
    hands: int


def command(order: Order) -> list[str]:
    """Returns the command line. A pipe passes the token, because process lists would show a token in the command line.

    Raises:
        FileNotFoundError: The node has no `forebay`.
    """
    own = os.path.isfile(order.program) and os.access(order.program, os.X_OK)
    program = order.program if own else shutil.which("forebay")
    if program is None:
        raise FileNotFoundError(f"neither {order.program} nor a `forebay` on PATH: the wheel of Forebay brings one")
    line = [program, "worker", "--join", order.join, "--token-file", "/dev/stdin"]
    line += ["--hands", str(order.hands), "--name", order.name, "--parent", str(os.getpid())]
    # The environment of this interpreter has the packages that hands need.
    return line if "FOREBAY_PYTHON" in os.environ else [*line, "--python", sys.executable]


def environment(given: Mapping[str, str], gpus: Sequence[object]) -> dict[str, str]:
    """Returns the outpost's environment: `given`, in which only `gpus` are visible. Without GPUs, `given` unchanged."""
    return {**given, "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else dict(given)


def run(order: Order, gpus: Sequence[object]) -> int:
    """Runs an outpost until it exits or this process exits. Returns the outpost's exit status.

    The kernel kills the outpost when the calling thread ends, so that thread must run as long as the outpost.
    """
    child = subprocess.Popen(command(order), stdin=subprocess.PIPE, env=environment(os.environ, gpus))
    try:
        # If the process has already exited, its log has the reason.
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
        """Runs the outpost with the devices that the cluster gave this process. Returns the outpost's exit status."""
        import ray

        # The node's GPU indices. Ray may not have set CUDA_VISIBLE_DEVICES for this process.
        return run(self._order, sorted(ray.get_gpu_ids(), key=str))
