"""Checks whether several ranks can compute a model."""

from __future__ import annotations

from forebay.weights.config import ModelConfig
from forebay.weights.encoder_config import EncoderConfig
from forebay.weights.parts import Dense, Experts, GroupedQuery

__all__ = ["why_not_group", "why_not_ranks"]


def why_not_ranks(model: ModelConfig | EncoderConfig, world: int, expert_parallel: bool) -> str | None:
    """Returns the reason why this many ranks can't compute a model together, as a sentence; None: they can.

    With `expert_parallel` each rank has some of the experts. Otherwise each rank has a part of every expert.
    """
    if isinstance(model, EncoderConfig):
        return f"{model.architecture} is an encoder, which one rank computes: use replicas (--dp-size)"
    return _why_not_kind(model) or _why_not_attention(model, world) or _why_not_feeds(model, world, expert_parallel)


def why_not_group(model: ModelConfig | EncoderConfig, world: int) -> str | None:
    """Returns the reason why ranks can't share a model's experts and nothing else, as a sentence; None: they can."""
    experts = [] if isinstance(model, EncoderConfig) else [feed for feed in model.feeds if isinstance(feed, Experts)]
    if isinstance(model, EncoderConfig) or not experts:
        return f"{model.architecture} has no experts that ranks could share: use replicas (--dp-size alone)"
    for count in sorted({feed.count for feed in experts}):
        if count % world:
            return f"{count} experts can't be divided among {world} ranks: {_fewer(world, count)}"
    return _why_not_kind(model)


def _why_not_kind(model: ModelConfig) -> str | None:
    if model.headless:
        return "a model that pools is computed by one rank: use replicas (--dp-size)"
    if model.vision is not None:
        return f"{model.architecture} has a tower for images, which is not split over ranks: use replicas (--dp-size)"
    if any(isinstance(feed, Experts) and feed.bias for feed in model.feeds):
        return f"{model.architecture} has experts with biases, which are not split over ranks: use replicas (--dp-size)"
    if model.recurrent:
        return f"{model.architecture} has recurrent layers, which are not split over ranks: use replicas (--dp-size)"
    if model.attends or None in model.feeds:
        return f"{model.architecture} has layers of one part, which are not split over ranks: use replicas (--dp-size)"
    return None


def _why_not_attention(model: ModelConfig, world: int) -> str | None:
    attention = model.attention
    if attention.heads % world:
        return f"{attention.heads} query heads can't be split over {world} ranks: {_fewer(world, attention.heads)}"
    if isinstance(attention, GroupedQuery) and attention.kv_heads % world and world % attention.kv_heads:
        return (
            f"{attention.kv_heads} key-value heads and {world} ranks: one number has to divide the other; "
            f"{_fewer(world, attention.heads, attention.kv_heads)}"
        )
    if model.vocab_size < world:
        return f"a vocabulary of {model.vocab_size} tokens can't be split over {world} ranks: use fewer"
    return None


def _why_not_feeds(model: ModelConfig, world: int, expert_parallel: bool) -> str | None:
    sizes: dict[str, set[int]] = {}
    experts = False
    for feed in model.feeds:
        if feed is None:
            continue
        if isinstance(feed, Dense):
            sizes.setdefault("an intermediate size of", set()).add(feed.intermediate_size)
            continue
        experts = True
        if expert_parallel:
            sizes.setdefault("experts whose number is", set()).add(feed.count)
        else:
            sizes.setdefault("experts with an intermediate size of", set()).add(feed.intermediate_size)
        sizes.setdefault("shared experts with an intermediate size of", set()).add(feed.shared_size)
    if expert_parallel and not experts:
        return f"{model.architecture} has no experts that ranks could have some of each: leave --ep-size off"
    for what, found in sizes.items():
        for size in sorted(found):
            if size % world:
                return f"{what} {size} can't be split over {world} ranks: {_fewer(world, size)}"
    return None


def _fewer(world: int, size: int, beside: int | None = None) -> str:
    """Returns advice: the largest number of ranks below `world` that divides a size."""
    fitting = (
        count
        for count in range(world - 1, 0, -1)
        if size % count == 0 and (beside is None or beside % count == 0 or count % beside == 0)
    )
    return f"use {next(fitting, 1)}"
