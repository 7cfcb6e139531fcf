"""Recurrent layers of models in Transformers' code, and the states of slots."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from forebay.attention.states import StatePiece
from forebay.weights.errors import UnsupportedModelError

__all__ = ["CacheStates", "RecurrentLayers", "StateRow"]

_CACHES = ("cache_params", "past_key_values", "past_key_value", "cache")
"""Names of the argument with which recurrent modules receive their states."""
_OF_BATCHES = ("attention_mask", "seq_idx")
"""Arguments for padding and for packed rows, which are not needed for a single row."""
_OF_TOKENS = ("position_ids",)
"""Arguments whose last dimension is the tokens: each row gets its slice."""
_ROUNDING = 0.1
"""The relative difference of outputs that is allowed for bfloat16 and another order of summation. A lost state changes
most outputs by more.
"""
_UPDATES_STATE = re.compile(r"\.update_(conv|recurrent)_state\b")


@dataclass(frozen=True)
class StateRow:
    """Tokens of a step that advance one cache object."""

    first: int
    """The index of the first token in the step."""
    count: int
    cache: Any
    source: Any = None
    """The cache object whose states are first copied to `cache`; None: `cache` already has the right states."""


class CacheStates:
    """A cache object for each row of the tables of states (`forebay.state.recurrent.StateStore`)."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._rows: dict[int, Any] = {}

    def copy(self, rows: npt.NDArray[np.int64]) -> None:
        """Copies rows: `rows` [n, 2] are pairs of source and target."""
        self._rows |= {target: copy.deepcopy(self._rows[source]) for source, target in rows.tolist()}

    def clear(self, rows: npt.NDArray[np.int64]) -> None:
        """Resets rows [n] to the state before the first position."""
        self._rows |= {row: self._make() for row in rows.tolist()}

    def step(self, pieces: Iterable[StatePiece]) -> list[StateRow]:
        """Returns the rows of a step, whose tokens will advance the states of the cache objects."""
        return [self._of_piece(piece) for piece in pieces]

    def _of_piece(self, piece: StatePiece) -> StateRow:
        state = self._rows[piece.source]
        if piece.source == piece.target:
            return StateRow(piece.first, piece.length, state)
        ahead = copy.copy(state)
        ahead.layers = list(state.layers)
        self._rows[piece.target] = ahead
        return StateRow(piece.first, piece.length, ahead, state)


class RecurrentLayers:
    """The modules of a model with a recurrent or convolution state. They are run once per row of a step."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.rows: list[StateRow] = []
        """The rows of the step, in the order of their tokens."""
        self.pieces: list[StateRow] = []
        """The same tokens in other chunks, whose outputs must be equal; empty: nothing is compared."""
        ours = [module for module in model.modules() if ".models." in type(module).__module__]
        self.modules = [module for module in ours if _updates_state(type(module))]
        for module in self.modules:
            if any(inner in self.modules for inner in module.modules() if inner is not module):
                raise UnsupportedModelError(f"{type(module).__name__} keeps a state, and a part of it does too")
            names = inspect.signature(type(module).forward).parameters
            cache = next((name for name in _CACHES if name in names), None)
            if cache is None or not hasattr(module, "layer_idx"):
                raise UnsupportedModelError(f"{type(module).__name__} takes no cache for its state")
            module.forward = self._by_row(module, module.forward, cache)

    def _by_row(self, module: Any, forward: Callable[..., Any], cache: str) -> Callable[..., Any]:
        layer = int(module.layer_idx)

        def run(hidden_states: torch.Tensor, *args: Any, **named: Any) -> Any:
            named = {key: value for key, value in named.items() if key not in (*_OF_BATCHES, *_CACHES)}
            positions = {key: named.pop(key) for key in _OF_TOKENS if named.get(key) is not None}
            _check_arguments(type(module).__name__, hidden_states, args, named)

            def compute(row: StateRow) -> Any:
                if row.source is not None:
                    row.cache.layers[layer : layer + 1] = [copy.deepcopy(row.source.layers[layer])]
                own = slice(row.first, row.first + row.count)
                of_row = {key: value[..., own] for key, value in positions.items()}
                return forward(hidden_states[:, own], **{**named, **of_row, cache: row.cache})

            parts = list(map(compute, self.rows))
            outputs = _joined(parts)
            if self.pieces:
                _compare(type(module).__name__, outputs, _joined(list(map(compute, self.pieces))))
            return (outputs, *parts[0][1:]) if isinstance(parts[0], tuple) else outputs

        return run


def _joined(parts: list[Any]) -> torch.Tensor:
    return torch.cat([part[0] if isinstance(part, tuple) else part for part in parts], dim=1)


def _compare(name: str, whole: torch.Tensor, pieces: torch.Tensor) -> None:
    """Raises `UnsupportedModelError` if outputs in chunks differ from the whole row's by more than rounding."""
    whole, pieces = whole.float(), pieces.float()
    if (whole - pieces).norm() > _ROUNDING * whole.norm():
        raise UnsupportedModelError(f"{name} can't continue from its state with several tokens")


def _updates_state(kind: type) -> bool:
    """True if the class or a base class updates a state."""
    own = [one for one in kind.__mro__ if ".models." in one.__module__]
    return any(_UPDATES_STATE.search(inspect.getsource(one)) for one in own)


def _check_arguments(name: str, hidden_states: torch.Tensor, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Raises `UnsupportedModelError` for arguments with one element per token: each row would get all of them."""
    if any(arg is not None for arg in args):
        raise UnsupportedModelError(f"{name} keeps a state and takes positional arguments, which is not supported")
    tokens = hidden_states.shape[1]
    for key, value in named.items():
        tensors = [one for one in (value if isinstance(value, tuple) else (value,)) if isinstance(one, torch.Tensor)]
        if any(tokens > 1 and tokens in one.shape for one in tensors):
            raise UnsupportedModelError(f"{name} keeps a state, and takes {key} for each token")
