"""A forward pass of a few tokens without weights, which finds out what a model in Transformers' code requires."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from forebay.attention.backend import How
from forebay.models.called import body_of, cache_of, config_of, made_of
from forebay.models.checks import CheckedAttention, WatchedPositions
from forebay.models.recurrent import RecurrentLayers, StateRow
from forebay.models.rotary import settle_rotary
from forebay.weights.called import Calls, KeptShape
from forebay.weights.errors import UnsupportedModelError

__all__ = ["probe"]

_META = torch.device("meta")
_TOKENS = 7
"""The number of tokens of the forward pass. It differs from all sizes in a model."""
_MOST_POSITIONS = (1 << 31) - 1
_UNBOUNDED_CONTEXT = 32768
"""The context length of models whose configuration does not state one, such as recurrent ones."""


class OnlyUpdates:
    """The cache object of a probe.

    A model that uses more of the cache interface keeps state that does not fit into pages and slots.
    """

    is_compileable = False

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the keys and values unchanged."""
        return keys, values

    def get_seq_length(self, *_: Any) -> int:
        """Returns 0: the cache is empty."""
        return 0

    def get_query_offset(self, *_: Any) -> int:
        """Returns the first position, for masks."""
        return 0

    def get_mask_sizes(self, query_length: int, *_: Any) -> tuple[int, int]:
        """Returns the number of keys and the index of the first key, for masks."""
        return query_length, 0


def probe(directory: Path) -> Calls:
    """Probes the model in a folder. Raises `UnsupportedModelError` with the reason if it can't be served."""
    config = config_of(directory)
    # With a padding id, some code reads the values of tokens, which do not exist on the meta device.
    config.pad_token_id = None
    attention = CheckedAttention()
    model = made_of(config, attention.name, torch.bfloat16, _META)
    _check_name(config, type(model).__name__)
    recurrent, cache = RecurrentLayers(model), cache_of(model)
    recurrent.rows = [StateRow(0, _TOKENS, cache)]
    kept: list[KeptShape] = []

    def answer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: How) -> torch.Tensor:
        kept.append(KeptShape(k.shape[1], k.shape[2], v.shape[2]))
        return q.new_empty(len(q), q.shape[1] * v.shape[2])

    text = config.get_text_config()
    longest = min(int(getattr(text, "max_position_embeddings", None) or _UNBOUNDED_CONTEXT), _MOST_POSITIONS)
    settle_rotary(model, longest)
    ids = torch.zeros(1, _TOKENS, dtype=torch.long, device=_META)
    positions = torch.arange(_TOKENS, device=_META)[None]
    watched = WatchedPositions(positions)
    try:
        with torch.no_grad(), attention.answered_by(answer), watched:
            body_of(model)(input_ids=ids, position_ids=positions, use_cache=False, past_key_values=OnlyUpdates())
    except UnsupportedModelError:
        raise
    except (AttributeError, TypeError, ValueError, NotImplementedError, RuntimeError, KeyError) as error:
        why = " ".join(str(error).split())[:200]
        raise UnsupportedModelError(
            f"the code of {config.model_type} needs more than attention and states provide: "
            f"{type(error).__name__}: {why}"
        ) from error
    if not kept and not recurrent.modules:
        raise UnsupportedModelError(
            f"the code of {config.model_type} has an attention of its own, which can't be replaced"
        )
    if kept:
        watched.check(config.model_type)
    return Calls(
        kept=tuple(kept),
        uses=tuple(sorted(attention.uses)),
        state_bytes=_bytes_of(cache) if recurrent.modules else 0,
        vocab_size=int(text.vocab_size),
        hidden_size=int(text.hidden_size),
        longest_context=longest,
    )


def _check_name(config: Any, made: str) -> None:
    """Raises `UnsupportedModelError` if Transformers builds a different architecture than the configuration names."""
    names = [str(name) for name in config.architectures or []]
    if names and _stem(made) not in map(_stem, names):
        raise UnsupportedModelError(
            f"the config names {', '.join(names)}, and its model_type {config.model_type} is that of {made}"
        )


def _stem(name: str) -> str:
    """Returns the name of an architecture without its task."""
    return name.partition("For")[0].removesuffix("Model")


def _bytes_of(cache: Any) -> int:
    """Returns the bytes of the tensors of a cache object."""
    return sum(tensor.nbytes for layer in cache.layers for value in vars(layer).values() for tensor in _tensors(value))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
