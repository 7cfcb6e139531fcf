"""Inputs a second at saturation: all-MiniLM-L6-v2 behind Forebay's server, and in ONNX Runtime.

    python -m benchmarks.embedding_rate --rounds 3

ONNX Runtime is a library, so the two setups differ. Forebay's inputs come over HTTP, from a client on the same cores,
and its vectors are returned in base64. ONNX Runtime has its texts in its own process, and uses the fastest batch size;
its graph is fused. Both tokenise the texts, and both compute with two threads.
"""

from __future__ import annotations

import base64
import http.client
import json
import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks import compare, models, onnx_model, records
from benchmarks.cells import markdown, number, spread, table_of
from benchmarks.embeddings import SETTING
from benchmarks.load import SEED, start
from benchmarks.processes import Running, ServerError
from benchmarks.records import Results, Run
from benchmarks.servers import FOREBAY_CPU, ROOT, SERVED_NAME, VENVS

IN_FLIGHT = 64
"""Inputs that a client keeps in flight, or that ONNX Runtime has at a time."""
A_REQUEST = 16
SECONDS = 3.0
WARM_SECONDS = 1.0
TEXTS = 512
LENGTHS: dict[str, tuple[int, int]] = {"16 tokens": (16, 16), "128 tokens": (128, 128), "8 to 256 tokens": (8, 256)}
"""Tokens of a text, the special ones included: the fewest and the most."""
PEER = ROOT / "benchmarks/peers/onnxruntime/embed.py"
CLOSE = 0.98
"""The least cosine between a server's vectors and those of ONNX Runtime in float32: they compute the same model."""


@dataclass(frozen=True)
class Way:
    """A way to compute embeddings."""

    name: str
    dtype: str = "float32"
    int8: bool = False
    onnx: bool = False

    def missing(self) -> str | None:
        """The reason why this way cannot be measured here; None if it can."""
        return onnx_model.missing() if self.onnx else FOREBAY_CPU.missing()

    @property
    def file(self) -> Path:
        """The model that ONNX Runtime reads."""
        return onnx_model.INT8 if self.int8 else onnx_model.FLOAT32


WAYS = (
    Way("forebay"),
    Way("ONNX Runtime", onnx=True),
    Way("forebay, bfloat16", dtype="bfloat16"),
    Way("forebay, int8", int8=True),
    Way("ONNX Runtime, int8", int8=True, onnx=True),
)


def texts_of(name: str) -> list[str]:
    """Texts whose lengths are spread evenly between a workload's limits; the same in every run."""
    least, most = LENGTHS[name]
    chance = random.Random(SEED)
    vocabulary = Tokenizer.from_file(str(models.tokenizer_file(models.EMBEDDER))).get_vocab(with_added_tokens=False)
    words = sorted(word for word in vocabulary if word.isascii() and word.isalpha() and len(word) > 1)
    # Each word is one token, and two special tokens surround them.
    return [" ".join(chance.choices(words, k=chance.randint(least, most) - 2)) for _ in range(TEXTS)]


