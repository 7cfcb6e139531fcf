"""The time of work on a device, without the time that the host takes to launch it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

Work = Callable[[], object]
CACHE = 256 << 20
"""More bytes than the caches of any card hold."""
MOST_COPIES = 32


def captured(work: Work, device: torch.device) -> Work:
    """Work as a graph, without the host's launch time. On devices without graphs, the work itself."""
    if device.type != "cuda":
        return work
    # Run once before the capture, so that libraries are initialized and kernels compiled.
    work()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def seconds(work: Work, device: torch.device, repeats: int = 10, warm: int = 2) -> float:
    """Seconds of one call: the median of `repeats`."""
    for _ in range(warm):
        work()
    if device.type != "cuda":
        return statistics.median(_by_the_host(work) for _ in range(repeats))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize(device)
    taken: list[float] = [before.elapsed_time(after) for before, after in pairwise(marks)]
    return statistics.median(taken) / 1e3


def host_seconds(work: Work, device: torch.device, repeats: int = 100) -> float:
    """Seconds that the host takes to launch work: the median of `repeats`. The device is idle before each."""
    times = []
    for _ in range(repeats):
        times.append(_by_the_host(work))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return statistics.median(times)


def _by_the_host(work: Work) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


@dataclass(frozen=True)
class Operator:
    """An operator to measure: run number i uses the i-th copy of its inputs."""

    name: str
    run: Callable[[int], object]
    copies: int
    bytes: float
    """Bytes that one run has to read and write."""
    flops: float = 0.0

    def seconds(self, device: torch.device) -> float:
        """Seconds of one run, whose inputs are in no cache."""

        def all_copies() -> None:
            for number in range(self.copies):
                self.run(number)

        return seconds(captured(all_copies, device), device, repeats=5) / self.copies


def copies_of(bytes_: float) -> int:
    """The number of copies of inputs, so that each copy has left the caches when it is used again."""
    return max(1, min(MOST_COPIES, math.ceil(CACHE / max(bytes_, 1))))
