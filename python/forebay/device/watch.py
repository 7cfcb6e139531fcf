"""Modes that intercept every operator of a thread, to find host code that wrongly reads a tensor's value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_READS = {
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.cpu,
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
    torch.Tensor.__array__,
    torch.Tensor.__contains__,
}
"""Methods that copy a tensor's values to the host."""
_MAKES = {torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor, torch.Tensor.new_tensor}
"""Functions that copy host values to the device and wait for the copy."""
_aten = torch.ops.aten
_SHAPED_BY_VALUES = {
    _aten._local_scalar_dense,
    _aten.item,
    _aten.nonzero,
    _aten.nonzero_numpy,
    _aten.argwhere,
    _aten.masked_select,
    _aten.unique_consecutive,
    _aten.unique_dim,
    _aten._unique,
    _aten._unique2,
    _aten.bincount,
    _aten.equal,
    _aten.allclose,
    _aten.is_nonzero,
}
"""Operators for which the host has to read values, because their result or its shape depends on these values."""
_FROM_HOST = {
    _aten.where.Scalar,
    _aten.where.ScalarSelf,
    _aten.where.ScalarOther,
}
"""Variants of `where` that first copy a number to a tensor."""
_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}


class HiddenWaitError(RuntimeError):
    """Work makes the host wait for the device."""


class StrayOperatorError(RuntimeError):
    """An operator was called outside of queued work, so it would run before work that is already queued."""


class _Mode(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here. Without this override, a mode imports the whole compiler.
        return False


class NoOperators(_Mode):
    """A mode that rejects every operator, for code that prepares a step and may only use host arrays."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise StrayOperatorError(f"{func} was called outside of queued work")


class _NoReads(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READS or func in _MAKES:
            owner = "Tensor" if func in _READS else "torch"
            raise HiddenWaitError(f"{owner}.{getattr(func, '__name__', func)} in queued work")
        return func(*args, **(kwargs or {}))


class NoWaits(_Mode):
    """A mode that rejects operators which make the host wait for the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._reads = _NoReads()

    def __enter__(self) -> NoWaits:
        self._reads.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._reads.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        waits = packet in _SHAPED_BY_VALUES or func is _aten.where.default or func in _FROM_HOST
        if packet in _INDEXING:
            waits = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        if func in (_aten.repeat_interleave.Tensor, _aten.repeat_interleave.self_Tensor):
            waits = kwargs.get("output_size") is None
        if waits:
            raise HiddenWaitError(f"{func} in queued work")
        return func(*args, **kwargs)


class NoStrayCopies(_Mode):
    """A mode that rejects copies between host and accelerator which make the host wait.

    PyTorch's own check (`torch.cuda.set_sync_debug_mode`) finds blocking copies. It misses non-blocking copies that
    block nevertheless because the host memory is not pinned.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # `copy_` returns its first argument.
        told = (args, kwargs) if func is _aten.copy_.default else (args, kwargs, result)
        tensors = [leaf for leaf in tree_leaves(told) if isinstance(leaf, torch.Tensor)]
        # Operators accept a host number as a tensor without dimensions, and pass it to the kernel without a copy.
        # Tensors without elements need no copy either, although their memory is not pinned.
        ours = [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.dim() and tensor.numel()]
        if ours and len(ours) < len([tensor for tensor in tensors if tensor.dim()]):
            goes_on = args[2] if len(args) > 2 else (kwargs or {}).get("non_blocking")
            if func is not _aten.copy_.default or not goes_on or not all(tensor.is_pinned() for tensor in ours):
                raise HiddenWaitError(f"{func} between the host and the device, in memory that is not pinned")
        return result
