"""Checks that there is a usable GPU. Otherwise the error's message gives the reason and advice in one line."""

from __future__ import annotations

import os
import re

import torch

from forebay.device.interface import DeviceError

_INSTEAD = "or serve with --device cpu"


def require_gpu() -> None:
    """Initialises CUDA in this process. Raises `DeviceError` if PyTorch can't compute on the first visible GPU."""
    version = torch.__version__
    if torch.version.cuda is None:
        raise DeviceError(f"PyTorch {version} was built without CUDA: install a build that has it, {_INSTEAD}")
    try:
        torch.cuda.init()
        count = torch.cuda.device_count()
    except RuntimeError as error:
        raise DeviceError(_why_not(str(error), version)) from error
    if count == 0:
        raise DeviceError(_why_not("No CUDA GPUs are available", version))
    major, minor = torch.cuda.get_device_capability(0)
    if not compiled_for(major, minor, torch.cuda.get_arch_list()):
        raise DeviceError(
            f"{torch.cuda.get_device_name(0)} (sm_{major}{minor}) is none of the GPUs that PyTorch {version} was built "
            f"for ({' '.join(torch.cuda.get_arch_list())}): install another build, {_INSTEAD}"
        )


def compiled_for(major: int, minor: int, built: list[str]) -> bool:
    """True if a GPU of compute capability `major.minor` can run kernels for `built`, such as `sm_90`, `compute_90`.

    Machine code (`sm`) runs on later GPUs of the same major number. Intermediate code (`compute`) runs on all later
    GPUs. A target whose name ends with a letter runs only on exactly that GPU architecture.
    """
    for name in built:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", name)
        if found is None:
            continue
        kind, letter, of = found[1], found[4], (int(found[2]), int(found[3]))
        if letter:
            fits = letter == "a" and of == (major, minor)
        else:
            fits = of <= (major, minor) and (kind == "compute" or of[0] == major)
        if fits:
            return True
    return False


def _why_not(error: str, version: str) -> str:
    """Translates PyTorch's message into a reason with advice."""
    wanted = f"PyTorch {version} needs a driver for CUDA {torch.version.cuda}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if "too old" in error or "insufficient" in error:
        found = re.search(r"found version (\d+)", error)
        has = "" if found is None else f" (for CUDA {int(found[1]) // 1000}.{int(found[1]) % 1000 // 10})"
        return f"the NVIDIA driver is too old{has}: {wanted}; update it, install PyTorch for an older CUDA, {_INSTEAD}"
    if "no NVIDIA driver" in error:
        return f"there is no NVIDIA driver: {wanted}; install it, {_INSTEAD}"
    if "No CUDA GPUs" in error:
        named = "" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible}"
        return f"no GPU is visible{named}: name one that there is, {_INSTEAD}"
    return f"CUDA does not start: {error.splitlines()[0]}; mend that, {_INSTEAD}"
