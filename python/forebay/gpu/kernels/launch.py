"""Launches kernels, with the common options of launches and a count of compilations. All launches go through it.

A launch with a new combination of types, constants and alignments compiles the kernel. That takes up to a second, in
which the device is idle. A hand with graphs compiles everything before it serves, and tests check that nothing compiles
after that. A hand without graphs compiles at the first step with each number of rows.
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
"""Bytes of shared memory per program on a GPU for which `is_roomy` is true."""
LITTLE_ROOM = 99 << 10
"""Bytes of shared memory per program on all other supported GPUs."""
_DOT_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class CompiledWhileServingError(RuntimeError):
    """A launch requires a compilation after `seal`."""


class Compilations:
    """Counts the kernels that Triton compiles, or loads from its cache, in this process."""

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
    """Runs `grid` programs of a kernel on the current stream; `options`: the kernel's constants and Triton's options.

    An empty grid launches nothing. `overlap`: True lets the kernel, which calls `dependents`, start before the previous
    kernel ends; None: the kernel has no parameter OVERLAP.
    """
    if 0 in grid:
        return
    if overlap is not None:
        options["OVERLAP"] = overlap and overlaps(args[0].device)
        if options["OVERLAP"]:
            options["launch_pdl"] = True
    # Triton 3.10 will turn off the fusion of products and sums unless it is requested.
    kernel[grid](*args, enable_fp_fusion=True, **options)


OVERLAP = "FOREBAY_GPU_OVERLAP"
"""The environment variable for overlap: with 0, every kernel waits for the end of the previous kernel."""


def overlaps(device: torch.device) -> bool:
    """True if a kernel may start before the previous kernel ends: Hopper and later.

    Launches request this overlap in steps of one token, whose kernels are too short to hide the next launch. With more
    rows, the next kernel's programs would take resources from programs that still run: 16 rows became slower.
    """
    if INTERPRETED or os.environ.get(OVERLAP, "1") == "0":
        return False
    if device.type == "cuda":
        return _is_hopper(device)
    # Kernels are being compiled for a GPU that is not present.
    return int(driver.active.get_current_target().arch) >= 90


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def dependents(OVERLAP: tl.constexpr):
    """Lets the next kernel start, and waits for the end of the previous one (programmatic dependent launch).

    Before this call, a kernel must not read anything that an earlier kernel writes.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@cache
def is_roomy(device: torch.device) -> bool:
    """True if a program may use 227 KiB of shared memory, as on Hopper and the large Blackwell GPUs.

    Other GPUs have 99 or 163 KiB.
    """
    if device.type != "cuda":
        return True
    limit: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return limit >= ROOM


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """Returns the type to which elements of type `dtype` are converted for products."""
    return tl.float32 if INTERPRETED else _DOT_TYPES[dtype]


def power_of_2(n: int) -> int:
    """Returns the smallest power of 2 that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def cdiv(n: int, size: int) -> int:
    """Returns n / size, rounded up."""
    return -(-n // size)
