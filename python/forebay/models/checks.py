"""Comparisons of a model's own results with those computed from the options of its attention calls.

If a call omitted an option, the text would silently be wrong. So a probe compares masks, scores and positions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from forebay.attention.backend import How
from forebay.attention.masked import masked_attention, positions_mask
from forebay.models.called import CalledAttention
from forebay.weights.errors import UnsupportedModelError

__all__ = ["CheckedAttention", "WatchedPositions"]

_FAR = 1 << 15
"""A position beyond most windows."""
_TOKENS = 5
"""The number of tokens whose scores are compared."""
_CLOSE = 1e-4


class CheckedAttention(CalledAttention):
    """The attention of a probe.

    Raises `UnsupportedModelError` for a call that omits an option which the model's own code uses.
    """

    def __init__(self) -> None:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        super().__init__()
        self._masks = ALL_MASK_ATTENTION_FUNCTIONS
        self._masks.register(self.name, _mask)
        self._compared: list[tuple[Callable[..., torch.Tensor], int | None, int | None]] = []

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **given: Any,
    ) -> tuple[torch.Tensor, None]:
        sees = getattr(attention_mask, "sees", None)
        how = self._read(module, None if sees else attention_mask, given)
        # Layers share masks, so each mask is compared once.
        if sees is not None and (sees, how.window, how.chunk) not in self._compared:
            _check_mask(type(module).__name__, sees, how)
            self._compared.append((sees, how.window, how.chunk))
        out = super()._attend(module, query, key, value, None, **given)
        _check_scores(module, query, key, value, how, given)
        return out


class _Mask(torch.Tensor):
    """A placeholder for a mask that the model's code creates."""

    sees: Callable[..., torch.Tensor] | None = None
    """Computes whether a query attends to a key, given their positions; None: the code has changed the mask."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        part = super().__getitem__(index)
        if part.shape == self.shape and isinstance(part, _Mask):
            part.sees = self.sees
        return part


def _mask(*, q_length: int, kv_length: int, mask_function: Callable[..., torch.Tensor], **_: Any) -> torch.Tensor:
    mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool, device="meta").as_subclass(_Mask)
    mask.sees = mask_function
    return mask


class _WithValues(TorchFunctionMode):
    """A mode that replaces tensors without values by zeros."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*map(_valued, args), **{key: _valued(value) for key, value in (kwargs or {}).items()})


def _valued(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_meta:
        return torch.zeros(value.shape, dtype=value.dtype)
    return tuple(map(_valued, value)) if isinstance(value, tuple) else value


def _check_mask(name: str, sees: Callable[..., torch.Tensor], how: How) -> None:
    edges = [edge for edge in (how.window, how.chunk) if edge is not None]
    places = {0, 1, 2, _FAR, *(1 << power for power in range(2, 15))}
    places |= {edge + more for edge in edges for more in (-2, -1, 0, 1)} | {2 * edge for edge in edges}
    queries = torch.tensor(sorted(place for place in places if place >= 0))
    keys = torch.arange(int(queries[-1]) + 1)
    none = torch.zeros(1, 1, 1, 1, dtype=torch.long)
    try:
        with _WithValues():
            theirs = sees(none, none, queries[None, None, :, None], keys[None, None, None])
    except (RuntimeError, TypeError, IndexError, ValueError) as error:
        raise UnsupportedModelError(f"{name} makes a mask of more than positions: {error}") from error
    if not torch.equal(theirs.expand(1, 1, len(queries), len(keys))[0, 0], positions_mask(queries, keys, how)):
        said = f"window {how.window}" if how.chunk is None else f"chunks of {how.chunk}"
        raise UnsupportedModelError(
            f"{name} uses an attention mask that its call of attention does not describe: the call has {said}"
        )


class _Module:
    """A wrapper of a module for its attention code. Its tensors have values."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return _values(getattr(self._module, name))


def _values(value: Any) -> Any:
    """Returns `value`, but replaces a tensor by one with values. Tensors of equal size get equal values."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.linspace(-1.5, 1.5, value.numel()).view(value.shape)


def _check_scores(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    how: How,
    given: Mapping[str, Any],
) -> None:
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if own is None:
        return
    name = type(module).__name__
    random = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, one.shape[1], _TOKENS, one.shape[3], generator=random) for one in (query, key, value))
    at = torch.arange(_TOKENS)
    mask = positions_mask(at, at, how)
    additive = torch.zeros(1, 1, _TOKENS, _TOKENS).masked_fill(~mask, torch.finfo(torch.float32).min)
    arguments = {key: _values(value) for key, value in given.items()}
    try:
        found = own(_Module(module), q, k, v, additive, **arguments)[0].transpose(1, 2)
    except (RuntimeError, TypeError, AttributeError, ValueError) as error:
        raise UnsupportedModelError(f"the attention of {name} can't be compared with its own code: {error}") from error
    how = How(how.scale, how.window, how.chunk, how.cap, _values(how.sinks))
    if not torch.allclose(found, masked_attention(q, k, v, mask, how), atol=_CLOSE):
        raise UnsupportedModelError(
            f"the code of {name} computes something that its call of attention does not describe"
        )


class WatchedPositions(TorchFunctionMode):
    """Detects whether code reads the positions that it is given, or computes positions itself."""

    def __init__(self, positions: torch.Tensor) -> None:
        super().__init__()
        self._positions = positions
        self.are_read = False
        self.are_made = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name != "__get__" and any(one is self._positions for one in (*args, *(kwargs or {}).values())):
            self.are_read = True
        if name in ("arange", "cumsum") and out.shape[-1:] == self._positions.shape[-1:]:
            self.are_made = True
        return out

    def check(self, name: str) -> None:
        """Raises `UnsupportedModelError` if the code computes positions itself: in a packed step they are wrong."""
        if self.are_made and not self.are_read:
            raise UnsupportedModelError(f"the code of {name} numbers its tokens itself, and takes no positions")
