"""The roles of a group's other ranks in a rank's model."""

from __future__ import annotations

from forebay.distributed.exchange import Exchange
from forebay.distributed.group import Group
from forebay.layers.ranks import Ranks
from forebay.state.config import RunnerConfig

__all__ = ["roles"]


def roles(config: RunnerConfig, group: Group | None) -> tuple[Ranks | None, Exchange | None]:
    """The ranks among which everything is divided, and the exchange of those that have tokens of their own.

    One of them at most: both are None where there are no other ranks.
    """
    if group is None:
        return None, None
    if config.step_group:
        return None, Exchange(group)
    return Ranks(group, config.expert_parallel), None
