"""The host's processors as a device."""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch

from forebay.attention.backend import AttentionBackend
from forebay.attention.cpu import CpuAttention
from forebay.kernels.compute import NativeCompute, level, native_wanted
from forebay.kernels.library import WITH_BYTES, build
from forebay.kernels.packing import packed_bytes
from forebay.layers.decoder import Decoder
from forebay.runner.compute import Compute, TorchCompute
from forebay.runner.inputs import PromptRows
from forebay.runner.kv_pool import KvPool
from forebay.runner.slots import SlotTables
from forebay.weights.config import ModelConfig
from forebay.weights.errors import ModelError
from forebay.weights.memory import fresh
from forebay.weights.quantization import PLAIN


class CpuDevice:
    """CPU implementation of `Device`: everything is synchronous, so uploads are views and waiting is nothing."""

    name = "cpu"
    torch_device = torch.device("cpu")

    def __init__(self, threads: int | None) -> None:
        torch.set_num_threads(threads or physical_cores())
        self._native = native_wanted()

    def check_dtype(self, dtype: torch.dtype) -> None:
        if dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"dtype {dtype} is not supported on the CPU: use bfloat16 or float32")

    def check_quantization(self, quantization: str) -> None:
        if not self._native:
            raise ValueError(
                f"quantization {quantization} needs the compiled kernels, and PyTorch's operators are in use"
            )
        if level() not in WITH_BYTES:
            print(
                f"quantised products use plain loops with {level()} instructions: bfloat16 or float32 may be faster",
                file=sys.stderr,
            )

    def available_bytes(self) -> int:
        return min(_host_available(), _cgroup_available())

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return fresh(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

    def attention(self) -> AttentionBackend:
        return CpuAttention()

    def compute(self, model: Decoder, tables: SlotTables, kv: KvPool, prompts: PromptRows) -> Compute:
        if self._native and NativeCompute.supports(model.config):
            return NativeCompute(model, tables, kv, prompts, torch.get_num_threads())
        if model.params.formats != PLAIN:
            raise ModelError("the compiled kernels can't compute this model, and nothing else computes quantised ones")
        return TorchCompute(model, tables, kv, prompts, self)

    def weight_order(self, config: ModelConfig) -> str | None:
        # All levels read the same order.
        return build() if self._native and NativeCompute.supports(config) else None

    def weight_bytes(self, model: Decoder) -> int:
        if self._native and NativeCompute.supports(model.config):
            return packed_bytes(model)
        return model.params.nbytes

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array)

    def download(self, tensor: torch.Tensor) -> npt.NDArray[Any]:
        return tensor.numpy()

    def clock_us(self) -> int:
        return time.perf_counter_ns() // 1000


def physical_cores() -> int:
    """Cores that this process may run on; the hardware threads of one core count once."""
    available = os.sched_getaffinity(0)
    cores = set()
    for cpu in available:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text())
        except OSError:
            return len(available)
    return len(cores)


def _host_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")


def _cgroup_available() -> int:
    """What the container's limit leaves, where there is one (cgroup v2)."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        if limit == "max":
            return 1 << 62
        return max(0, int(limit) - int((root / "memory.current").read_text()))
    except OSError:
        return 1 << 62
