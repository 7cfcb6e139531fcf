"""A `torch.cuda` without a GPU: streams and events do nothing, and memory never runs out.

Tensors on the device are of two kinds. Fake tensors have a device and a shape but no content: they show where devices
are mixed. Tensors on the host have content: they show that the right bytes are copied.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from forebay.device import cuda, cuda_pages


class FakeStream:
    numbers = itertools.count(1)

    def __init__(self, device: object = None) -> None:
        self.number = next(self.numbers)
        self.waited = 0

    def synchronize(self) -> None:
        self.waited += 1


class FakeEvent:
    """Records in which stream it was recorded, and how often it was waited for."""

    clock = staticmethod(time.perf_counter)

    def __init__(self, enable_timing: bool = False) -> None:
        self.timed = enable_timing
        self.stream: object = None
        self.waits = 0
        self.at = 0.0

    def record(self, stream: object = None) -> None:
        self.stream = stream or "current"
        self.at = self.clock()

    def synchronize(self) -> None:
        self.waits += 1

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.timed
        assert end.timed
        return 1000 * (end.at - self.at)


class FakeCuda:
    """Replaces the GPU. Tests set what it reports, and check the calls that it got."""

    def __init__(self) -> None:
        self.free = 8 << 30
        self.capability = (9, 0)
        self.archs = ["sm_80", "sm_90", "compute_90"]
        self.count = 1
        self.error: str | None = None
        self.streams: list[object] = []
        self.registered: list[tuple[int, int]] = []
        self.refuses_memory = False
        self.pinned: list[tuple[int, int]] = []
        self._pins: list[torch.Tensor] = []
        self.pools = itertools.count(1)
        self.captured: list[object] = []
        """The memory pools of captures."""
        self.replays = 0
        """Replays of all graphs."""

    def init(self) -> None:
        if self.error is not None:
            raise RuntimeError(self.error)

    def pin(self, size: int) -> torch.Tensor:
        with unset_fake_temporarily():
            memory = torch.zeros(size, dtype=torch.uint8)
        # The memory is kept, so that no other allocation gets its address.
        self._pins.append(memory)
        self.pinned.append((memory.data_ptr(), memory.data_ptr() + size))
        return memory

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        if isinstance(tensor, FakeTensor):
            return False
        at = tensor.data_ptr()
        return any(first <= at and at + tensor.nbytes <= end for first, end in self.pinned)

    @contextmanager
    def graph(self, graph: object, pool: object, stream: object, capture_error_mode: str) -> Iterator[None]:
        """Behaves as `torch.cuda.graph`: frees unused pinned memory, and raises on exit if the capture has failed."""
        self.captured.append(pool)
        self.pinned.clear()
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError("operation failed due to a previous error during capture") from error

    def replay(self) -> None:
        self.replays += 1

    def cudart(self) -> Any:
        def register(address: int, size: int, flags: int) -> str:
            assert flags == 3
            if self.refuses_memory:
                return "refused"
            self.registered.append((address, size))
            self.pinned.append((address, address + size))
            return "fine"

        return SimpleNamespace(
            cudaError=SimpleNamespace(success="fine"),
            cudaHostRegister=register,
            cudaGetErrorString=lambda status: f"it was {status}",
        )


def install(monkeypatch: pytest.MonkeyPatch, place: torch.device) -> FakeCuda:
    """Replaces `torch.cuda`. Tensors of the device are created on `place`."""
    fake = FakeCuda()
    surface: dict[str, Any] = {
        "init": fake.init,
        "device_count": lambda: fake.count,
        "set_device": lambda _: None,
        "get_device_name": lambda _: "Fake GPU",
        "get_device_capability": lambda _: fake.capability,
        "get_arch_list": lambda: fake.archs,
        "Stream": FakeStream,
        "Event": FakeEvent,
        "set_stream": fake.streams.append,
        "stream": lambda _: nullcontext(),
        "mem_get_info": lambda _: (fake.free, 80 << 30),
        "synchronize": lambda _: None,
        "empty_cache": lambda: None,
        "graph_pool_handle": lambda: next(fake.pools),
        "CUDAGraph": lambda: SimpleNamespace(replay=fake.replay),
        "graph": fake.graph,
        "cudart": fake.cudart,
    }
    for name, value in surface.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda _: generator())
    monkeypatch.setattr(cuda.CudaDevice, "torch_device", place)
    for module in (cuda, cuda_pages):
        monkeypatch.setattr(module, "pinned", fake.pin)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: fake.is_pinned(tensor))
    return fake


@contextmanager
def fake_tensors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside this context new tensors have no content, except those made from the host's NumPy arrays."""

    def real(function: Any) -> Any:
        def called(argument: Any) -> Any:
            with unset_fake_temporarily():
                return function(argument)

        return called

    monkeypatch.setattr(torch, "from_numpy", real(torch.from_numpy))
    monkeypatch.setattr(torch.Tensor, "numpy", real(torch.Tensor.numpy))
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield
