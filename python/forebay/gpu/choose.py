"""Selects a hand's operators."""

from __future__ import annotations

import os

from forebay.gpu.interface import Kernels

VARIABLE = "FOREBAY_GPU_KERNELS"
"""The environment variable for the kernels: `triton`, the default, or `reference`, which needs no Triton."""

MAPPED = "FOREBAY_GPU_MAPPED"
"""The environment variable for mapped memory: with 1, kernels read plans and write results in host memory. Untested on
GPUs.
"""


def maps() -> bool:
    """True if the environment turns `MAPPED` on."""
    return os.environ.get(MAPPED, "0") == "1"


def kernels() -> Kernels:
    """Returns the operators that the environment selects. Raises `ValueError` for an unknown name."""
    name = os.environ.get(VARIABLE, "triton")
    if name == "triton":
        from forebay.gpu import kernels as triton_kernels

        return triton_kernels
    if name == "reference":
        from forebay.gpu import reference

        return reference
    raise ValueError(f"{VARIABLE} {name!r} is not known: use triton or reference")
