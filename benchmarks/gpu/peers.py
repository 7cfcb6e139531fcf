"""Peers on the same GPU: transformers' two ways to generate, and vLLM if it is installed, in turns with Forebay.

    python3 scripts/gpu.py peers --out peers.json

All have a model of the same shape with made-up weights in bfloat16, prompts of random tokens, and answers of one
length. Each turn is a fresh process. The same load generator sends requests to Forebay and vLLM over HTTP; transformers
generates in its own process, which is its best path. SGLang is missing: its kernels are too large for the upload to an
offline host.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import records, tables
from benchmarks.cells import markdown, number, spread, table_of
from benchmarks.gpu import made_up, server
from benchmarks.gpu.__main__ import device_name, new
from benchmarks.gpu.server import Load, Place
from benchmarks.gpu.shapes import SHAPES
from benchmarks.processes import Running, ServerError, free_port
from benchmarks.records import Results, Run
from forebay.device import DeviceError

SECONDS = 520.0
"""Seconds for measurements, of the ten minutes for which a host may be lent."""
TURN_SECONDS = 200.0
OURS = "forebay"
RATE = "output_throughput"
GENERATE = Path(__file__).resolve().parents[1] / "peers/transformers/generate.py"
LOADS: dict[str, tuple[Load, ...]] = {
    "Qwen3-0.6B": (Load(1, 8), Load(64, 192)),
    "Qwen3-8B": (Load(1, 4), Load(64, 128)),
    "Qwen3-30B-A3B": (Load(1, 4), Load(64, 128)),
    "tiny": (Load(1, 2, 16, 8), Load(4, 8, 16, 8)),
}


@dataclass(frozen=True)
class Peer(ABC):
    """A way to generate."""

    name: str
    note: str = ""

    @abstractmethod
    def missing(self, place: Place) -> str | None:
        """The reason why this peer cannot be measured here; None if it can."""

    @abstractmethod
    def measure(self, place: Place, folder: Path, loads: Sequence[Load]) -> dict[str, dict[str, Any]]:
        """Measures each load. Raises `ServerError`, `OSError` or `SubprocessError`."""


@dataclass(frozen=True)
class Served(Peer):
    """A peer that is a server."""

    vllm: bool = False

    def missing(self, place: Place) -> str | None:
        if self.vllm and importlib.util.find_spec("vllm") is None:
            return "this Python has no vllm"
        return None

    def measure(self, place: Place, folder: Path, loads: Sequence[Load]) -> dict[str, dict[str, Any]]:
        command = self._vllm(folder, loads) if self.vllm else server.serve(place, folder, loads, [])
        port = int(command[command.index("--port") + 1])
        log = place.folder / f"{self.name}.log"
        with Running.ready(command, {}, port, log, TURN_SECONDS) as running:
            backend = "vllm" if self.vllm else "openai"
            return {load.name: server.ask(place, backend, folder, load, running) for load in loads}

    @staticmethod
    def _vllm(folder: Path, loads: Sequence[Load]) -> list[str]:
        rows = max(load.streams for load in loads)
        context = max(load.prompt + load.answer for load in loads) + 64
        return [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
            *("--served-model-name", "model", "--load-format", "dummy", "--dtype", "bfloat16"),
            *("--host", "127.0.0.1", "--port", str(free_port()), "--max-model-len", str(context)),
            *("--max-num-seqs", str(rows), "--no-enable-prefix-caching", "--disable-uvicorn-access-log"),
        ]


@dataclass(frozen=True)
class Transformers(Peer):
    """transformers, in a separate process for each load."""

    way: str = "static"

    def missing(self, place: Place) -> str | None:
        return None if importlib.util.find_spec("transformers") else "this Python has no transformers"

    def measure(self, place: Place, folder: Path, loads: Sequence[Load]) -> dict[str, dict[str, Any]]:
        found = {}
        for load in loads:
            sizes = ("--requests", load.streams, "--prompt", load.prompt, "--answer", load.answer)
            flags = ("--model", folder, "--way", self.way, "--device", place.device, *sizes)
            command = [sys.executable, GENERATE, *flags]
            done = subprocess.run(
                list(map(str, command)), check=True, capture_output=True, text=True, timeout=TURN_SECONDS
            )
            found[load.name] = json.loads(done.stdout.splitlines()[-1])
        return found


PEERS: tuple[Peer, ...] = (
    Served(OURS),
    Served("vllm", vllm=True),
    Transformers("transformers, static", "one batch of all streams, static cache, compiled decode steps; no HTTP"),
    Transformers("transformers, continuous", "`generate_batch`; no HTTP", way="continuous"),
)


def compare(found: Results, place: Place, shape: str, deadline: float) -> None:
    """Measures every peer in turn, round by round, while there is time."""
    folder = made_up.write(place.folder / shape, SHAPES[shape])
    for peer in PEERS:
        reason = peer.missing(place)
        if reason is not None:
            found.skipped[peer.name] = reason
        elif peer.note:
            found.notes[peer.name] = peer.note
    for round_ in range(1, found.rounds + 1):
        for peer in PEERS:
            if peer.name in found.skipped:
                continue
            if time.monotonic() > deadline:
                found.skipped[f"{peer.name}, round {round_} of {shape}"] = "no time"
                continue
            try:
                values = peer.measure(place, folder, LOADS[shape])
            except (ServerError, OSError, subprocess.SubprocessError) as error:
                said = getattr(error, "stderr", None) or str(error)
                found.skipped[peer.name] = " ".join(said.split())[-500:]
                continue
            found.runs += [Run(f"{shape}: {load}", peer.name, round_, each) for load, each in values.items()]


@table_of("gpu_peers")
def table(found: Results) -> str:
    """Tokens a second by load, and the ratio of Forebay's to each peer's in the same round."""
    rows = []
    for workload in found.workloads():
        for name in found.servers(workload):
            ratio = "-" if name == OURS else spread(found.ratio(workload, OURS, name, RATE))
            rows.append([f"{workload}, {name}", number(found.median(workload, name, RATE)), ratio])
    return markdown(["", "output tokens/s", "Forebay's by it (least-most)"], rows)


def main() -> int:
    """Measures, prints a table, and writes JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=["Qwen3-0.6B"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="no turn begins later [%(default)s]")
    parser.add_argument("--out", type=Path, help="a file for the results, in JSON")
    options = parser.parse_args()
    begun = time.monotonic()
    try:
        name = device_name(options.device)
    except DeviceError as error:
        print(f"skipped: {error}")
        return 0
    binary = server.binary()
    if binary is None:
        print("skipped: there is no binary: make gpu-pack packs one")
        return 0
    found = new(name, "gpu_peers")
    found.rounds = options.rounds
    with tempfile.TemporaryDirectory(prefix="forebay-gpu-") as folder:
        for shape in options.shapes:
            compare(found, Place(binary, options.device, Path(folder)), shape, begun + options.seconds)
            if options.out is not None:
                records.save(found, options.out)
    print(tables.render(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
