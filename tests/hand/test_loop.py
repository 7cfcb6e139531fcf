"""A real hand in a separate process. The test talks to it as the brain does."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file

from benchmarks.described import handshake_model
from forebay.protocol.connection import Connection
from forebay.protocol.frames import Frame, Kind, encode, encode_json
from forebay.protocol.masks import EVERYTHING, INLINE, Masks, UInt32s
from forebay.protocol.result import StepResult
from tests.hand.process import PYTHON_PATH, spawn
from tests.hand.support import (
    FAMILIES,
    PlanBuilder,
    Sampling,
    greedy_reference,
    hf_config,
    reference_model,
    wire_config,
)

QWEN3 = hf_config(FAMILIES["qwen3"][1], "Qwen3ForCausalLM")
ARENA_BYTES = 4096
TIMEOUT_S = 120.0
RUST = "rust"
"""A value for `device` that selects the hand in Rust, on the CPU."""
DEVICES = pytest.mark.parametrize("device", ["cpu", "deferred", RUST])
NOTHING = {"tokens_a_row": 1, "tower_layers": 0, "image_page_count": 0, "image_page_tokens": 0}
HANDS = pytest.mark.parametrize("device", ["cpu", RUST])


class Hand:
    """The brain's end of a spawned hand."""

    def __init__(self, socket_: socket.socket, pid: int, arena: int, errors: Path) -> None:
        socket_.settimeout(TIMEOUT_S)
        self.socket = socket_
        self.connection = Connection(socket_)
        self.pid = pid
        self.arena = arena
        self._errors = errors
        self._status: int | None = None

    def receive(self, kind: Kind) -> Frame:
        frame = self.connection.recv()
        assert frame is not None, self.errors()
        assert frame.kind == kind, frame.json()
        return frame

    def configure(self, **changes: Any) -> None:
        assert self.receive(Kind.HELLO).json() == {"pid": self.pid}
        if changes.get("device") == RUST:
            changes["device"] = "cpu"
        self.connection.send(encode_json(Kind.CONFIG, wire_config(QWEN3, arena_bytes=ARENA_BYTES, **changes)))

    def until_ready(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        progress: list[dict[str, Any]] = []
        while True:
            frame = self.connection.recv()
            assert frame is not None, self.errors()
            if frame.kind == Kind.READY:
                return progress, frame.json()
            assert frame.kind == Kind.PROGRESS, frame.json()
            progress.append(frame.json())

    def step(self, builder: PlanBuilder) -> StepResult:
        self.connection.send(builder.build().encode())
        return StepResult.decode(self.receive(Kind.RESULT))

    def fatal(self) -> dict[str, Any]:
        """The hand's last frame, after any progress reports."""
        while True:
            frame = self.connection.recv()
            assert frame is not None, self.errors()
            if frame.kind != Kind.PROGRESS:
                assert frame.kind == Kind.FATAL, frame.json()
                words: dict[str, Any] = frame.json()
                return words

    def exit_status(self) -> int:
        """Waits until the hand closes its socket and exits. The socket may be reset if the hand left frames unread."""
        with suppress(ConnectionResetError):
            assert self.connection.recv() is None
        return self.wait()

    def wait(self) -> int:
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status

    def running(self) -> bool:
        return self._status is None

    def errors(self) -> str:
        return self._errors.read_text()


@contextmanager
def hand(folder: Path, device: str = "cpu") -> Iterator[Hand]:
    ours, theirs = socket.socketpair()
    errors = folder / "stderr"
    arena = os.memfd_create("arena")
    os.truncate(arena, ARENA_BYTES)
    with errors.open("wb") as stderr, theirs:
        pid = spawn({2: stderr.fileno(), 3: theirs.fileno(), 4: arena}, rust=device == RUST)
    spawned = Hand(ours, pid, arena, errors)
    try:
        yield spawned
    finally:
        if spawned.running():
            os.kill(pid, signal.SIGKILL)
            spawned.wait()
        ours.close()
        os.close(arena)


@DEVICES
def test_from_hello_to_shutdown(tmp_path: Path, device: str) -> None:
    model = reference_model("qwen3")
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()}, tmp_path / "model.safetensors"
    )
    described = handshake_model(QWEN3, [tmp_path / "model.safetensors"])
    prompt = list(range(40))
    with hand(tmp_path, device) as h:
        h.configure(model=described, load_format="auto", device=device)
        progress, facts = h.until_ready()
        stages = list(dict.fromkeys(told["stage"] for told in progress))
        assert stages == (["weights"] if device == RUST else ["pytorch", "weights"])
        assert progress[-1]["done"] == progress[-1]["total"] == len(model.state_dict())
        weight_bytes = sum(tensor.nbytes for tensor in model.state_dict().values())
        if device == RUST:
            # The head is packed for 160 tokens, because panels of the compiled kernels are 32 wide.
            weight_bytes += (160 - 131) * 64 * 4
        assert facts.pop("load_seconds") > 0
        assert facts.pop("kv_layout").startswith("cpu " if device == RUST else "torch ")
        assert facts == {
            "page_count": 192,
            "vocab_size": 131,
            "hidden_size": 64,
            "dtype": "float32",
            "weight_bytes": weight_bytes,
            "kv_bytes": 192 * 4 * 2 * 3 * 2 * 32 * 4,
            "device": "cpu" if device == RUST else device,
            "host_page_count": 0,
            "page_bytes": 4 * 2 * 3 * 2 * 32 * 4,
            "hot_row_tokens": 0,
            "graphs": 0,
            "blocks": "",
            "tokens_only": False,
            "tokens_a_row": 1,
            "state_page_count": 0,
            "state_bytes": 0,
            "window": 0,
            "window_page_count": 0,
            "window_page_bytes": 0,
            "one_pool": "",
            "host_state_page_count": 0,
            "verifies_drafts": True,
            # The hand in Rust leaves out facts about features that it does not have.
            **(
                {
                    "lora_bytes": 0,
                    "lora_modules": [],
                    "tower_layers": 0,
                    "image_page_count": 0,
                    "image_page_tokens": 0,
                }
                if device == RUST
                else {}
            ),
        }

        os.pwrite(h.arena, np.array(prompt, np.int32).tobytes(), 256)
        first = PlanBuilder(7)
        first.slot(1, [5, 6, 7], Sampling(logprobs=2))
        first.slot(5, prompt, arena_offset=256)
        first.page_writes += [(1, 0, 3), (1, 1, 9), (1, 2, 11), *((5, index, 20 + index) for index in range(12))]
        first.row(1, 0, 3)
        first.row(5, 0, 40)
        result = h.step(first)
        assert result.step == 7
        assert result.row_errors.tolist() == [0, 0]
        assert result.logprob_counts.tolist() == [3, 0]
        assert result.timing[0] > 0
        got = [[int(token)] for token in result.tokens]

        # Two plans are in the socket at once: the second arrives before the first is computed.
        for steps in ((8, 9), (10, 11), (12, 13)):
            plans = []
            for step in steps:
                builder = PlanBuilder(step)
                builder.row(1, step - 5, 1)
                builder.row(5, step + 32, 1)
                plans.append(builder.build().encode())
            h.connection.send(b"".join(plans))
            for step in steps:
                result = StepResult.decode(h.receive(Kind.RESULT))
                assert result.step == step
                for tokens, token in zip(got, result.tokens.tolist(), strict=True):
                    tokens.append(token)
        assert got == [greedy_reference(model, [5, 6, 7], 7)[0], greedy_reference(model, prompt, 7)[0]]

        os.kill(h.pid, signal.SIGINT)
        empty = h.step(PlanBuilder(14))
        assert empty.tokens.size == empty.row_errors.size == 0
        h.connection.send(encode(Kind.SHUTDOWN, 0, []))
        assert h.exit_status() == 0
        assert h.errors() == ""