class Client:
    """A client that keeps requests of `A_REQUEST` inputs in flight, one per connection."""

    def __init__(self, url: str, texts: Sequence[str]) -> None:
        self._address = url.removeprefix("http://")
        self._parts = cycle([list(islice(cycle(texts), at, at + A_REQUEST)) for at in range(0, len(texts), A_REQUEST)])
        self._lock = threading.Lock()
        self._done = 0
        self._failed: str | None = None

    def rate(self, seconds: float) -> float:
        """Inputs a second. Raises ServerError."""
        began = time.monotonic()
        until = began + seconds
        self._done = 0
        threads = [threading.Thread(target=self._keep_up, args=(until,)) for _ in range(IN_FLIGHT // A_REQUEST)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failed is not None:
            raise ServerError(self._failed)
        return self._done / (time.monotonic() - began)

    def _keep_up(self, until: float) -> None:
        connection = http.client.HTTPConnection(self._address)
        while time.monotonic() < until and self._failed is None:
            with self._lock:
                part = next(self._parts)
            try:
                count = len(vectors(connection, part))
            except (ServerError, OSError, http.client.HTTPException) as error:
                self._failed = f"a request failed: {error}"
                return
            with self._lock:
                self._done += count
        connection.close()


def vectors(connection: http.client.HTTPConnection, texts: Sequence[str]) -> list[Any]:
    """float32 [size] of each text. Raises ServerError."""
    body = json.dumps({"model": SERVED_NAME, "input": list(texts), "encoding_format": "base64"})
    connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    if response.status != 200:
        raise ServerError(f"{response.status}: {answer}")
    return [np.frombuffer(base64.b64decode(one["embedding"]), np.float32) for one in answer["data"]]


def peer(way: Way, texts: Sequence[str], *more: str) -> str:
    """Runs ONNX Runtime on texts; returns its output. Raises ServerError."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(list(texts), file)
        file.flush()
        command = [
            *(str(VENVS / "onnxruntime/bin/python"), str(PEER), "--model", str(way.file), "--texts", file.name),
            *("--tokenizer", str(models.tokenizer_file(models.EMBEDDER)), "--threads", str(SETTING.threads)),
            *("--in-flight", str(IN_FLIGHT), "--seconds", str(SECONDS), *more),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ServerError(f"ONNX Runtime failed: {done.stderr[-2000:]}")
    return done.stdout


def peer_vectors(way: Way, texts: Sequence[str]) -> Any:
    """The vectors of ONNX Runtime, float32 [texts, size]."""
    with tempfile.NamedTemporaryFile(suffix=".npy") as file:
        peer(way, texts, "--vectors", file.name)
        return np.load(file.name)


def measure_peer(found: Results, way: Way, number: int) -> None:
    """Adds a measurement of each workload with ONNX Runtime."""
    for name in LENGTHS:
        values = json.loads(peer(way, texts_of(name)))
        add(found, name, way, number, {key: values[key] for key in ("inputs_per_second", "batch")})


def measure_server(found: Results, way: Way, number: int, expected: Any) -> None:
    """Like `measure_peer`, for Forebay. `expected` has vectors to compare with, if ONNX Runtime made any."""
    setting = replace(SETTING, dtype=way.dtype)
    flags = ("--quantization", "w8a8_int8") if way.int8 else ()
    with start(replace(FOREBAY_CPU, flags=flags), setting) as running:
        for name in LENGTHS:
            client = Client(running.url, texts_of(name))
            client.rate(WARM_SECONDS)
            add(found, name, way, number, {"inputs_per_second": client.rate(SECONDS)})
        if expected is not None:
            check(way, running, expected)


def check(way: Way, running: Running, expected: Any) -> None:
    """Raises ServerError unless the vectors are close to those of the same model."""
    texts = texts_of(list(LENGTHS)[-1])[: len(expected)]
    found = np.stack(vectors(http.client.HTTPConnection(running.url.removeprefix("http://")), texts))
    least = float((found * expected).sum(1).min())
    if least < CLOSE:
        raise ServerError(f"{way.name}: a vector's cosine with that of ONNX Runtime is {least}")


def add(found: Results, workload: str, way: Way, number: int, values: dict[str, Any]) -> None:
    """Adds one measurement."""
    found.runs.append(Run(workload, way.name, number, values))
    compare.say(f"  round {number} {workload}: {way.name}: {values}")


@table_of("embedding_rate")
def table(found: Results) -> str:
    """Inputs a second by the length of texts; ratios compare each workload's first row with the others."""
    head = ["texts", "computed by", "inputs/s", "forebay / this", "inputs a batch"]
    rows = []
    for workload in found.workloads():
        first = found.servers(workload)[0]
        for server in found.servers(workload):
            rate = number(found.median(workload, server, "inputs_per_second"))
            batch = found.median(workload, server, "batch")
            ratio = spread(found.ratio(workload, first, server, "inputs_per_second"))
            rows.append([workload, server, rate, ratio, "-" if batch is None else f"{batch:.0f}"])
    return markdown(head, rows)


def main() -> None:
    """Runs the command line."""
    chosen = compare.parser("Embeddings a second at saturation.", rounds=3).parse_args()
    models.build_embedder(force=False)
    found = records.new("embedding_rate", chosen.rounds)
    found.skipped = {way.name: why for way in WAYS if (why := way.missing())}
    for name, reason in found.skipped.items():
        compare.say(f"{name} is left out: {reason}")
    ways = {way.name: way for way in WAYS if way.name not in found.skipped}
    expected = None
    if onnx_model.missing() is None:
        onnx_model.build()
        expected = peer_vectors(WAYS[1], texts_of(list(LENGTHS)[-1])[:A_REQUEST])
    for turn, name in records.in_turn(chosen.rounds, list(ways)):
        way = ways[name]
        try:
            if way.onnx:
                measure_peer(found, way, turn)
            else:
                measure_server(found, way, turn, expected)
        except ServerError as error:
            compare.leave_out(found, f"{name}, round {turn}", error)
    compare.finish(found, chosen.output)


if __name__ == "__main__":
    main()
