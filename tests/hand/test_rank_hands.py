"""Hands of a rank group: they find each other through the brain's store, and read large plans from the arena."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.protocol.connection import Connection, Ring
from forebay.protocol.frames import HEADER_BYTES, Frame, Kind, WireError, encode, encode_json
from forebay.protocol.masks import INLINE, Masks
from forebay.protocol.place import PlanAt
from forebay.protocol.plan import Plan
from forebay.protocol.result import StepResult
from tests.hand.meeting import Meeting
from tests.hand.process import spawn
from tests.hand.support import FAMILIES, MiniBrain, PlanBuilder, Request, Sampling, hf_config, wire_config

QWEN3 = hf_config(FAMILIES["qwen3"][1], "Qwen3ForCausalLM")
ARENA_BYTES = 1 << 16
TIMEOUT_S = 120.0


class Hand:
    """The brain's end of one rank."""

    def __init__(self, connection: Connection, pid: int, errors: Path) -> None:
        self.connection = connection
        self.pid = pid
        self._errors = errors
        self.status: int | None = None
        self.facts: dict[str, Any] = {}

    def receive(self) -> Frame:
        frame = self.connection.recv()
        assert frame is not None, self._errors.read_text()
        return frame

    def result(self) -> StepResult:
        frame = self.receive()
        assert frame.kind == Kind.RESULT, frame.json()
        return StepResult.decode(frame)

    def start(self, meeting: Meeting, config: dict[str, Any]) -> None:
        """Configures the hand, and answers its store requests until it is ready or ends."""
        assert self.receive().kind == Kind.HELLO
        self.connection.send(encode_json(Kind.CONFIG, config))
        while (frame := self.connection.recv()) is not None:
            if frame.kind == Kind.STORE:
                self.connection.send(meeting.answer(frame))
            elif frame.kind != Kind.PROGRESS:
                self.facts = frame.json()
                return

    def wait(self) -> int:
        if self.status is None:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.status


