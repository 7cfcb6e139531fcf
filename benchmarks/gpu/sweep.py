"""Other sizes of programs than those that kernels have, at the shapes of Qwen3-0.6B and Qwen3-8B.

    python3 -m benchmarks.gpu.sweep --seconds 40 --out sweep.json

Attention with other tiles, products of few rows beside PyTorch's, and the kernels of a step of one row with and without
programmatic dependent launches. First many processes compile, then one measures.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from benchmarks.gpu.clock import Operator, captured, copies_of, seconds
from benchmarks.gpu.operators import EPS, Heads, Paged, attention, matrices
from benchmarks.gpu.shapes import SHAPES
from forebay.device import DeviceError, open_device
from forebay.gpu.choose import kernels
from forebay.gpu.kernels import decodes, launch
from forebay.gpu.kernels.few import product_of_few
from forebay.gpu.kernels.shape import Shape, Tiles

COMPILERS = 12
NAMES = ("Qwen3-0.6B", "Qwen3-8B")
DECODES = ((1, 512), (1, 4096), (1, 32768), (17, 4096), (64, 512), (64, 4096), (256, 1536))
CHUNKS = ((0, 2048), (4096, 512), (30720, 2048))
DECODE_TILES = tuple(
    (16, tile, warps, stages)
    for tile, warps, stages in (
        *((64, 4, 3), (64, 4, 5), (64, 4, 7), (32, 4, 5), (32, 4, 7), (32, 2, 5), (128, 4, 5), (128, 8, 5)),
    )
)
CHUNK_TILES = ((128, 128, 8, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 3), (64, 64, 4, 3), (64, 128, 4, 3))
ONE = (
    *((8, 512, 4, 2), (16, 512, 4, 2), (4, 1024, 4, 1), (8, 1024, 8, 1)),
    *((8, 256, 4, 4), (4, 512, 2, 2), (4, 1024, 4, 3)),
)
FEW = ((16, 256, 4, 4), (16, 128, 4, 5), (32, 128, 4, 5), (32, 256, 4, 4), (64, 128, 4, 4), (16, 512, 4, 3))
LAYERS = 28
CHAINS = tuple((rows, own, overlapping) for rows in (1, 16) for own in (False, True) for overlapping in (False, True))
Job = tuple[str, Callable[[], Operator], Callable[[], Any]]
"""A name, the operator, and the context in which it runs."""


def jobs(device: torch.device) -> Iterator[Job]:
    """All that is measured, what matters most first."""
    ops = kernels()
    for name in NAMES:
        heads = Heads.of(SHAPES[name])
        for matrix, rows, inputs in matrices(heads):
            label = f"{name} {matrix} {rows} x {inputs}"
            for tokens in (1, 16):
                yield f"{label}, {tokens}: PyTorch", lambda a=(rows, inputs, tokens): linear(device, *a), nullcontext
                for config in ONE if tokens == 1 else FEW:
                    make = lambda a=(rows, inputs, tokens), c=config: linear(device, *a, config=c)  # noqa: E731
                    yield f"{label}, {tokens}: {config}", make, nullcontext
            for tokens in (8, 64):
                yield f"{label}, {tokens}: PyTorch", lambda a=(rows, inputs, tokens): linear(device, *a), nullcontext
    heads = Heads.of(SHAPES[NAMES[0]])
    for at, case in enumerate(DECODES):
        rows = [(case[1] - 1, 1)] * case[0]
        for tiles in DECODE_TILES:
            context = lambda t=tiles: patch.object(Shape, "decode_tiles", lambda _: Tiles(*t))  # noqa: E731
            yield f"decode {case}: {tiles}", lambda r=rows: attention(ops, heads, device, r), context
        if at in (1, 3):
            for most in (528, 1056):
                context = lambda m=most: patch.object(decodes, "splits", lambda p: splits(p, m))  # noqa: E731
                yield f"decode {case}: {most} programs", lambda r=rows: attention(ops, heads, device, r), context
    for chunk in CHUNKS:
        for tiles in CHUNK_TILES:
            context = lambda t=tiles: patch.object(Shape, "chunk_tiles", lambda _: Tiles(*t))  # noqa: E731
            yield f"chunk {chunk}: {tiles}", lambda r=[chunk]: attention(ops, heads, device, r), context


def splits(programs: int, most: int) -> int:
    """As the kernels' own, with other numbers of programs."""
    return 1 << (max(1, min(32, most // programs)).bit_length() - 1)


def linear(
    device: torch.device, rows: int, inputs: int, tokens: int, config: tuple[int, int, int, int] | None = None
) -> Operator:
    """A product with a matrix that no cache holds."""
    bytes_ = 2.0 * (rows * inputs + tokens * (rows + inputs))
    copies = copies_of(bytes_)
    weights = torch.randn(copies, rows, inputs, dtype=torch.bfloat16, device=device)
    x = torch.randn(tokens, inputs, dtype=torch.bfloat16, device=device)

    def run(at: int) -> object:
        if config is None:
            return F.linear(x, weights[at])
        return product_of_few(x, weights[at], None, one=config, few=config)

    return Operator("", run, copies, bytes_)


def chain(device: torch.device, name: str, rows: int, own: bool) -> Callable[[], object]:
    """The kernels of all layers of a step, one behind the other. `own`: products of few rows by our kernel."""
    ops, heads = kernels(), Heads.of(SHAPES[name])
    layers = [
        {m: torch.randn(r, k, dtype=torch.bfloat16, device=device) for m, r, k in matrices(heads)}
        for _ in range(LAYERS)
    ]
    paged = Paged.make(replace(heads), device, [(511, 1)] * rows)
    x = torch.randn(rows, heads.hidden, dtype=torch.bfloat16, device=device)
    norm = torch.ones(heads.hidden, dtype=torch.bfloat16, device=device)
    norms = (torch.ones(heads.dim, dtype=torch.bfloat16, device=device),) * 2
    angles = torch.randn(rows, 1, heads.dim, dtype=torch.bfloat16, device=device)
    writes = torch.arange(rows, device=device)
    product = (lambda a, b: product_of_few(a, b, None)) if own else F.linear

    def step() -> object:
        state, residual = ops.add_norm(x, None, norm, EPS)
        for layer in layers:
            qkv = product(state, layer["qkv"])
            q, _, _ = ops.rotate_and_keep(
                qkv, heads.queries, norms, EPS, angles, angles, paged.keys, paged.values, writes
            )
            seen = ops.attend(q, paged.keys, paged.values, paged.rows[0], heads.dim**-0.5)
            state, residual = ops.add_norm(product(seen.flatten(1), layer["o"]), residual, norm, EPS)
            gated = ops.gate(product(state, layer["gate_up"]))
            state, residual = ops.add_norm(product(gated, layer["down"]), residual, norm, EPS)
        return state

    return step


def chains(device: torch.device) -> Iterator[tuple[str, float]]:
    """Microseconds of chains with and without overlaps."""
    for rows, own, overlapping in CHAINS:
        with patch.object(launch, "overlaps", lambda _, o=overlapping: o), torch.inference_mode():
            us = 1e6 * seconds(captured(chain(device, NAMES[0], rows, own), device), device)
        yield f"chain, {rows} rows, own products {own}, overlap {overlapping}", us


def main() -> int:
    """Compiles or measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--compile", type=int, help="compile a share of all")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    try:
        device = open_device("cuda", None).torch_device
    except DeviceError as error:
        print(f"skipped: {error}")
        return 0
    if options.compile is not None:
        with torch.inference_mode():
            for number, (_, make, context) in enumerate(jobs(device)):
                if number % COMPILERS == options.compile and time.monotonic() < deadline:
                    with context():
                        make().run(0)
            if options.compile < len(CHAINS):
                rows, own, overlapping = CHAINS[options.compile]
                with patch.object(launch, "overlaps", lambda _: overlapping):
                    chain(device, NAMES[0], rows, own)()
        torch.cuda.synchronize()
        return 0
    mine = [sys.executable, "-m", "benchmarks.gpu.sweep", "--seconds", str(options.seconds / 2), "--compile"]
    compilers = [subprocess.Popen([*mine, str(number)]) for number in range(COMPILERS)]
    found: dict[str, Any] = {}

    def keep(name: str, us: float, gbps: float | None) -> None:
        found[name] = {"us": us, "gbps": gbps}
        print(f"{name}: {us:.2f} us" + ("" if gbps is None else f", {gbps:.0f} GB/s"), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(found, indent=1))

    for compiler in compilers:
        compiler.wait()
    print(f"compiled, {deadline - time.monotonic():.0f} s left", flush=True)
    try:
        for name, us in chains(device):
            keep(name, us, None)
    except Exception as error:
        print(f"chains: {error!r}", flush=True)
    with torch.inference_mode():
        for name, make, context in jobs(device):
            if time.monotonic() > deadline:
                print("out of time")
                break
            try:
                with context():
                    operator = make()
                    us = 1e6 * operator.seconds(device)
            except Exception as error:
                print(f"{name}: {error!r}", flush=True)
                continue
            keep(name, us, operator.bytes / us / 1e3)
            del operator
    return 0


if __name__ == "__main__":
    sys.exit(main())
