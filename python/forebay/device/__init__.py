"""The device that computes a step, and memory for it."""

from __future__ import annotations

from forebay.device.interface import Device, DeviceError, Event, Work, host_array

__all__ = ["Device", "DeviceError", "Event", "Work", "host_array", "open_device"]


def open_device(name: str, threads: int | None) -> Device:
    """Opens the device called `name`. `threads`: the number of a CPU's compute threads; None: OpenMP's default.

    Raises `DeviceError` if there is no such device, or it can't be used.
    """
    if name == "cpu":
        from forebay.device.cpu import CpuDevice

        return CpuDevice(threads)
    if name == "deferred":
        from forebay.device.deferred import DeferredDevice

        return DeferredDevice(threads)
    if name == "cuda":
        from forebay.device.cuda import CudaDevice

        return CudaDevice()
    raise DeviceError(f"device {name!r} is not supported: use cpu or cuda")
