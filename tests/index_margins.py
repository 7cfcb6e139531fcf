"""The scores from which a transformers model's indexers choose, and the margin of each choice.

If scores are equal or nearly so, the order of additions decides, and there is no right choice to compare with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch


@contextmanager
def watched(top_k: int, rule: Callable[..., Any] | None = None) -> Iterator[list[torch.Tensor]]:
    """Collects the scores [queries, positions] that indexers choose from. `rule` replaces their choice."""
    seen: list[torch.Tensor] = []
    topk = torch.Tensor.topk

    def watch(scores: torch.Tensor, k: int, **options: Any) -> Any:
        is_index = scores.ndim == 3 and scores.shape[1] == scores.shape[2] and k == min(top_k, scores.shape[2])
        if is_index:
            seen.append(scores[0].clone())
        return (rule if is_index and rule else topk)(scores, k, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "topk", watch)
        yield seen


def lower_positions(scores: torch.Tensor, k: int, dim: int) -> Any:
    """A rule: of equal scores those at lower positions."""
    values, indices = scores.sort(dim=dim, descending=True, stable=True)
    return torch.return_types.topk((values[..., :k], indices[..., :k]))


def margins(scores: torch.Tensor, top_k: int) -> list[float]:
    """For each query that does not keep all positions, the lowest score that is kept minus the highest that is not."""
    ranked = [row[: query + 1].sort(descending=True).values for query, row in enumerate(scores)]
    return [float(row[top_k - 1] - row[top_k]) for row in ranked if len(row) > top_k]


def margins_along(model: Any, tokens: Sequence[int]) -> list[float]:
    """The margins of all queries of all indexers of a model, for a text. Empty if the model has no indexers."""
    top_k = getattr(model.config, "index_topk", None)
    if top_k is None:
        return []
    with watched(top_k) as seen, torch.inference_mode():
        model(input_ids=torch.tensor([list(tokens)]))
    assert seen
    return [margin for scores in seen for margin in margins(scores, top_k)]