class Group:
    """Two hands that share an arena."""

    def __init__(self, hands: list[Hand], arena: int, meeting: Meeting) -> None:
        self.hands = hands
        self.meeting = meeting
        self._arena = arena

    def start(self, **changes: Any) -> None:
        threads = []
        for rank, hand in enumerate(self.hands):
            config = wire_config(QWEN3, arena_bytes=ARENA_BYTES, world_size=2, rank=rank, **changes)
            threads.append(threading.Thread(target=hand.start, args=(self.meeting, config)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)

    def send(self, data: bytes) -> None:
        for hand in self.hands:
            hand.connection.send(data)

    def send_at(self, data: bytes, offset: int) -> None:
        """Writes a frame to the arena, and sends its offset."""
        os.pwrite(self._arena, data, offset)
        self.send(PlanAt(Frame.of(data).step, offset, len(data) // 4).encode())

    def results(self) -> StepResult:
        first, second = (hand.result() for hand in self.hands)
        assert first.tokens.tolist() == second.tokens.tolist()
        assert first.row_errors.tolist() == second.row_errors.tolist()
        assert first.step == second.step
        return first


@contextmanager
def group(folder: Path) -> Iterator[Group]:
    arena = os.memfd_create("arena")
    os.truncate(arena, ARENA_BYTES)
    hands = []
    with ExitStack() as stack:
        stack.callback(os.close, arena)
        for rank in range(2):
            ours, theirs = socket.socketpair()
            ours.settimeout(TIMEOUT_S)
            stack.callback(ours.close)
            errors = folder / f"stderr{rank}"
            with errors.open("wb") as stderr, theirs:
                pid = spawn({2: stderr.fileno(), 3: theirs.fileno(), 4: arena})
            hands.append(Hand(Connection(ours), pid, errors))
        try:
            yield Group(hands, arena, Meeting())
        finally:
            for hand in hands:
                if hand.status is None:
                    os.kill(hand.pid, signal.SIGKILL)
                    hand.wait()


def plan_of(step: int) -> PlanBuilder:
    builder = PlanBuilder(step)
    for slot in (0, 1):
        builder.slot(slot, [5, 6, 7 + slot], Sampling(temperature=0.9 * slot, seed=3))
        builder.page_writes += [(slot, index, 3 * slot + index) for index in range(3)]
        builder.row(slot, 0, 3)
    return builder


def one_rank() -> list[list[int]]:
    from forebay.runner.runner import ModelRunner
    from forebay.state.config import RunnerConfig

    runner = ModelRunner(RunnerConfig.from_dict(wire_config(QWEN3)))
    runner.load(lambda done, total: None)
    requests = [Request([5, 6, 7 + slot], 5, Sampling(temperature=0.9 * slot, seed=3)) for slot in (0, 1)]
    MiniBrain(runner).serve(requests)
    return [request.tokens for request in requests]


@pytest.mark.parametrize("device", ["cpu", "deferred"])
def test_from_hello_to_shutdown(tmp_path: Path, device: str) -> None:
    with group(tmp_path) as g:
        g.start(device=device)
        for hand in g.hands:
            assert hand.facts["device"] == f"{device}, 2 ranks, with PyTorch's operators"
            assert hand.facts["kv_bytes"] == 192 * 4 * 2 * 3 * 1 * 32 * 4
        asked = len(g.meeting.questions)
        assert asked

        g.send(plan_of(1).build().encode())
        tokens = [g.results().tokens.tolist()]
        for step in (2, 3):
            builder = PlanBuilder(step)
            for slot in (0, 1):
                builder.row(slot, step + 1, 1)
            g.send_at(builder.build().encode(), 1024 * step)
        tokens += [g.results().tokens.tolist() for _ in range(2)]

        # This plan and its masks are both in the arena, and another plan follows.
        builder = PlanBuilder(4)
        builder.row(0, 5, 1)
        builder.row(1, 5, 1, masked=True)
        g.send_at(builder.build().encode(), 8192)
        words = np.full(5, -1, np.int32)
        g.send_at(Masks(4, np.array([INLINE], np.int32), words).encode(), 16384)
        tokens.append(g.results().tokens.tolist())
        builder = PlanBuilder(5)
        for slot in (0, 1):
            builder.row(slot, 6, 1)
        g.send(builder.build().encode())
        tokens.append(g.results().tokens.tolist())
        assert [list(of_slot) for of_slot in zip(*tokens, strict=True)] == one_rank()

        # After the start the hands have sent no store requests.
        assert len(g.meeting.questions) == asked
        g.send(encode(Kind.SHUTDOWN, 0, []))
        assert [hand.wait() for hand in g.hands] == [0, 0]


def test_a_rank_without_its_neighbour_does_not_hang(tmp_path: Path) -> None:
    with group(tmp_path) as g:
        g.start()
        survivor, killed = g.hands
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        survivor.connection.send(plan_of(1).build().encode())
        words = survivor.receive()
        assert words.kind == Kind.FATAL
        assert survivor.wait() == 1


def test_a_rank_goes_when_the_brain_does_before_they_have_met(tmp_path: Path) -> None:
    with group(tmp_path) as g:
        hand = g.hands[0]
        assert hand.receive().kind == Kind.HELLO
        hand.connection.send(encode_json(Kind.CONFIG, wire_config(QWEN3, arena_bytes=ARENA_BYTES, world_size=2)))
        while hand.receive().kind != Kind.STORE:
            pass
        hand.connection.send(encode(Kind.SHUTDOWN, 0, []))
        assert hand.wait() == 0


def test_a_refusal_comes_before_they_meet(tmp_path: Path) -> None:
    with group(tmp_path) as g:
        hand = g.hands[0]
        hand.start(g.meeting, wire_config(QWEN3, arena_bytes=ARENA_BYTES, world_size=2, quantization="w8a8_int8"))
        assert "computed by the Rust hand" in hand.facts["error"]
        assert hand.wait() == 1
        assert not g.meeting.questions


def test_a_plan_is_read_where_it_lies() -> None:
    data = plan_of(9).build().encode()
    arena = np.zeros(4096, np.uint8)
    arena[48 : 48 + len(data)] = np.frombuffer(data, np.uint8)
    place = PlanAt(9, 48, len(data) // 4)
    assert PlanAt.decode(Frame.of(place.encode())) == place
    header, body = place.read(arena)
    with socket.socket() as unused:
        connection = Connection(unused)
        connection.receive_into(Ring(lambda size: np.empty(size, np.uint8)))
        frame = connection.copied(header, body)
    arena[:] = 0
    assert Plan.decode(frame).encode() == data

    arena[48 : 48 + len(data)] = np.frombuffer(data, np.uint8)
    for wrong in (PlanAt(8, 48, place.words), PlanAt(9, 48, place.words - 1), PlanAt(9, 4080, place.words)):
        with pytest.raises(WireError):
            wrong.read(arena)
    for offset, words in ((-16, 10), (8, 10), (16, HEADER_BYTES // 4 - 1)):
        with pytest.raises(WireError):
            PlanAt.decode(Frame.of(PlanAt(9, offset, words).encode()))
    result = encode(Kind.RESULT, 9, [])
    arena[: len(result)] = np.frombuffer(result, np.uint8)
    with pytest.raises(WireError, match="are a result"):
        PlanAt(9, 0, len(result) // 4).read(arena)
