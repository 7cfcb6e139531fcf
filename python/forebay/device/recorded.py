"""A graph without a GPU: operators and their memory, which are recorded and replayed.

Like a CUDA graph, a recording repeats neither Python code nor decisions of the host, and it identifies memory by
address. Memory that it allocated is undefined before and after a replay. It does not keep any other memory alive: a
replay that reads memory which was freed raises `LostMemoryError`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_GARBAGE = 0x5C


class LostMemoryError(RuntimeError):
    """A replay uses memory that was freed since the capture."""


@dataclass(frozen=True)
class _Outside:
    """A tensor in memory that the graph did not allocate."""

    storage: StorageWeakRef
    address: int
    """The address of the memory, not of the first element."""
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Outside:
        storage = tensor.untyped_storage()
        return cls(
            storage=StorageWeakRef(storage),
            address=storage.data_ptr(),
            nbytes=storage.nbytes(),
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            strides=tuple(tensor.stride()),
            offset=int(tensor.storage_offset()),
        )

    def tensor(self, operator: object) -> torch.Tensor:
        if not self.nbytes:
            # The tensor has no elements, so there is nothing to read, even if the graph itself allocated it.
            return torch.empty(self.shape, dtype=self.dtype)
        if self.storage.expired():
            raise LostMemoryError(f"{operator} of a graph uses memory that is gone: {self.dtype} {list(self.shape)}")
        memory = (ctypes.c_uint8 * self.nbytes).from_address(self.address)
        flat = torch.frombuffer(memory, dtype=torch.uint8).view(self.dtype)
        return flat.as_strided(self.shape, self.strides, self.offset)


@dataclass(frozen=True)
class _Call:
    """A recorded operator call. Arguments that are `_Outside` are looked up in each replay."""

    operator: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: Sequence[torch.Tensor]
    """The results that do not share memory with an argument."""

    def repeat(self) -> None:
        def found(leaf: Any) -> Any:
            return leaf.tensor(self.operator) if isinstance(leaf, _Outside) else leaf

        given = self.operator(*tree_map(found, self.args), **tree_map(found, self.kwargs))
        for to, result in zip(self.made, _alone(given, self.args, self.kwargs), strict=True):
            to.copy_(result)


class Recording(TorchDispatchMode):
    """Records a function's operators, to replay them later."""

    def __init__(self, work: Callable[[], object]) -> None:
        """Calls `work` once."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[_Call] = []
        self._made: dict[int, torch.Tensor] = {}
        """The memory that the recording allocated, as bytes by address."""
        with self:
            work()
        self._spoil()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # See `watch._Mode`.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)

        def known(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.untyped_storage().data_ptr() in self._made:
                return leaf
            return _Outside.of(leaf)

        kept = tree_map(known, args), tree_map(known, kwargs)
        made = _alone(result, args, kwargs)
        for tensor in made:
            self._keep(tensor)
        self._calls.append(_Call(func, *kept, made))
        return result

    def replay(self) -> None:
        """Runs the recorded operators again. Raises `LostMemoryError`."""
        self._spoil()
        for call in self._calls:
            call.repeat()
        self._spoil()

    def _keep(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            self._made[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage)

    def _spoil(self) -> None:
        for memory in self._made.values():
            memory.fill_(_GARBAGE)


def _alone(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Returns the results of an operator that share no memory with its arguments."""
    given = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor | _Outside)}
    return [
        leaf
        for leaf in tree_leaves(result)
        if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().nbytes() and _address(leaf) not in given
    ]


def _address(leaf: torch.Tensor | _Outside) -> int:
    return leaf.address if isinstance(leaf, _Outside) else leaf.untyped_storage().data_ptr()
