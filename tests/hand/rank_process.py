"""Processes of ranks for tests. One `python -m tests.hand.rank_process JSON` starts several groups.

It imports the modules that ranks need once, and forks the ranks before PyTorch has made a thread. Each rank joins its
group through the stand-in for the brain's store. Then it runs cases of `tests.hand.rank_cases`, one for each line of
JSON.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forebay.protocol.connection import Connection
from tests.hand.meeting import Meeting

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300.0


class RankGroups:
    """Groups of rank processes, by their number of ranks."""

    def __init__(self, worlds: Sequence[int], gpus: Sequence[int] = ()) -> None:
        """`gpus`: the GPU of each rank. Without them ranks compute on CPUs."""
        self._files: dict[int, list[Any]] = {}
        self._sockets: dict[int, list[socket.socket]] = {}
        self.meetings: dict[int, Meeting] = {}
        members: list[dict[str, int]] = []
        theirs: list[socket.socket] = []
        for world in worlds:
            self._files[world], self._sockets[world], self.meetings[world] = [], [], Meeting()
            for rank in range(world):
                (control, its_control), (brain, its_brain) = socket.socketpair(), socket.socketpair()
                self._files[world].append(control.makefile("rw"))
                self._sockets[world].append(control)
                theirs += [its_control, its_brain]
                member = {"world": world, "rank": rank, "control": its_control.fileno(), "brain": its_brain.fileno()}
                members.append({**member, "gpu": gpus[rank] if gpus else -1})
                target = self.meetings[world].serve
                threading.Thread(target=target, args=(Connection(brain),), daemon=True).start()
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'python'}", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.hand.rank_process", json.dumps(members)],
            pass_fds=[end.fileno() for end in theirs],
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )
        for end in theirs:
            end.close()

    def run(self, world: int, case: str, **arguments: Any) -> list[Any]:
        """Runs a case, and returns the result of each rank of the group."""
        files = self._files[world]
        for file in files:
            file.write(json.dumps({"case": case, **arguments}) + "\n")
            file.flush()
        found: dict[int, Any] = {}
        while len(found) < world:
            sockets = {self._sockets[world][rank]: rank for rank in range(world) if rank not in found}
            readable, _, _ = select.select(list(sockets), [], [], TIMEOUT_S)
            assert readable, f"{case} takes more than {TIMEOUT_S} s"
            for rank in map(sockets.__getitem__, readable):
                answer = json.loads(files[rank].readline() or '{"error": "a rank has gone"}')
                if "error" in answer:
                    # The other ranks may wait for this rank in a collective.
                    os.killpg(self._process.pid, signal.SIGKILL)
                    raise AssertionError(answer["error"])
                found[rank] = answer["value"]
        return [found[rank] for rank in range(world)]

    def close(self) -> None:
        for ends in (*self._files.values(), *self._sockets.values()):
            for end in ends:
                end.close()
        status = self._process.wait(TIMEOUT_S)
        assert status in (0, -signal.SIGKILL), status


def main(members: list[dict[str, int]]) -> None:
    """Forks the ranks, and waits for them."""
    # The import comes before the forks, so that it runs once.
    from tests.hand import rank_cases

    children = []
    for member in members:
        child = os.fork()
        if child == 0:
            for other in members:
                if other is not member:
                    os.close(other["control"])
                    os.close(other["brain"])
            status = 1
            try:
                serve(member, rank_cases)
                status = 0
            finally:
                sys.stdout.flush()
                os._exit(status)
        children.append(child)
    for member in members:
        os.close(member["control"])
        os.close(member["brain"])
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(max(map(abs, statuses)))


def serve(member: dict[str, int], cases: Any) -> None:
    """Runs cases until the control socket is closed."""
    if member["gpu"] >= 0:
        # As the brain does: each rank can use its own GPU only. CUDA reads this variable on first use.
        os.environ["CUDA_VISIBLE_DEVICES"] = str(member["gpu"])
    connection = Connection(socket.socket(fileno=member["brain"]))
    group = cases.meet(connection, member["rank"], member["world"], on_gpu=member["gpu"] >= 0)
    control = socket.socket(fileno=member["control"]).makefile("rw")
    for line in control:
        arguments = json.loads(line)
        try:
            answer = {"value": getattr(cases, arguments.pop("case"))(group, **arguments)}
        except Exception:
            answer = {"error": f"rank {member['rank']}: {traceback.format_exc()}"}
        control.write(json.dumps(answer) + "\n")
        control.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
