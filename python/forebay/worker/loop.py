"""The main loop of a hand: handshake, load, then plans in and results out until the brain exits."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import signal
import socket
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from forebay.protocol.connection import Connection, Dismissed, Ring
from forebay.protocol.frames import Frame, Kind, WireError, encode_json
from forebay.protocol.masks import Masks
from forebay.protocol.place import PlanAt
from forebay.protocol.plan import Plan
from forebay.worker.report import reporter

if TYPE_CHECKING:
    import torch

    from forebay.distributed.group import Group
    from forebay.runner.runner import ModelRunner

SOCKET_DESCRIPTOR = 3
ARENA_DESCRIPTOR = 4
HOST_DESCRIPTOR = 5
PROGRESS_INTERVAL_S = 0.1

_PR_SET_PDEATHSIG = 1


class RefusedError(Exception):
    """The configuration is not possible. The message is one line for the user; a traceback would not help."""

    def __init__(self, reason: ValueError) -> None:
        super().__init__(str(reason))
        self.reason = reason


def main() -> int:
    """Serves the brain on descriptor 3.

    Returns the exit status: 0 if the brain ordered the exit or has exited, 1 after a failure.
    """
    _die_with_parent()
    # A terminal sends SIGINT to the whole foreground process group, but the brain decides when its hands exit.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for descriptor in (SOCKET_DESCRIPTOR, ARENA_DESCRIPTOR, HOST_DESCRIPTOR):
        if descriptor == SOCKET_DESCRIPTOR or _is_open(descriptor):
            os.set_inheritable(descriptor, False)
    connection = Connection(socket.socket(fileno=SOCKET_DESCRIPTOR))
    try:
        serve(connection)
    except (BrokenPipeError, ConnectionResetError, Dismissed):
        return 0
    except RefusedError as error:
        _send_fatal(connection, str(error))
        return 1
    except Exception as error:
        traceback.print_exc()
        _send_fatal(connection, f"{type(error).__name__}: {error}")
        return 1
    return 0


def serve(connection: Connection) -> None:
    """Runs the handshake, then the step loop. Returns at the end of the stream or on `shutdown`."""
    connection.send(encode_json(Kind.HELLO, {"pid": os.getpid()}))
    frame = connection.recv()
    if frame is None:
        return
    if frame.kind != Kind.CONFIG:
        raise WireError(f"expected config, got {frame.kind.name.lower()}")
    runner, arena = _load(connection, frame.json())
    connection.receive_into(Ring(runner.device.host_memory))
    reporting = reporter(connection, runner.device.beside_host)

    def next_frame() -> Frame | None:
        received = connection.recv()
        while received is not None and received.kind == Kind.ADAPTER:
            # An adapter frame may come between any other frames, even between a plan and its masks.
            runner.know(received.json())
            received.release()
            received = connection.recv()
        if received is None or received.kind != Kind.PLAN_AT:
            return received
        # The brain writes a plan to the arena once for all ranks. It is copied to memory from which device copies are
        # fast.
        return connection.copied(*PlanAt.decode(received).read(arena))

    def masks() -> Masks:
        # A plan's masks are the next frame, unless the brain has exited or orders the hand to exit.
        following = next_frame()
        if following is None or following.kind == Kind.SHUTDOWN:
            raise Dismissed
        return Masks.decode(following)

    try:
        while (frame := next_frame()) is not None and frame.kind != Kind.SHUTDOWN:
            reporting.report(runner.launch(Plan.decode(frame), masks))
    except Dismissed:
        return
    finally:
        # This also runs after a plan that can't be executed: the brain first gets the earlier results, then the reason.
        reporting.close()


def _load(connection: Connection, config: dict[str, Any]) -> tuple[ModelRunner, npt.NDArray[np.uint8]]:
    """Returns a runner that is ready, and the arena."""
    started = time.monotonic()
    # Other processes need these processors too. By default, an OpenMP thread spins long at a barrier and may occupy the
    # processor that the last thread needs, which makes a step several times slower. Without spinning, each of a step's
    # hundreds of barriers costs a wake-up. With this value, a thread spins for some tenths of a millisecond and then
    # sleeps.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    # Importing torch takes seconds: report the stage first.
    connection.send(encode_json(Kind.PROGRESS, {"stage": "pytorch", "done": 0, "total": 1}))
    from forebay.device import DeviceError
    from forebay.distributed.group import open_group
    from forebay.distributed.store import BrainStore
    from forebay.runner.host_tier import HostMemory
    from forebay.runner.runner import ModelRunner
    from forebay.state.config import ConfigError, RunnerConfig
    from forebay.weights.errors import ModelError

    host = HostMemory(HOST_DESCRIPTOR, SOCKET_DESCRIPTOR) if _is_open(HOST_DESCRIPTOR) else None
    try:
        resolved = RunnerConfig.from_dict(config)
        for descriptor in resolved.host_lenders:
            if descriptor is not None:
                os.set_inheritable(descriptor, False)
        arena = _map_arena(resolved.arena_bytes)

        def meet(device: torch.device) -> Group:
            return open_group(BrainStore(connection), resolved.rank, resolved.world_size, device)

        runner = ModelRunner(resolved, arena, host, meet)
        runner.load(Progress(connection, "weights"))
        runner.warm_up()
    except (ConfigError, DeviceError, ModelError) as error:
        raise RefusedError(error) from error
    # Objects from the load live as long as the process, so full collections can skip them.
    gc.collect()
    gc.freeze()
    facts = {**runner.facts(), "load_seconds": round(time.monotonic() - started, 3)}
    connection.send(encode_json(Kind.READY, facts))
    return runner, arena


class Progress:
    """Sends `progress` frames: the first, the last, and between them at most one every `PROGRESS_INTERVAL_S`."""

    def __init__(self, connection: Connection, stage: str) -> None:
        self._connection = connection
        self._stage = stage
        self._next = 0.0

    def __call__(self, done: int, total: int) -> None:
        """Reports that `done` of `total` parts are finished."""
        now = time.monotonic()
        if now >= self._next or done == total:
            self._next = now + PROGRESS_INTERVAL_S
            self._connection.send(encode_json(Kind.PROGRESS, {"stage": self._stage, "done": done, "total": total}))


def _map_arena(size: int) -> npt.NDArray[np.uint8]:
    """Returns the shared arena as read-only bytes; empty if `size` is 0."""
    if size == 0:
        return np.zeros(0, np.uint8)
    mapped = mmap.mmap(ARENA_DESCRIPTOR, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    os.close(ARENA_DESCRIPTOR)
    return np.frombuffer(mapped, np.uint8)


def _die_with_parent() -> None:
    """Makes the kernel kill this process when the thread that spawned it ends. Exits if the parent has exited."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit(0)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _send_fatal(connection: Connection, why: str) -> None:
    line = " ".join(why.split())
    try:
        connection.send(encode_json(Kind.FATAL, {"error": line, "traceback": traceback.format_exc()}))
    except OSError:
        # The brain has exited too, so only the traceback on stderr remains.
        return
