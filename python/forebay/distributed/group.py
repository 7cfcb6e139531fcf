"""The group of a replica's ranks: sums and gathers over `torch.distributed`.

All ranks call the same methods in the same order, with tensors of the same shape and type. They compute the same plan,
so they need no agreement. `all_gather` returns the same bytes on every rank, so each makes the same decisions from
them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Protocol

import torch
import torch.distributed as dist

from forebay.distributed.store import BrainStore

ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_PROPAGATE_ERROR": "0",
    }
)
"""Turns NCCL's watchdogs off: the brain kills a group that hangs, and starts a new one."""
FOREVER = timedelta(days=365)


class Group(Protocol):
    """The interface through which layers use the other ranks."""

    @property
    def rank(self) -> int:
        """The index of this rank."""

    @property
    def world(self) -> int:
        """The number of ranks."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums the tensors of all ranks in place: `x` is contiguous, and is returned."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the tensors [...] of all ranks, in rank order: [world, ...]."""

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Sums the tensors [world * n, ...] of all ranks. Returns this rank's part [n, ...] of the sum."""

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Returns this rank's parts of the tensors [world * n, ...] of all ranks, in rank order: [world * n, ...]."""

    def least(self, number: int) -> int:
        """Returns the minimum over all ranks. It waits for the device, so steps must not call it."""


class TorchGroup:
    """Implements `Group` with the collectives of `torch.distributed` on tensors of `device`."""

    def __init__(self, rank: int, world: int, device: torch.device) -> None:
        """The default process group of `torch.distributed` has to exist."""
        self.rank = rank
        self.world = world
        self._device = device

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        # Flat, as gloo requires.
        gathered = x.new_empty(self.world * x.numel())
        dist.all_gather_into_tensor(gathered, x.contiguous().view(-1))
        return gathered.view(self.world, *x.shape)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        part = x.new_empty(len(x) // self.world, *x.shape[1:])
        dist.reduce_scatter_tensor(part, x.contiguous())
        return part

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous())
        return received

    def least(self, number: int) -> int:
        return int(self.all_gather(torch.tensor([number], device=self._device)).min())


class StagedGroup:
    """Implements `Group` through host memory, for ranks that share a GPU, which NCCL does not support.

    It waits for the device.
    """

    def __init__(self, inner: TorchGroup) -> None:
        self._inner = inner
        self.rank = inner.rank
        self.world = inner.world

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self._inner.all_reduce(x.cpu()))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._inner.all_gather(x.cpu()).to(x.device)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return self._inner.reduce_scatter(x.cpu()).to(x.device)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        return self._inner.all_to_all(x.cpu()).to(x.device)

    def least(self, number: int) -> int:
        return self._inner.least(number)


def open_group(store: BrainStore, rank: int, world: int, device: torch.device) -> Group:
    """Connects to the other ranks. On return, all communicators exist and were used once, and the store is closed.

    CUDA tensors use NCCL, and CPU tensors use gloo.
    """
    host = torch.device("cpu")
    try:
        if device.type != "cuda" or _share_a_gpu(store, rank, world, device):
            _open(store, "gloo", rank, world, None)
            group = TorchGroup(rank, world, host)
            return _used(group, host) if device.type != "cuda" else _used(StagedGroup(group), device)
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        _open(store, "nccl", rank, world, device)
        return _used(TorchGroup(rank, world, device), device)
    except Exception:
        if store.failure is not None:
            raise store.failure from None
        raise
    finally:
        store.close()


def _open(store: BrainStore, backend: str, rank: int, world: int, device: torch.device | None) -> None:
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=FOREVER, device_id=device)


def _share_a_gpu(store: BrainStore, rank: int, world: int, device: torch.device) -> bool:
    """True if two ranks share a GPU, as in tests."""
    store.set(f"gpu/{rank}", str(torch.cuda.get_device_properties(device).uuid))
    return len({store.get(f"gpu/{number}") for number in range(world)}) < world


def _used(group: Group, device: torch.device) -> Group:
    """Returns the group after each of its collectives has run once."""
    x = torch.ones(group.world, device=device)
    for collective in (group.all_reduce, group.all_gather, group.reduce_scatter, group.all_to_all):
        collective(x.clone())
    group.least(0)
    return group
