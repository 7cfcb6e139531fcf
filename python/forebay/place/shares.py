"""The division of a server's hands into bundles. A cluster places each bundle on one node."""

from __future__ import annotations


def shares(replicas: int, ranks: int, largest: int, apart: bool) -> list[int]:
    """Returns the number of hands of each bundle. A replica's ranks share a bundle, if a node has room for them.

    If no node has room and `apart` is true, each replica is spread over as few nodes as possible.

    Args:
        replicas: The number of replicas.
        ranks: The number of hands of each replica.
        largest: The most hands that a node of the cluster has devices for; 0 if that is not known.
        apart: True if the ranks of a replica may be on several nodes.
    """
    if not apart or largest <= 0 or ranks <= largest:
        return [ranks] * replicas
    whole, rest = divmod(ranks, largest)
    return ([largest] * whole + [rest] * (rest > 0)) * replicas


def bundle(hands: int, cuda: bool) -> dict[str, float]:
    """Returns a node's resources for this many hands: one GPU per hand and one CPU in total, or one CPU per hand."""
    return {"GPU": float(hands), "CPU": 1.0} if cuda else {"CPU": float(hands)}
