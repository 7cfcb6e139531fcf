"""The token that docs/protocol.md defines as the sampled one, and its margin to the next choice."""

from __future__ import annotations

import math
from typing import Any

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
WIDE = 1e-4
"""A choice with a margin above this does not depend on the order of float32 additions."""


def _splitmix64(x: int) -> int:
    z = (x + GOLDEN) & MASK
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
    return z ^ z >> 31


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that decides the token at a position."""
    return float(_splitmix64((seed + position * GOLDEN) & MASK) >> 11) / 2.0**53


def choose(top: list[tuple[float, int]], temperature: float, top_k: int, u: float) -> tuple[int, float]:
    """The token and its margin, from the most likely (log-probability, id) pairs, more than `top_k` of them.

    Greedy margins are differences of log-probabilities, sampled ones of probabilities.
    """
    if temperature == 0:
        return top[0][1], top[0][0] - top[1][0]
    kept = sorted((token, math.exp((logprob - top[0][0]) / temperature)) for logprob, token in top[:top_k])
    mass = sum(weight for _, weight in kept)
    margin = top[top_k - 1][0] - top[top_k][0]
    chosen, reached = None, 0.0
    for token, weight in kept:
        reached += weight / mass
        # The last boundary is 1 whatever the rounding, and u is below 1.
        if token != kept[-1][0]:
            margin = min(margin, abs(reached - u))
        if chosen is None and (reached > u or token == kept[-1][0]):
            chosen = token
    assert chosen is not None
    return chosen, margin


def narrowest(request: dict[str, Any], answer: dict[str, Any]) -> float:
    """The smallest margin in the answer to a `/generate` request that asked for `top_logprobs_num` > `top_k`.

    Fails if a token with a wide margin is not the one that the protocol defines.
    """
    params = request["sampling_params"]
    smallest = math.inf
    tops = answer["meta_info"]["output_top_logprobs"]
    for index, (token, top) in enumerate(zip(answer["output_ids"], tops, strict=True)):
        u = uniform(params.get("seed", 0), len(request["input_ids"]) + index)
        pairs = [(logprob, candidate) for logprob, candidate, _ in top]
        chosen, margin = choose(pairs, params["temperature"], params.get("top_k", 0), u)
        assert margin < WIDE or chosen == token, f"token {index}: {token} was sampled and not {chosen}"
        smallest = min(smallest, margin)
    return smallest
