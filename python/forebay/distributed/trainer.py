"""A rank in a trainer's process group, in a separate process: it writes the trainer's tensors to files.

The server starts it for `/init_weights_update_group`, and sends orders to its stdin, one line of JSON each. The process
replies to each order with one line on stdout: `{}`, or `{"error": "..."}`. Hands load the files later. So no hand is in
the group, and a hand that dies does not affect it.

- `{"join": {"address": ..., "port": ..., "rank": ..., "world_size": ..., "name": ..., "seconds": ...}}`
- `{"receive": {"names": [...], "dtypes": [...], "shapes": [[...], ...], "file": ...}}`

A trainer creates the same group with `join`, as rank 0, and sends each tensor with `torch.distributed.broadcast`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed import distributed_c10d as c10d

TRAINER = 0
"""The trainer's rank, which sends."""


def join(
    address: str, port: int, *, rank: int, world_size: int, name: str = "weight_update_group", seconds: float = 300
) -> dist.ProcessGroup:
    """Joins a gloo group and waits for all of its ranks, which connect to a port of rank 0.

    The group is created as in SGLang's `init_custom_process_group`, in addition to the group of the trainer's own
    ranks.
    """
    timeout = timedelta(seconds=seconds)
    # PyTorch has no public API for an additional group with its own rank numbers.
    private: Any = c10d
    meeting = private.rendezvous(f"tcp://{address}:{port}", rank, world_size, timeout=timeout)
    store, _, _ = next(iter(meeting))
    store.set_timeout(timeout)
    made = private._new_process_group_helper(
        world_size,
        rank,
        [],
        c10d.Backend("gloo"),
        c10d.PrefixStore(name, store),
        group_name=name,
        timeout=timeout,
    )
    group: dist.ProcessGroup = made[0]
    private._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


def receive(
    group: dist.ProcessGroup, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], file: str
) -> None:
    """Receives tensors from the trainer, in this order, and writes them to a safetensors file."""
    tensors = {}
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        kind = getattr(torch, dtype.removeprefix("torch."), None)
        if not isinstance(kind, torch.dtype):
            raise ValueError(f"{name} has the type {dtype!r}, which PyTorch does not have")
        tensors[name] = torch.empty(tuple(shape), dtype=kind)
    for tensor in tensors.values():
        dist.broadcast(tensor, src=TRAINER, group=group)
    save_file(tensors, file)


def _orders() -> SimpleQueue[dict[str, Any]]:
    """Returns the queue of orders. The process exits when stdin closes: the server has exited or dropped the group."""
    orders: SimpleQueue[dict[str, Any]] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            orders.put(json.loads(line))
        # The main thread may wait for a trainer that no longer exists.
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return orders


def main() -> None:
    """Executes orders until the input ends or an order fails: a group that lost a tensor can't be used any more."""
    torch.set_num_threads(1)
    orders, group = _orders(), None
    # Anything that libraries print to stdout goes to stderr instead: stdout is for replies only.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    while True:
        order = orders.get()
        try:
            if group is None:
                wanted = order["join"]
                group = join(wanted.pop("address"), wanted.pop("port"), **wanted)
            else:
                receive(group, **order["receive"])
        except Exception as error:
            # PyTorch's errors have a C++ trace after their first line.
            why = (str(error).splitlines() or [repr(error)])[0]
            print(json.dumps({"error": why}), file=answers, flush=True)
            return
        print("{}", file=answers, flush=True)


if __name__ == "__main__":
    main()
