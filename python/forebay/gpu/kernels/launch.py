"""The only way to launch a kernel, with the common options of launches and a count of compilations.

A launch with a new combination of types, constants and alignments compiles. That takes up to a second, in which the
device is idle. A hand with graphs compiles everything before it serves, and tests check that nothing compiles after
that. A hand without graphs compiles at the first step of each number of rows.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import driver

INTERPRETED: bool = triton.knobs.runtime.interpret
"""True if kernels run in Triton's interpreter: the environment had `TRITON_INTERPRET=1` when Triton was imported."""

COMPILES = not INTERPRETED

ROOM = 227 << 10
"""Bytes of shared memory for a program on a GPU that `is_roomy`."""
LITTLE_ROOM = 99 << 10
"""Bytes of shared memory for a program on all other supported GPUs."""
_DOT_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class CompiledWhileServingError(RuntimeError):
    """A launch needs a kernel that is not compiled, after the count was sealed."""


class Compilations:
    """Counts kernels that Triton compiles, or loads from its cache, in this process."""

    def __init__(self) -> None:
        self.count = 0
        self._sealed = False

    def seal(self, sealed: bool = True) -> None:
        """Makes later launches that have to compile raise `CompiledWhileServingError`."""
        self._sealed = sealed

    def note(self, **about: Any) -> None:
        """A hook that Triton calls before it compiles. Its keywords describe the kernel; `fn` has the name."""
        if self._sealed:
            kernel = about["fn"].name
            raise CompiledWhileServingError(f"the kernel {kernel} was not compiled before serving: {about['repr']}")
        self.count += 1


COMPILATIONS = Compilations()
triton.knobs.runtime.jit_cache_hook = COMPILATIONS.note


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, overlap: bool | None = None, **options: Any) -> None:
    """Runs `grid` programs of a kernel on the current stream; `options` are its constants and Triton's own.

    A grid without programs launches nothing. `overlap`: the kernel calls `dependents`, and may begin before the one
    before it ends; None: it does not know OVERLAP.
    """
    if 0 in grid:
        return
    if overlap is not None:
        options["OVERLAP"] = overlap and overlaps(args[0].device)
        if options["OVERLAP"]:
            options["launch_pdl"] = True
    # Triton 3.10 will turn the fusion of products and sums off where nobody asks for it.
    kernel[grid](*args, enable_fp_fusion=True, **options)


OVERLAP = "FOREBAY_GPU_OVERLAP"
"""The environment's choice: 0 has every kernel wait for the end of the one before it."""


def overlaps(device: torch.device) -> bool:
    """True if a kernel may begin before the one before it ends: Hopper and later.

    Launches ask for it in steps of one token. There kernels are too short to hide their own launches. With more rows
    the next kernel's programs would take the room of those that still run: 16 rows became slower.
    """
    if INTERPRETED or os.environ.get(OVERLAP, "1") == "0":
        return False
    if device.type == "cuda":
        return _is_hopper(device)
    # Compiled for a GPU that is not there.
    return int(driver.active.get_current_target().arch) >= 90


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def dependents(OVERLAP: tl.constexpr):
    """Lets the next kernel begin, and waits for the end of the one before (programmatic dependent launch).

    What is read before the call is nothing that an earlier kernel writes.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@cache
def is_roomy(device: torch.device) -> bool:
    """True if a program may have 227 KiB of shared memory, as on Hopper and the large Blackwells.

    Others have 99 or 163.
    """
    if device.type != "cuda":
        return True
    limit: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return limit >= ROOM


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """The type for products of such elements."""
    return tl.float32 if INTERPRETED else _DOT_TYPES[dtype]


def power_of_2(n: int) -> int:
    """The least power of 2 that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def cdiv(n: int, size: int) -> int:
    """The number of parts of `size` that cover n."""
    return -(-n // size)
