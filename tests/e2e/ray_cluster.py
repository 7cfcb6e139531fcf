"""A Ray cluster of small nodes on this machine, run by an interpreter that has Ray.

Each line on stdin is a command, and its answer is a line of JSON on stdout. The cluster stops when stdin is closed.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

STORE_BYTES = 80 << 20
"""Ray requires at least 75 MiB for each node. The store stays empty."""
HEAD = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": STORE_BYTES}


def main() -> None:
    """Starts the cluster and executes commands."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    cluster = Cluster(initialize_head=True, head_node_args={**HEAD, "include_dashboard": False}, shutdown_at_exit=True)
    nodes = []

    def obey(order: str) -> Any:
        if order == "address":
            return cluster.address
        if order == "add":
            nodes.append(cluster.add_node(**HEAD))
        elif order == "remove":
            cluster.remove_node(nodes.pop(), allow_graceful=False)
        elif order == "groups":
            return [group["state"] for group in placement_group_table().values()]
        elif order == "actors":
            return [actor["State"] for actor in ray._private.state.actors().values()]
        return None

    try:
        ray.init(address=cluster.address, log_to_driver=False)
        for line in sys.stdin:
            print(json.dumps(obey(line.strip())), file=answers, flush=True)
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
