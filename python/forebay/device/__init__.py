"""What differs between devices, behind one interface. CUDA becomes a second implementation of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy.typing as npt
import torch

from forebay.attention.backend import AttentionBackend
from forebay.weights.config import ModelConfig

if TYPE_CHECKING:
    from forebay.layers.decoder import Decoder
    from forebay.runner.compute import Compute
    from forebay.runner.inputs import PromptRows
    from forebay.runner.kv_pool import KvPool
    from forebay.runner.slots import SlotTables


class Device(Protocol):
    """One accelerator, or the host's processors, as the runner sees it."""

    @property
    def name(self) -> str:
        """What `ready` reports."""

    @property
    def torch_device(self) -> torch.device:
        """Where tensors live."""

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raises `ValueError` when the device can't compute in `dtype`."""

    def check_quantization(self, quantization: str) -> None:
        """Raises `ValueError` when the device has no products of quantised matrices."""

    def available_bytes(self) -> int:
        """Memory that can still be allocated."""

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed memory for a long life and of any size; where the device can, it is taken as it is written."""

    def attention(self) -> AttentionBackend:
        """The attention implementation of this device."""

    def compute(self, model: Decoder, tables: SlotTables, kv: KvPool, prompts: PromptRows) -> Compute:
        """How this device computes the rows of a model whose weights are loaded."""

    def weight_order(self, config: ModelConfig) -> str | None:
        """A name for the order that `compute` brings matrices into; None: they stay as they were loaded."""

    def weight_bytes(self, model: Decoder) -> int:
        """Bytes that the weights of a model take once `compute` has them in its order; they need not be loaded yet."""

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """A host array as a tensor of the device, which may share its memory until the end of the step."""

    def download(self, tensor: torch.Tensor) -> npt.NDArray[Any]:
        """A device tensor as a host array, after whatever computes it."""

    def clock_us(self) -> int:
        """Microseconds on a monotonic clock at which the work queued so far is done."""


def open_device(name: str, threads: int | None) -> Device:
    """The device called `name`; `threads` is the number of compute threads of a CPU (None: one a physical core)."""
    if name == "cpu":
        from forebay.device.cpu import CpuDevice

        return CpuDevice(threads)
    raise ValueError(f"device {name!r} is not supported: use cpu")
