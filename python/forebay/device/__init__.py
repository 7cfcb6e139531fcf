"""What a step is computed on, and memory for it."""

from __future__ import annotations

from forebay.device.interface import Device, Event, Work, host_array

__all__ = ["Device", "Event", "Work", "host_array", "open_device"]


def open_device(name: str, threads: int | None) -> Device:
    """The device called `name`; `threads` is the number of compute threads of a CPU (None: one a physical core)."""
    if name == "cpu":
        from forebay.device.cpu import CpuDevice

        return CpuDevice(threads)
    if name == "deferred":
        from forebay.device.deferred import DeferredDevice

        return DeferredDevice(threads)
    raise ValueError(f"device {name!r} is not supported: use cpu")
