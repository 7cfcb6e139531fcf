"""Inputs a second that ONNX Runtime embeds, run by the Python of its own environment.

    python embed.py --model FILE --tokenizer FILE --texts FILE --in-flight 64 --seconds 5 --threads 2

`--in-flight` texts are processed at a time. They are tokenised, sorted by length and cut into batches, each padded to
its
longest text. Every size of `BATCHES` is tried first, and the fastest is measured. Prints one object of JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

BATCHES = (1, 2, 4, 8, 16, 32, 64)
TRY_SECONDS = 0.3


class Embedder:
    """A model and its tokenizer."""

    def __init__(self, model: Path, tokenizer: Path, threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        self._names = [each.name for each in self._session.get_inputs()]
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def embed(self, texts: list[str], batch: int) -> np.ndarray[Any, Any]:
        """The normalized vectors, float32 [texts, size], in batches of at most `batch` texts."""
        ids = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts)]
        order = sorted(range(len(ids)), key=lambda at: len(ids[at]))
        found: list[Any] = [None] * len(ids)
        for first in range(0, len(order), batch):
            part = order[first : first + batch]
            longest = len(ids[part[-1]])
            padded = np.zeros((len(part), longest), np.int64)
            mask = np.zeros_like(padded)
            for row, at in enumerate(part):
                padded[row, : len(ids[at])] = ids[at]
                mask[row, : len(ids[at])] = 1
            inputs = {"input_ids": padded, "attention_mask": mask, "token_type_ids": np.zeros_like(padded)}
            (vectors,) = self._session.run(None, {name: inputs[name] for name in self._names})
            for row, at in enumerate(part):
                found[at] = vectors[row]
        return np.stack(found)


def rate(embedder: Embedder, texts: Iterator[str], in_flight: int, batch: int, seconds: float) -> float:
    """Inputs a second."""
    count, began = 0, time.monotonic()
    while (passed := time.monotonic() - began) < seconds:
        count += len(embedder.embed(list(islice(texts, in_flight)), batch))
    return count / passed


def main() -> None:
    """Runs the command line."""
    flags = argparse.ArgumentParser()
    for name in ("model", "tokenizer", "texts"):
        flags.add_argument(f"--{name}", type=Path, required=True)
    flags.add_argument("--vectors", type=Path, help="write the vectors of the texts here, and measure nothing")
    for name in ("in-flight", "threads"):
        flags.add_argument(f"--{name}", type=int, required=True)
    flags.add_argument("--seconds", type=float, default=5.0)
    chosen = flags.parse_args()
    embedder = Embedder(chosen.model, chosen.tokenizer, chosen.threads)
    texts = json.loads(chosen.texts.read_text(encoding="utf-8"))
    if chosen.vectors is not None:
        np.save(chosen.vectors, embedder.embed(texts, 8))
        return
    endless = cycle(texts)
    sizes = [size for size in BATCHES if size <= chosen.in_flight]
    tried = {size: rate(embedder, endless, chosen.in_flight, size, TRY_SECONDS) for size in sizes}
    best = max(tried, key=lambda size: tried[size])
    found = rate(embedder, endless, chosen.in_flight, best, chosen.seconds)
    print(json.dumps({"inputs_per_second": found, "batch": best, "tried": tried}))


if __name__ == "__main__":
    main()
