"""Every variant of a kernel compiles, spills no register, and fits the shared memory of its GPU."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from functools import partial

import pytest

from forebay.compute.graphs import Size, decode_rows, mixed_sizes
from forebay.gpu.kernels.launch import COMPILATIONS, LITTLE_ROOM, ROOM, CompiledWhileServingError
from tests.gpu.compiled.compiling import Compiled, Compiler
from tests.gpu.compiled.variants import all_variants, attend_step, hot_step, mixed_step
from tests.gpu.shapes import QWEN3_0_6B, TOP_K

VARIANTS = all_variants()
# One variant of each kernel. Models of other sizes differ only in constants.
FEW = [
    *(f"Qwen3-0.6B: {name}" for name in ("chunks", "layer", "tables", "sampling")),
    "Qwen3-30B-A3B: experts",
    *(f"DeepSeek-V3.2: {name}" for name in ("latent decode", "latent chunks", "latent rows", "index", "chosen rows")),
    "hot rows 4096",
    *(f"codes: {kind}" for kind in ("blocks", "4 bits")),
    *(f"Qwen3-Next-80B-A3B: {name}" for name in ("decode rows", "states of chunks")),
    *("Kimi-Linear-48B-A3B: states of chunks", "LFM2: states of chunks", "Qwen3-0.6B: adapters of rank 64"),
    *(f"8-bit KV of Qwen3-0.6B: {name}" for name in ("decode", "chunks", "layer")),
]
_WAITS = re.compile(r"cp\.async\.wait_group\s+(\d+)")
# On Hopper these kernels multiply tiles of at least 64 rows, which only Hopper's own instruction (wgmma) does fast.
LARGE_PRODUCTS = {"chunks_kernel", "gate_up_kernel", "down_kernel", "scores_kernel", "product_kernel"}


def check(found: list[Compiled], shared: int) -> None:
    assert found
    for kernel in found:
        assert kernel.stack == kernel.local == 0, f"{kernel.name} spills {kernel.stack} bytes"
        assert kernel.shared <= shared, f"{kernel.name} takes {kernel.shared} bytes"


@pytest.mark.parametrize("name", VARIANTS)
def test_hopper(name: str, compiler: Compiler) -> None:
    check(compiler.compile(90, VARIANTS[name]), ROOM)


@pytest.mark.parametrize(
    "name",
    [
        *("Llama-3.1-8B: chunks", "8-bit KV of Qwen3-0.6B: chunks", "Qwen3-30B-A3B: experts"),
        *("DeepSeek-V3.2: index", "codes: blocks"),
    ],
)
def test_large_products_use_the_large_instruction(name: str, compiler: Compiler) -> None:
    found = compiler.compile(90, VARIANTS[name])
    large = {kernel.name for kernel in found if "wgmma.mma_async" in kernel.ptx}
    assert large == LARGE_PRODUCTS & {kernel.name for kernel in found}


@pytest.mark.parametrize(
    "name", ["Qwen3-0.6B: decode", "8-bit KV of Qwen3-0.6B: decode", "DeepSeek-V3.2: latent decode"]
)
def test_decodes_load_while_they_compute(name: str, compiler: Compiler) -> None:
    """A wait for 0 copies inside the loop would leave no load in flight. Only the wait after the loop has 0."""
    kernels = [kernel for kernel in compiler.compile(90, VARIANTS[name]) if kernel.name == "decodes_kernel"]
    assert kernels
    for kernel in kernels:
        *within, last = map(int, _WAITS.findall(kernel.ptx))
        assert within
        assert min(within) > 0
        assert last == 0


ROOM_FOR = {
    ("Qwen3-0.6B: decode", "decodes_kernel"): 4,
    ("Llama-3.1-8B: decode", "decodes_kernel"): 4,
    ("8-bit KV of Qwen3-0.6B: decode", "decodes_kernel"): 2,
    ("DeepSeek-V3.2: latent decode", "decodes_kernel"): 1,
    ("Qwen3-0.6B: layer of one row", "one_row_kernel"): 7,
    ("Qwen3-0.6B: layer of one row", "gated_row_kernel"): 8,
    ("Qwen3-0.6B: sampling", "adjust_kernel"): 8,
    ("Qwen3-0.6B: sampling", "chunks_kernel"): 4,
}
"""How many programs a multiprocessor must hold at once. For decode rows `Tiles.programs` assumes this number."""


@pytest.mark.parametrize(("name", "kernel"), ROOM_FOR)
def test_registers_leave_room_for_programs(name: str, kernel: str, compiler: Compiler) -> None:
    found = [one for one in compiler.compile(90, VARIANTS[name]) if one.name == kernel]
    assert found
    for one in found:
        assert one.together >= ROOM_FOR[name, kernel], f"{one.registers} registers, {one.shared} bytes"


@pytest.mark.parametrize("name", FEW)
def test_large_blackwell(name: str, compiler: Compiler) -> None:
    check(compiler.compile(100, VARIANTS[name]), ROOM)


@pytest.mark.parametrize("arch", [80])
@pytest.mark.parametrize("name", FEW)
def test_gpus_with_little_room(name: str, arch: int, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    for user in ("shape", "grouped", "quantised", "low_rank"):
        monkeypatch.setattr(sys.modules[f"forebay.gpu.kernels.{user}"], "is_roomy", lambda device: False)
    check(compiler.compile(arch, VARIANTS[name]), LITTLE_ROOM)


@pytest.mark.parametrize(("arch", "cast"), [(86, False), (89, True)])
def test_8_bit_floats_are_read_by_an_instruction_where_there_is_one(arch: int, cast: bool, compiler: Compiler) -> None:
    found = compiler.compile(arch, VARIANTS["8-bit KV of SmolLM2-135M: decode"])
    assert {"e4m3x2" in kernel.ptx for kernel in found if kernel.name == "decodes_kernel"} == {cast}


def test_other_lengths_compile_nothing_more(compiler: Compiler) -> None:
    """Numbers that change from step to step are not compiled as constants.

    One variant is for multiples of 16, and one for other numbers. A step of one token has its own variants, whose
    kernels overlap.
    """
    compiler.compile(90, lambda: mixed_step(48, 4))
    compiler.compile(90, lambda: mixed_step(1, 1))
    before = COMPILATIONS.count
    for tokens, rows in ((33, 3), (17, 16), (2, 1), (1, 1)):
        compiler.compile(90, lambda tokens=tokens, rows=rows: mixed_step(tokens, rows))  # type: ignore[misc]
    assert COMPILATIONS.count == before


def test_other_numbers_of_pages_compile_nothing_more(compiler: Compiler) -> None:
    """A start measures a step with one page, and then takes as many pages as fit. The same variants serve both."""

    def step(pages: int) -> None:
        mixed_step(48, 4, pages)
        attend_step(QWEN3_0_6B, 4, 4, False, pages)
        hot_step(TOP_K, pages)

    compiler.compile(90, partial(step, 1))
    before = COMPILATIONS.count
    for pages in (9999, 16 * 600, 4097):
        compiler.compile(90, partial(step, pages))
    assert COMPILATIONS.count == before


@pytest.mark.parametrize("most", [6, 200])
def test_graphs_have_every_variant_of_steps_beside_them(most: int, compiler: Compiler) -> None:
    """The number of a row's parts is a constant. Steps without a graph use only variants that graphs have compiled."""
    # No other test has these numbers of heads, so their variants are not compiled yet.
    model = replace(QWEN3_0_6B, heads=8 * {6: 3, 200: 5}[most])
    for size in (*(Size(rows, rows, mixed=False) for rows in decode_rows(most)), *mixed_sizes(most, 8192)):
        compiler.compile(90, partial(attend_step, model, size.tokens, size.rows, size.mixed))
    before = COMPILATIONS.count
    for rows in range(1, most + 1):
        compiler.compile(90, partial(attend_step, model, 8000 + rows, rows, True))
    assert COMPILATIONS.count == before


def test_rows_that_no_graph_has_compile(compiler: Compiler) -> None:
    """Shows that the test above would notice a new variant: without graphs, a new number of rows compiles one."""
    model = replace(QWEN3_0_6B, kv_heads=4)
    compiler.compile(90, partial(attend_step, model, 1, 1, False))
    before = COMPILATIONS.count
    compiler.compile(90, partial(attend_step, model, 8, 8, False))
    assert COMPILATIONS.count > before


def test_a_compilation_while_serving_is_an_error(compiler: Compiler) -> None:
    operators = VARIANTS["Qwen3-0.6B: tables"]
    compiler.compile(90, operators)
    counted = COMPILATIONS.count
    assert counted > 0
    COMPILATIONS.seal()
    try:
        # Compiled variants still run. Another architecture counts as another device.
        compiler.compile(90, operators)
        with pytest.raises(CompiledWhileServingError, match="slots_kernel"):
            compiler.compile(86, operators)
    finally:
        COMPILATIONS.seal(False)
    assert COMPILATIONS.count == counted
