"""The relation of a rank to the other ranks of its group."""

from __future__ import annotations

from forebay.distributed.exchange import Exchange
from forebay.distributed.group import Group
from forebay.layers.ranks import Ranks
from forebay.state.config import RunnerConfig

__all__ = ["roles"]


def roles(config: RunnerConfig, group: Group | None) -> tuple[Ranks | None, Exchange | None]:
    """Returns the ranks that divide the whole model, and the exchange between ranks with separate tokens.

    At most one of them is not None; without other ranks both are None.
    """
    if group is None:
        return None, None
    if config.step_group:
        return None, Exchange(group)
    return Ranks(group, config.expert_parallel), None