def masks_of(step: int, *rows: tuple[int, int]) -> bytes:
    """`rows`: the arena offset of each mask (`INLINE`: it is in the frame itself), and the only id that it allows."""
    inline = [mask_of(token) for offset, token in rows if offset == INLINE]
    words = np.concatenate(inline).view(np.int32) if inline else np.zeros(0, np.int32)
    return Masks(step, np.array([offset for offset, _ in rows], np.int32), words).encode()


def mask_of(token: int) -> UInt32s:
    words = np.zeros(5, np.uint32)
    words[token // 32] = 1 << token % 32
    return words


@DEVICES
def test_masks_follow_their_plan_and_are_obeyed(tmp_path: Path, device: str) -> None:
    with hand(tmp_path, device) as h:
        h.configure(device=device)
        h.until_ready()
        first = PlanBuilder(1)
        for slot in (0, 1, 2):
            first.slot(slot, [5, 6, 7], Sampling(temperature=1.0, seed=slot))
            first.page_writes += [(slot, index, 3 * slot + index) for index in range(3)]
            first.row(slot, 0, 3, masked=slot < 2)
        os.pwrite(h.arena, mask_of(99).tobytes(), 128)
        h.connection.send(first.build().encode() + masks_of(1, (128, 99), (INLINE, 44)))
        result = StepResult.decode(h.receive(Kind.RESULT))
        assert result.tokens[:2].tolist() == [99, 44]
        assert result.row_errors.tolist() == [0, 0, 0]
        # The next plan arrives before the last result, and its masks after it. A third plan follows right after the
        # masks.
        plans = []
        for step in (2, 3, 4):
            builder = PlanBuilder(step)
            builder.row(0, step + 1, 1, masked=step != 4)
            builder.row(1, step + 1, 1, masked=step == 3)
            plans.append(builder.build().encode())
        h.connection.send(plans[0])
        h.connection.send(masks_of(2, (128, 99)) + plans[1])
        result = StepResult.decode(h.receive(Kind.RESULT))
        assert (result.step, result.tokens[0]) == (2, 99)
        h.connection.send(masks_of(3, (EVERYTHING, 0), (INLINE, 130)) + plans[2])
        result = StepResult.decode(h.receive(Kind.RESULT))
        assert (result.step, result.tokens[1]) == (3, 130)
        assert StepResult.decode(h.receive(Kind.RESULT)).step == 4
        h.connection.send(encode(Kind.SHUTDOWN, 0, []))
        assert h.exit_status() == 0
        assert h.errors() == ""


def masked_plan(step: int = 1) -> bytes:
    builder = PlanBuilder(step)
    builder.slot(0, [5, 6, 7])
    builder.page_writes += [(0, 0, 0)]
    builder.row(0, 0, 3, masked=True)
    return builder.build().encode()


@DEVICES
@pytest.mark.parametrize(
    ("following", "reason"),
    [
        (masks_of(2, (EVERYTHING, 0)), "1 masks of step 2, where step 1 has 1 masked positions"),
        (masks_of(1, (EVERYTHING, 0), (EVERYTHING, 0)), "2 masks of step 1"),
        (masks_of(1, (4092, 0)), "a mask at byte 4092 of an arena of 4096"),
        (masked_plan(2), "not a masks"),
    ],
)
def test_other_masks_than_those_of_the_plan_are_fatal(
    tmp_path: Path, device: str, following: bytes, reason: str
) -> None:
    with hand(tmp_path, device) as h:
        h.configure(device=device)
        h.until_ready()
        h.connection.send(masked_plan() + following)
        assert reason in fatal(h)


@DEVICES
@pytest.mark.parametrize("end", ["shutdown", "end of file"])
def test_a_hand_that_waits_for_masks_goes_when_it_is_told(tmp_path: Path, device: str, end: str) -> None:
    with hand(tmp_path, device) as h:
        h.configure(device=device)
        h.until_ready()
        h.connection.send(PlanBuilder(1).build().encode() + masked_plan(2))
        assert StepResult.decode(h.receive(Kind.RESULT)).step == 1
        if end == "shutdown":
            h.connection.send(encode(Kind.SHUTDOWN, 0, []))
        else:
            h.socket.shutdown(socket.SHUT_WR)
        assert h.exit_status() == 0
        assert h.errors() == ""


@DEVICES
def test_end_of_file_is_the_order_to_exit(tmp_path: Path, device: str) -> None:
    with hand(tmp_path, device) as h:
        h.configure(device=device)
        h.until_ready()
        h.socket.shutdown(socket.SHUT_WR)
        assert h.exit_status() == 0
        assert h.errors() == ""


@HANDS
def test_end_of_file_before_the_config(tmp_path: Path, device: str) -> None:
    with hand(tmp_path, device) as h:
        h.receive(Kind.HELLO)
        h.socket.shutdown(socket.SHUT_WR)
        assert h.exit_status() == 0


def fatal(h: Hand, refused: bool = False) -> str:
    """Returns the error with which a hand exits. If it `refused` a model it logs nothing, because the brain does."""
    frame = h.fatal()
    assert "\n" not in frame["error"]
    # The hand in Rust has no traceback, so it sends the error instead.
    assert frame["traceback"].startswith(("Traceback", frame["error"]))
    assert h.exit_status() == 1
    assert refused or frame["error"].split(":")[0] in h.errors()
    error: str = frame["error"]
    return error


@HANDS
def test_another_version_is_fatal(tmp_path: Path, device: str) -> None:
    with hand(tmp_path, device) as h:
        h.receive(Kind.HELLO)
        config = bytearray(encode_json(Kind.CONFIG, wire_config(QWEN3)))
        config[4] = 9
        h.connection.send(bytes(config))
        assert "protocol version 9" in fatal(h)


@HANDS
def test_a_first_frame_that_is_no_config_is_fatal(tmp_path: Path, device: str) -> None:
    with hand(tmp_path, device) as h:
        h.receive(Kind.HELLO)
        h.connection.send(encode(Kind.SHUTDOWN, 0, []))
        assert "expected config, got shutdown" in fatal(h)


@HANDS
def test_a_failure_to_load_is_fatal(tmp_path: Path, device: str) -> None:
    with hand(tmp_path, device) as h:
        model = handshake_model(QWEN3)
        model["manifest"] = {"weights": [], "matrices": [], "zero_biases": []}
        h.configure(load_format="auto", model=model)
        assert "lacks 36 of 36 weights" in fatal(h, refused=True)


@DEVICES
def test_what_was_launched_before_a_plan_that_is_refused_is_answered(tmp_path: Path, device: str) -> None:
    with hand(tmp_path, device) as h:
        h.configure(device=device)
        h.until_ready()
        refused = PlanBuilder(2)
        refused.row(99, 0, 1)
        h.connection.send(PlanBuilder(1).build().encode() + refused.build().encode())
        assert StepResult.decode(h.receive(Kind.RESULT)).step == 1
        assert "outside of 8 slots" in fatal(h)


@DEVICES
def test_a_plan_that_names_a_page_nobody_wrote_is_fatal(tmp_path: Path, device: str) -> None:
    with hand(tmp_path, device) as h:
        h.configure(device=device)
        h.until_ready()
        builder = PlanBuilder()
        builder.row(0, 0, 1)
        h.connection.send(builder.build().encode())
        assert re.search("index|page", fatal(h))


@HANDS
def test_the_hand_dies_with_its_parent(device: str) -> None:
    """The kernel kills the hand although its socket is still open."""
    ours, theirs = socket.socketpair()
    parent = (
        "import sys; from tests.hand.process import spawn; "
        f"print(spawn({{3: {theirs.fileno()}}}, rust={device == RUST}), flush=True); sys.stdin.read()"
    )
    environment = {**os.environ, "PYTHONPATH": f"{PYTHON_PATH}:{Path(__file__).parents[2]}"}
    with ours, theirs:
        ours.settimeout(TIMEOUT_S)
        process = subprocess.Popen(
            [sys.executable, "-c", parent],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin, process.stdout:
            pid = int(process.stdout.readline())
            theirs.close()
            connection = Connection(ours)
            hello = connection.recv()
            assert hello is not None
            assert hello.json()["pid"] == pid
            process.kill()
            process.wait()
            assert connection.recv() is None


def test_torch_is_not_imported_before_hello() -> None:
    code = "import json, sys, forebay.worker.loop; print(json.dumps('torch' in sys.modules))"
    environment = {**os.environ, "PYTHONPATH": str(PYTHON_PATH)}
    output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout
    assert json.loads(output) is False
