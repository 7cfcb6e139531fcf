"""The hand in Rust without a server, to measure its steps: a process that receives plans."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.in_process import PAGE, hand_config
from benchmarks.servers import FOREBAY
from forebay.protocol.connection import Connection
from forebay.protocol.constants import FLAG_SAMPLE
from forebay.protocol.frames import Kind, encode_json
from forebay.protocol.plan import Plan
from forebay.protocol.result import StepResult

SOCKET = 3
"""The descriptor at which a hand finds its socket."""
ROW = tuple[int, int, int]
"""Slot, first position and number of positions."""


class RustHand:
    """A process of the Rust hand with a model. Each slot has pages for all of its positions, in random order."""

    def __init__(self, model: dict[str, Any], *, slots: int, context: int, threads: int, **settings: Any) -> None:
        """Starts the hand with `settings` of `hand_config`. Raises RuntimeError with the end of its log."""
        pages = -(-context // PAGE)
        tokens = slots * pages * PAGE
        config = hand_config(
            model, threads=threads, slots=slots, context=context, tokens=tokens, step_tokens=context, **settings
        )
        self._pages = np.random.default_rng(0).permutation(slots * pages).reshape(slots, pages)
        ours, theirs = socket.socketpair()
        with theirs:
            # A high descriptor number, which does not collide with the one that it is copied to.
            source = fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, 10)
            command = [str(FOREBAY), "hand"]
            actions = [(os.POSIX_SPAWN_DUP2, source, SOCKET)]
            self._process = os.posix_spawn(command[0], command, os.environ, file_actions=actions)
            os.close(source)
        self._socket, self._connection = ours, Connection(ours)
        self._connection.send(encode_json(Kind.CONFIG, config))
        while (frame := self._connection.recv()) is not None and frame.kind != Kind.READY:
            if frame.kind == Kind.FATAL:
                raise RuntimeError(frame.json()["error"])
        if frame is None:
            raise RuntimeError("the hand has ended")
        self.facts: dict[str, Any] = frame.json()
        self._step = 0

    def __enter__(self) -> RustHand:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._socket.close()
        os.waitpid(self._process, 0)

    def _run(self, **columns: Any) -> StepResult:
        self._step += 1
        self._connection.send(Plan(self._step, **columns).encode())
        frame = self._connection.recv()
        if frame is None or frame.kind != Kind.RESULT:
            raise RuntimeError("the hand has ended" if frame is None else frame.json()["error"])
        return StepResult.decode(frame)

    def put(self, slot: int, tokens: Sequence[int]) -> None:
        """Writes a slot's first tokens, and gives the slot its pages."""
        pages = self._pages[slot]
        writes = np.stack((np.full_like(pages, slot), np.arange(len(pages)), pages), axis=1)
        self._run(
            slots=np.array([[slot, len(tokens), len(tokens), 0, 0, 0, 0, -1, 0, 0, -1]], np.int32),
            slot_floats=np.array([[0, 1, 0, 1, 0, 0]], np.float32),
            tokens=np.array(tokens, np.int32),
            page_writes=writes.astype(np.int32),
        )

    def greedy(self, rows: Sequence[ROW]) -> list[int]:
        """The next token of each row; all rows are computed in one step."""
        words = np.array([(*row, FLAG_SAMPLE) for row in rows], np.int32)
        tokens: list[int] = self._run(rows=words).tokens.tolist()
        return tokens

    def step_ms(self, rows: Sequence[ROW]) -> float:
        """Milliseconds from sending a step of these rows to its result."""
        started = time.perf_counter()
        self.greedy(rows)
        return (time.perf_counter() - started) * 1e3

    def losses(self, slot: int, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Negative log-likelihoods [length - 1] of each token after those before it."""
        self.put(slot, tokens)
        count = len(tokens) - 1
        result = self._run(
            rows=np.array([(slot, 0, len(tokens), 0)], np.int32),
            prompt_logprobs=np.array([(slot, 1, count, 0)], np.int32),
        )
        return -np.asarray(result.prompt_values, np.float32)
