"""The limits of a card, and the host's latency to it, with which all other numbers are compared."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu.clock import captured, host_seconds, seconds

SIDE = 8192
"""The side of the product's square matrices."""
COPY = "copy on the device"
PRODUCT = "product of {side} x {side} in bfloat16"
COPIED = 2 << 30
CROSSING = 256 << 20
EVENTS = "a launch, a replay and an event"


def measure(device: torch.device, scale: float = 1.0) -> dict[str, dict[str, Any]]:
    """Bandwidths in GB/s, arithmetic in TFLOP/s, and the host's microseconds. `scale` below 1 is for tests."""
    side = max(16, int(SIDE * scale))
    found = {
        COPY: {"gbps": _copy(device, max(1024, int(COPIED * scale**2)))},
        PRODUCT.format(side=side): {"tflops": _product(device, side)},
    }
    if device.type == "cuda":
        found |= _crossing(device, int(CROSSING * scale))
    return found | {EVENTS: _host(device)}


def _copy(device: torch.device, size: int) -> float:
    """The bytes that a copy on the device reads and writes, in 10^9 a second."""
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / seconds(lambda: target.copy_(source), device) / 1e9


def _product(device: torch.device, side: int) -> float:
    # Random data: zeros would be faster, because fewer bits switch.
    left, right = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(left)
    return 2 * side**3 / seconds(lambda: torch.mm(left, right, out=out), device) / 1e12


def _crossing(device: torch.device, size: int) -> dict[str, dict[str, Any]]:
    there = torch.empty(size, dtype=torch.uint8, device=device)
    here = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    ways = {
        "copy to the device": lambda: there.copy_(here, non_blocking=True),
        "copy to the host": lambda: here.copy_(there, non_blocking=True),
    }
    return {name: {"gbps": size / seconds(way, device) / 1e9} for name, way in ways.items()}


def _host(device: torch.device) -> dict[str, Any]:
    """The host's time to launch a kernel, and a graph of one. On a GPU also that of an event and a small copy to it."""
    x = torch.zeros(64, device=device)
    graph = captured(lambda: x.add_(1), device)
    found: dict[str, Any] = {
        "launch_us": 1e6 * host_seconds(lambda: x.add_(1), device),
        "replay_us": 1e6 * host_seconds(graph, device),
    }
    if device.type == "cuda":
        event, plan = torch.cuda.Event(enable_timing=True), torch.empty(4096, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(4096, dtype=torch.uint8, device=device)
        found["event_us"] = 1e6 * host_seconds(event.record, device)
        found["copy_us"] = 1e6 * host_seconds(lambda: there.copy_(plan, non_blocking=True), device)
    return found
