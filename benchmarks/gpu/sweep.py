"""Tries other program sizes of kernels, at the shapes of Qwen3-0.6B and Qwen3-8B.

python3 -m benchmarks.gpu.sweep --seconds 40 --out sweep.json

Attention runs with other tiles. Products of one row are compared with PyTorch's, and products with quantised weights
run in two ways. The kernels of a step of one row run with and without programmatic dependent launches. First many
processes compile, then one measures.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from benchmarks import records
from benchmarks.gpu import coded
from benchmarks.gpu.__main__ import new
from benchmarks.gpu.clock import Operator, captured, copies_of, seconds
from benchmarks.gpu.operators import EPS, Heads, Paged, attention, matrices
from benchmarks.gpu.shapes import SHAPES
from benchmarks.records import Run
from forebay.device import DeviceError, open_device
from forebay.gpu import products
from forebay.gpu.choose import kernels
from forebay.gpu.kernels import launch
from forebay.gpu.kernels.shape import Shape, Tiles

COMPILERS = 12
SMALL, LARGE = "Qwen3-0.6B", "Qwen3-8B"
DECODES = ((1, 512), (1, 4096), (1, 32768), (17, 4096), (64, 512), (64, 4096), (256, 1536))
"""The number of rows, and the positions of each."""
CHUNKS = ((0, 2048), (4096, 512), (30720, 2048))
"""Positions before the chunk, and tokens in it."""
DECODE_TILES = (
    *(Tiles(16, 64, 4, stages) for stages in (3, 5, 7)),
    *(Tiles(16, 32, 4, stages, 660) for stages in (3, 5, 7)),
    *(Tiles(16, 128, warps, 5) for warps in (4, 8)),
)
CHUNK_TILES = (
    *(Tiles(128, tile, 8, stages) for tile in (64, 128) for stages in (2, 3)),
    *(Tiles(64, tile, 4, 3) for tile in (64, 128)),
)
CHAINS = (
    *((own, overlapping, False) for own in (False, True) for overlapping in (False, True)),
    (True, True, True),
)
"""Combinations of our own products, overlapping kernels, and fused gates."""
LAYERS = 28
CROSSINGS, PLAN_WORDS, RESULT_WORDS = 20, 512, 129
"""Repetitions, and the words of a plan and of results for 64 decode rows."""
FEW = 16
"""The number of tokens in products that cuBLAS may split."""
Job = tuple[str, Callable[[], Operator], Callable[[], AbstractContextManager[Any]]]
"""A name, the operator, and the setting under which it runs."""


def jobs(device: torch.device) -> Iterator[Job]:
    """All measurements, the most important first."""
    ops = kernels()
    for name in (SMALL, LARGE):
        heads = Heads.of(SHAPES[name])
        for matrix, rows, inputs in matrices(heads):
            for own in (False, True):
                how = "one row" if own else "PyTorch"
                yield f"{name} {matrix}, 1 token: {how}", partial(linear, device, rows, inputs, own), nullcontext
            for reduced in (False, True):
                how = "bfloat16" if reduced else "float32"
                few = partial(linear, device, rows, inputs, False, FEW)
                yield f"{name} {matrix}, {FEW} tokens: PyTorch, sums in {how}", few, partial(sums_reduced, reduced)
        for tokens in (1, 16, 32, 64, 256):
            for multiplied_out in (False, True):
                how = "multiplied out" if multiplied_out else "in its codes"
                change = partial(patch.object, products, "MANY_ROWS", 0 if multiplied_out else 1 << 30)
                for kind, make in coded.products(ops, device, 2 * heads.inner, heads.hidden, tokens):
                    yield f"{name} gate_up in {kind}, {tokens} tokens: {how}", make, change
    heads = Heads.of(SHAPES[SMALL])
    for rows_of, method, tiles in (
        *(([(end - 1, 1)] * count, "decode_tiles", DECODE_TILES) for count, end in DECODES),
        *(([chunk], "chunk_tiles", CHUNK_TILES) for chunk in CHUNKS),
    ):
        for one in tiles:
            what = f"attention, {len(rows_of)} rows {rows_of[0]}: {one}"
            change = partial(patch.object, Shape, method, lambda _, one=one: one)
            yield what, partial(attention, ops, heads, device, rows_of), change


@contextmanager
def sums_reduced(allowed: bool) -> Iterator[None]:
    """Allows or forbids cuBLAS to add parts of a sum in bfloat16, as a hand does. It may then split long sums."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = allowed
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before


def linear(device: torch.device, rows: int, inputs: int, own: bool, tokens: int = 1) -> Operator:
    """A product of one row, or a few, with a matrix that is in no cache."""
    bytes_ = 2.0 * (rows * inputs + tokens * (rows + inputs))
    copies, ops = copies_of(bytes_), kernels()
    weights = torch.randn(copies, rows, inputs, dtype=torch.bfloat16, device=device)
    x = torch.randn(tokens, inputs, dtype=torch.bfloat16, device=device)
    product = partial(ops.one_row, bias=None) if own else F.linear
    return Operator("", lambda at: product(x, weights[at]), copies, bytes_)


