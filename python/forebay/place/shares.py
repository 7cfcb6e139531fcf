"""The division of a server's hands into bundles. A cluster places each bundle on one node."""

from __future__ import annotations


def shares(replicas: int, ranks: int, largest: int, apart: bool) -> list[int]:
    """The number of hands of each bundle. The ranks of a replica are together, if a node has room for them.

    If no node has, and ranks may be `apart`, each replica is spread over as few nodes as possible.

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
    """A node's resources for this many hands: a GPU each and a processor for all, or a processor each."""
    return {"GPU": float(hands), "CPU": 1.0} if cuda else {"CPU": float(hands)}
