"""The microseconds of a hand's host side, for steps that a GPU would compute from graphs. It needs no GPU.

    python -m benchmarks.hand_host --rounds 5

A plan's frame goes through a socket, as the brain sends it, and the result comes back. All of the hand's own code runs,
including `CudaDevice`. Device memory is host memory, so a copy moves a few hundred bytes within it. The replay of a
graph does nothing, and an event only reads the clock. The driver's time for two copies, two graphs and two events is
not included. Launches outside of graphs are counted.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import compare, in_process, records
from benchmarks.cells import markdown, number, table_of
from benchmarks.described import handshake_model
from benchmarks.gpu.shapes import SHAPES
from benchmarks.records import Results, Run
from forebay.device import Event, Work
from forebay.device.cuda import CudaDevice
from forebay.gpu.choose import VARIABLE
from forebay.protocol.connection import Connection, Ring
from forebay.protocol.constants import FLAG_SAMPLE, ROW_WORDS, SLOT_WORDS, SlotFloats, SlotRecord
from forebay.protocol.plan import Plan
from forebay.runner.runner import ModelRunner

PARTS = {
    "receive": "the frame, out of the socket into pinned memory",
    "decode": "the table of its columns",
    "check": "rows, slots and pages against the host's tables; the choice of a graph; memory for the results",
    "queue": "one copy in, two replays, one copy out, without the driver's time",
    "collect": "tokens out of the block, the error word, times",
    "send": "the result's frame, into the socket",
}
SLOTS, CONTEXT, CHUNK = 513, 1024, 512
WARM, STEPS = 200, 1000
HAND = "the hand"


@dataclass(frozen=True)
class Case:
    """The number of decode rows, an optional prompt chunk beside them, and the options of the rows."""

    name: str
    rows: int
    chunk: int = 0
    temperature: float = 0.0
    penalty: float = 1.0

    def floats(self) -> list[float]:
        """Sampling parameters of each slot."""
        found = [0.0] * len(SlotFloats)
        found[SlotFloats.TEMPERATURE], found[SlotFloats.TOP_P] = self.temperature, 1.0
        found[SlotFloats.REPETITION_PENALTY] = self.penalty
        return found

    @property
    def slots(self) -> int:
        """The number of slots in use."""
        return self.rows + bool(self.chunk)


CASES = [
    Case("1 decode row", 1),
    *(Case(f"{rows} decode rows", rows) for rows in (8, 64, 256, 512)),
    Case("64 decode rows that draw", 64, temperature=0.7),
    Case(f"64 decode rows and {CHUNK} tokens of a prompt", 64, chunk=CHUNK),
    Case("64 decode rows with penalties", 64, penalty=1.1),
]


class Clock:
    """An event that completes at once: it only reads the clock."""

    def __init__(self) -> None:
        self.ns = time.perf_counter_ns()

    def wait(self) -> None:
        """Returns at once."""

    def since(self, earlier: Event) -> int:
        """Microseconds since an earlier event."""
        assert isinstance(earlier, Clock)
        return (self.ns - earlier.ns) // 1000


class AbsentGpu(CudaDevice):
    """CUDA's device with host memory. The work of a captured graph is not repeated."""

    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self.name = "absent GPU"
        self._launching = nullcontext()
        self.queued_ns = 0
        """The time spent in `queue` since the last reset to 0."""

    def check_dtype(self, dtype: torch.dtype) -> None:
        pass

    def available_bytes(self) -> int:
        return 8 << 30

    def measure(self, run: Callable[[], object]) -> int:
        return 0

    def fill(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def queue(self, work: Work) -> None:
        begun = time.perf_counter_ns()
        work()
        self.queued_ns += time.perf_counter_ns() - begun

    def event(self) -> Event:
        return Clock()

    def capture(self, work: Work) -> Work:
        # The replay does nothing: on the host's processors, large graphs would take minutes.
        return lambda: None


def host_memory(size: int) -> torch.Tensor:
    """Host memory in place of pinned memory."""
    return torch.empty(size, dtype=torch.uint8)


@contextmanager
def absent_gpu() -> Iterator[AbsentGpu]:
    """Within the context, new hands have this device."""
    device = AbsentGpu()
    with (
        patch("forebay.device.cuda.pinned", host_memory),
        patch("forebay.runner.runner.open_device", lambda *_: device),
        patch.dict(os.environ, {VARIABLE: "reference"}),
    ):
        yield device


class Launches(TorchDispatchMode):
    """Counts operators other than allocations and views: on a GPU each is one or more launches or copies."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The project's other dispatch modes do the same.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        returns = func._schema.returns
        alias = returns[0].alias_info if returns else None
        self.count += (alias is None or alias.is_write) and not func._schema.name.startswith("aten::empty")
        return func(*args, **kwargs or {})


@dataclass
class Times:
    """Nanoseconds of each part, one value per step."""

    parts: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in PARTS})

    def add(self, marks: Sequence[int], queued: int) -> None:
        """Adds a step: `marks` are the times before it and after each part but `queue`, which is within `launch`."""
        receive, decode, launch, collect, send = (after - before for before, after in pairwise(marks))
        taken = receive, decode, launch - queued, queued, collect, send
        for name, ns in zip(PARTS, taken, strict=True):
            self.parts[name].append(ns)

    def values(self) -> dict[str, float]:
        """Medians of the parts and of their sum in microseconds, and the sum's 99th percentile."""
        found = {name: float(np.median(ns)) / 1000 for name, ns in self.parts.items()}
        whole = np.sum(list(self.parts.values()), axis=0) / 1000
        return {**found, "all": float(np.median(whole)), "all_p99": float(np.percentile(whole, 99))}


class Hand:
    """The loop of a hand, one step at a time, and the brain's end of its socket."""

    def __init__(self, runner: ModelRunner, device: AbsentGpu) -> None:
        self.runner, self._device = runner, device
        self._brain, ours = socket.socketpair()
        self._connection = Connection(ours)
        self._connection.receive_into(Ring(device.host_memory))

    def step(self, frame: bytes, times: Times | None) -> None:
        """Sends a plan's frame, runs the step, and reads the result from the socket."""
        self._brain.sendall(frame)
        self._device.queued_ns, clock = 0, time.perf_counter_ns
        begun = clock()
        received = self._connection.recv()
        arrived = clock()
        assert received is not None
        plan = Plan.decode(received)
        decoded = clock()
        launched = self.runner.launch(plan)
        launched_at = clock()
        result = launched.collect()
        collected = clock()
        self._connection.send(result.encode())
        sent = clock()
        self._brain.recv(1 << 20)
        if times is not None:
            times.add((begun, arrived, decoded, launched_at, collected, sent), self._device.queued_ns)


def first_plan(case: Case, page_size: int) -> Plan:
    """A plan of new slots, with the pages of their whole contexts."""
    numbers, each = np.arange(case.slots), CONTEXT // page_size
    slots = np.zeros((case.slots, SLOT_WORDS), np.int32)
    slots[:, SlotRecord.SLOT] = numbers
    slots[:, [SlotRecord.LOGPROBS, SlotRecord.ARENA_OFFSET]] = -1
    pages = np.arange(case.slots * each)
    writes = np.stack((np.repeat(numbers, each), np.tile(np.arange(each), case.slots), pages), axis=1)
    floats = np.tile(np.array(case.floats(), np.float32), (case.slots, 1))
    return Plan(slots=slots, slot_floats=floats, page_writes=writes.astype(np.int32))


def step_plan(case: Case, position: int) -> Plan:
    """A plan of rows at this position. One row in 16 gets a page, since each row needs one every sixteenth step."""
    rows = np.zeros((case.slots, ROW_WORDS), np.int32)
    rows[:, 0] = np.arange(case.slots)
    rows[:, 1:] = position, 1, FLAG_SAMPLE
    if case.chunk:
        rows[-1, 1:] = 0, case.chunk, 0
    writes = [(slot, CONTEXT // in_process.PAGE - 1, slot) for slot in range(position % 16, case.rows, 16)]
    return Plan(position, rows=rows, page_writes=np.array(writes, np.int32).reshape(-1, 3))


def measure(hand: Hand, case: Case) -> dict[str, float]:
    """Measures one case, warm."""
    # This plan is launched directly: it is larger than a socket's buffer.
    hand.runner.launch(first_plan(case, in_process.PAGE).staged()).collect()
    frames = [step_plan(case, position).encode() for position in range(1, 65)]
    with Launches() as launches:
        hand.step(frames[0], None)
    times = Times()
    for at in range(WARM + STEPS):
        hand.step(frames[at % len(frames)], None if at < WARM else times)
    return {**times.values(), "launches": launches.count}


@table_of("hand_host")
def table(found: Results) -> str:
    """A row for each case: microseconds of the parts."""
    rows = [
        [
            case,
            *(number(found.median(case, HAND, name)) for name in (*PARTS, "all", "all_p99")),
            f"{found.median(case, HAND, 'launches') or 0:.0f}",
        ]
        for case in found.workloads()
    ]
    parts = "\n".join(f"- *{name}*: {what}." for name, what in PARTS.items())
    return f"{markdown(['step, microseconds', *PARTS, 'all, p50', 'p99', 'copies and launches'], rows)}\n\n{parts}"


def main() -> None:
    """Runs the command line."""
    asked = compare.parser("Where the microseconds of a hand's host side go.", rounds=5).parse_args()
    found = records.new("hand_host", asked.rounds)
    with absent_gpu() as device:
        model = handshake_model(SHAPES["tiny"])
        runner = in_process.runner(
            model,
            slots=SLOTS,
            context=CONTEXT,
            tokens=SLOTS * CONTEXT,
            threads=1,
            device="cuda",
            attention_backend="triton",
            dummy=True,
        )
        runner.warm_up()
        hand = Hand(runner, device)
        for round_ in range(1, asked.rounds + 1):
            for case in CASES:
                found.runs.append(Run(case.name, HAND, round_, measure(hand, case)))
    compare.finish(found, asked.output)


if __name__ == "__main__":
    main()
