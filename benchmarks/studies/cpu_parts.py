"""The parts of a step's time on the CPU, and its products beside oneDNN's: SmolLM2-135M-Instruct in bfloat16.

    python -m benchmarks.studies.cpu_parts --rounds 7

One process, no server. For each kind of step, rounds in which the compiled kernels and oneDNN's prepacked products take
turns; medians, in milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks import in_process, models
from benchmarks.described import described
from forebay.compute.native import NativeCompute
from forebay.compute.rows import Launch, Rows
from forebay.device import Device
from forebay.kernels.library import PARTS
from forebay.kernels.packing import plain_parts
from forebay.runner.runner import ModelRunner
from forebay.weights.cache import cache_directory

CONTEXT = 256
"""Positions before a decode row."""
PRODUCTS = ("qkv", "output", "gate_up", "down", "head")
SLOTS = 64
LONGEST = 1280
"""Positions that a slot has room for."""


@dataclass(frozen=True)
class Case:
    """A step: so many rows of so many tokens."""

    name: str
    rows: int
    start: int
    length: int

    def step(self, device: Device) -> Launch:
        """As the runner would give it; every row samples."""
        every = np.arange(self.rows)
        rows = Rows(every, np.full(self.rows, self.start), np.full(self.rows, self.length), every)
        return Launch.of(rows, device)


CASES = [
    *(Case(f"decode, {rows} rows", rows, CONTEXT, 1) for rows in (1, 2, 4, 8, 16, 32, 64)),
    *(Case(f"prompt of {length}", 1, 0, length) for length in (256, 1024)),
]


def runner(directory: str, threads: int, quantization: str | None = None) -> ModelRunner:
    """The model with its weights and room for every case."""
    made = in_process.runner(
        described(Path(directory), cache_directory()),
        slots=SLOTS,
        context=LONGEST,
        tokens=SLOTS * LONGEST,
        threads=threads,
        quantization=quantization,
    )
    pages = made.tables.pages_per_slot
    made.tables.page_table[:] = torch.randperm(SLOTS * pages).view(SLOTS, pages)
    made.tables.token_pool.random_(0, made.model_config.vocab_size)
    return made


def prepared(made: ModelRunner, threads: int) -> NativeCompute:
    """Its matrices packed, and every slot filled up to the context."""
    compute = NativeCompute(made.decoder, made.tables, made.kv, made.prompts, threads)
    for slot in range(SLOTS):
        one = np.array([slot])
        rows = Rows(one, np.zeros(1, np.int64), np.full(1, CONTEXT + 1), np.zeros(1, np.int64))
        compute.greedy(Launch.of(rows, made.device))
    return compute


Product = Callable[[int], None]


def prepacked(weight: torch.Tensor) -> Product:
    """oneDNN's product with a weight in the order it likes best; the argument is a number of rows."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    inputs: dict[int, torch.Tensor] = {}

    def product(rows: int) -> None:
        x = inputs.setdefault(rows, torch.randn(rows, weight.shape[1], dtype=weight.dtype))
        torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")

    return product


def weights(made: ModelRunner) -> dict[str, list[torch.Tensor]]:
    """Every layer's matrices, copied: the compiled kernels take theirs away."""
    parts = [plain_parts(block) for block in made.decoder.blocks]
    return {
        "qkv": [attention.qkv.weight.clone() for attention, _ in parts],
        "output": [attention.output.weight.clone() for attention, _ in parts],
        "gate_up": [mlp.gate_up.weight.clone() for _, mlp in parts],
        "down": [mlp.down.weight.clone() for _, mlp in parts],
        "head": [made.decoder.head.clone()],
    }


def timed(work: Callable[[], object]) -> float:
    """Milliseconds."""
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e3


def parts(compute: NativeCompute, step: Launch) -> dict[str, float]:
    """Milliseconds of a step and its parts."""
    compute.watch()
    found = {"step": timed(lambda: compute.greedy(step))}
    found.update(zip(PARTS, (float(part) / 1e6 for part in compute.times), strict=True))
    return found


Measured = dict[str, list[float]]
"""Milliseconds of each part, by the kernels and (`onednn ...`) by oneDNN; one number a round."""


def all_of(products: Iterable[Product], rows: int) -> None:
    """Computes them one after the other."""
    for product in products:
        product(rows)


def measure(
    case: Case, device: Device, compute: NativeCompute, others: dict[str, list[Product]], rounds: int
) -> Measured:
    """Kernels and oneDNN in turns."""
    step = case.step(device)
    found: Measured = {}
    for turn in range(rounds + 1):
        ours = parts(compute, step)
        for name, products in others.items():
            count = case.rows if name == "head" else case.rows * case.length
            ours[f"onednn {name}"] = timed(partial(all_of, products, count))
        # The first one warms up.
        if turn > 0:
            for name, value in ours.items():
                found.setdefault(name, []).append(value)
    return found


def table(results: Iterable[tuple[Case, Measured]], operations: dict[str, float]) -> str:
    """Markdown: a line a case and part, with what it reached."""
    lines = ["| step | part | ms | GFLOP/s | oneDNN ms | oneDNN / ours |", "| --- | --- | ---: | ---: | ---: | ---: |"]
    for case, found in results:
        for name in ("step", *PARTS):
            ours = statistics.median(found[name])
            line = [case.name, name, f"{ours:.2f}", "", "", ""]
            if name in PRODUCTS:
                count = case.rows if name == "head" else case.rows * case.length
                line[3] = f"{operations[name] * count / ours / 1e6:.0f}"
                if theirs := found.get(f"onednn {name}"):
                    ratio = statistics.median(b / a for a, b in zip(found[name], theirs, strict=True))
                    line[4:] = [f"{statistics.median(theirs):.2f}", f"{ratio:.2f}"]
            lines.append(f"| {' | '.join(line)} |")
    return "\n".join(lines)


def main() -> None:
    """The command."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--rounds", type=int, default=7)
    flags.add_argument("--threads", type=int, default=2)
    flags.add_argument("--model", default=str(models.directory("smollm2")))
    flags.add_argument("--cases", default="", help="only those whose name has this in it")
    flags.add_argument("--no-onednn", action="store_true", help="the kernels alone")
    chosen = flags.parse_args()
    with torch.inference_mode():
        made = runner(chosen.model, chosen.threads)
        matrices = weights(made)
        operations = {name: 2.0 * sum(weight.numel() for weight in list_) for name, list_ in matrices.items()}
        others = {name: [prepacked(weight) for weight in list_] for name, list_ in matrices.items()}
        compute = prepared(made, chosen.threads)
        compared = {} if chosen.no_onednn else others
        cases = [case for case in CASES if chosen.cases in case.name]
        results = [(case, measure(case, made.device, compute, compared, chosen.rounds)) for case in cases]
    print(table(results, operations))


if __name__ == "__main__":
    main()