def chain(device: torch.device, own: bool, fused: bool = False) -> Callable[[], object]:
    """The kernels of all layers of a one-row step, in sequence. `own` and `fused` are as in `CHAINS`."""
    ops, heads = kernels(), Heads.of(SHAPES[SMALL])

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device)

    layers = [{name: random(rows, inputs) for name, rows, inputs in matrices(heads)} for _ in range(LAYERS)]
    paged = Paged.make(heads, device, [(511, 1)])
    x, norm, angles = random(1, heads.hidden), random(heads.hidden), random(1, 1, heads.dim)
    norms = random(heads.dim), random(heads.dim)
    writes = torch.arange(1, device=device)
    product = partial(ops.one_row, bias=None) if own else F.linear

    def step() -> object:
        state, residual = ops.add_norm(x, None, norm, EPS)
        for layer in layers:
            qkv = product(state, layer["qkv"])
            q, _, _ = ops.rotate_and_keep(
                qkv, heads.queries, norms, EPS, angles, angles, paged.keys, paged.values, writes
            )
            seen = ops.attend(q, paged.keys, paged.values, paged.rows[0], heads.dim**-0.5)
            state, residual = ops.add_norm(product(seen.flatten(1), layer["o"]), residual, norm, EPS)
            if fused:
                gated = ops.one_row_gated(state, layer["gate_up"], None)
            else:
                gated = ops.gate(product(state, layer["gate_up"]))
            state, residual = ops.add_norm(product(gated, layer["down"]), residual, norm, EPS)
        return state

    return step


def chains(device: torch.device) -> Iterator[tuple[str, float]]:
    """Microseconds of chains with and without overlapping kernels."""
    for own, overlapping, fused in CHAINS:
        with patch.object(launch, "overlaps", lambda _, asked=overlapping: asked), torch.inference_mode():
            us = 1e6 * seconds(captured(chain(device, own, fused), device), device)
        yield f"layers of one row, own products {own}, overlap {overlapping}{', gates fused' if fused else ''}", us


def crossing(device: torch.device, mapped: bool) -> Callable[[], object]:
    """Copies a plan to the device, runs a short kernel, and copies results back, `CROSSINGS` times.

    `mapped`: kernels read and write host memory directly, without a copy engine.
    """
    ops, heads = kernels(), Heads.of(SHAPES[SMALL])
    pinned = device.type == "cuda"
    plan, result = (torch.zeros(words, dtype=torch.int32, pin_memory=pinned) for words in (PLAN_WORDS, RESULT_WORDS))
    there, block = (torch.zeros_like(one, device=device) for one in (plan, result))
    x, norm = (torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in ((1, heads.hidden), heads.hidden))

    def move(source: torch.Tensor, target: torch.Tensor) -> None:
        ops.move_words(source, target) if mapped else target.copy_(source, non_blocking=True)

    def steps() -> None:
        for _ in range(CROSSINGS):
            move(plan, there)
            ops.add_norm(x, None, norm, EPS)
            move(block, result)

    return steps


def crossings(device: torch.device) -> Iterator[tuple[str, float]]:
    """Microseconds of a plan and its results, with both methods."""
    for mapped in (False, True):
        with torch.inference_mode():
            us = 1e6 * seconds(captured(crossing(device, mapped), device), device) / CROSSINGS
        yield f"a plan of {PLAN_WORDS} words and a result of {RESULT_WORDS}, {'mapped' if mapped else 'copied'}", us


def compile_share(device: torch.device, share: int, deadline: float) -> None:
    """Compiles this process's share of the kernels."""
    with torch.inference_mode():
        for number, (_, make, change) in enumerate(jobs(device)):
            if number % COMPILERS == share and time.monotonic() < deadline:
                with change():
                    make().run(0)
        if share < len(CHAINS):
            own, overlapping, fused = CHAINS[share]
            with patch.object(launch, "overlaps", lambda _: overlapping):
                chain(device, own, fused)()
    torch.cuda.synchronize()


def measure(device: torch.device, deadline: float) -> Iterator[tuple[str, float, float | None]]:
    """Measures all jobs: names, microseconds and GB/s."""
    for name, us in (*chains(device), *crossings(device)):
        yield name, us, None
    with torch.inference_mode():
        for name, make, change in jobs(device):
            if time.monotonic() > deadline:
                print("out of time")
                return
            with change():
                operator = make()
                us = 1e6 * operator.seconds(device)
            yield name, us, operator.bytes / us / 1e3
            del operator


def main() -> int:
    """Compiles or measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40, help="the longest time [40]")
    parser.add_argument("--compile", type=int, metavar="SHARE", help="compile a share of the kernels, and measure none")
    parser.add_argument("--out", type=Path, help="a file for the results")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    try:
        opened = open_device("cuda", None)
    except DeviceError as error:
        print(f"skipped: {error}")
        return 0
    device = opened.torch_device
    if options.compile is not None:
        compile_share(device, options.compile, deadline)
        return 0
    mine = [sys.executable, "-m", "benchmarks.gpu.sweep", "--seconds", str(options.seconds / 2), "--compile"]
    for compiler in [subprocess.Popen([*mine, str(share)]) for share in range(COMPILERS)]:
        compiler.wait()
    found = new(opened.name, "gpu_sweep")
    for name, us, gbps in measure(device, deadline):
        found.runs.append(Run(name, "device", 1, {"us": us, "gbps": gbps}))
        print(f"{name}: {us:.2f} us" + ("" if gbps is None else f", {gbps:.0f} GB/s"), flush=True)
    if options.out is not None:
        records.save(found, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
