"""`python -m forebay.place.ray`: runs a brain's outposts in a Ray cluster until the brain exits.

The brain starts this process and exchanges lines of JSON with it. The process reads `Asked` from stdin. It writes to
stdout the address at which Ray's nodes reach this machine, or an error. Then it reads `Door` from stdin. The end of
stdin means that the brain has exited. Ray places outposts and reports lost ones. Plans and tensors do not go through
Ray.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import IO, Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from forebay.place.outpost import Order, Outpost
from forebay.place.shares import bundle, shares

LOOK_SECONDS = 0.5
"""Seconds between two checks of the outposts and the brain."""
PAUSE_SECONDS = 2.0
"""Seconds between the exit of an outpost and the start of its successor."""
LAST_SECONDS = 10.0
"""Seconds that Ray has to release everything after the brain has exited."""


@dataclass(frozen=True)
class Asked:
    """The brain's request for outposts."""

    replicas: int
    ranks: int
    cuda: bool
    apart: bool
    program: str


@dataclass(frozen=True)
class Door:
    """The address at which outposts join, and the token that they need."""

    join: str
    token: str


def say(line: str) -> None:
    """Writes a line to the brain's log."""
    print(f"ray: {line}", file=sys.stderr, flush=True)


class Seat:
    """One bundle of the placement group, and the outpost there."""

    def __init__(self, group: PlacementGroup, index: int, hands: int, asked: Asked, door: Door) -> None:
        name = f"ray-{index}"
        self._order = Order(program=asked.program, join=door.join, token=door.token, name=name, hands=hands)
        wants = bundle(hands, asked.cuda)
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        self._options = {
            "num_cpus": wants["CPU"],
            "num_gpus": wants.get("GPU", 0.0),
            "scheduling_strategy": place,
            "max_restarts": 0,
        }
        self._actor: Any = None
        self._running: Any = None
        self._again = 0.0

    def look(self) -> None:
        """Starts the outpost if there is none, and logs its end."""
        if self._running is None:
            if time.monotonic() >= self._again:
                self._actor = ray.remote(Outpost).options(**self._options).remote(self._order)
                self._running = self._actor.run.remote()
            return
        done, _ = ray.wait([self._running], timeout=0)
        if not done:
            return
        try:
            how = f"exit status {ray.get(self._running)}"
        except RayError as error:
            how = str(error).strip().splitlines()[0]
        say(f"outpost {self._order.name} has ended: {how}; Ray places another")
        self.end()
        self._again = time.monotonic() + PAUSE_SECONDS

    def end(self) -> None:
        """Makes Ray kill the outpost."""
        if self._actor is not None:
            ray.kill(self._actor)
        self._actor = self._running = None


def connect() -> str:
    """Joins the cluster. Returns the address at which its nodes reach this machine."""
    if os.environ.get("RAY_ADDRESS", "").startswith("ray://"):
        raise ConnectionError("RAY_ADDRESS is of Ray's client: the server has to be on a node of the cluster")
    try:
        ray.init(address="auto", namespace="forebay", log_to_driver=False, logging_level="error")
    except ConnectionError as error:
        how = "`ray start --head` begins one, and RAY_ADDRESS names one"
        raise ConnectionError(f"no Ray cluster was found: {how} ({error})") from error
    return str(ray.util.get_node_ip_address())


def divided(asked: Asked) -> list[int]:
    """Returns the number of hands of each bundle."""
    unit = "GPU" if asked.cuda else "CPU"
    largest = int(max((node["Resources"].get(unit, 0) for node in ray.nodes() if node["Alive"]), default=0))
    if asked.ranks > largest and not asked.apart:
        more = "with --collective-interface the ranks of a replica may be on several"
        say(f"no node has {asked.ranks} {unit}s (the largest has {largest}), so this waits for one: {more}")
    return shares(asked.replicas, asked.ranks, largest, asked.apart)


def serve(asked: Asked, door: Door, over: threading.Event) -> None:
    """Keeps outposts running until the brain has exited."""
    hands = divided(asked)
    group = placement_group([bundle(count, asked.cuda) for count in hands], strategy="PACK")
    seats = [Seat(group, index, count, asked, door) for index, count in enumerate(hands)]
    say(f"{sum(hands)} hands in {len(hands)} bundles")
    try:
        while not over.wait(LOOK_SECONDS):
            for seat in seats:
                seat.look()
    finally:
        for seat in seats:
            seat.end()
        remove_placement_group(group)


def told(stream: IO[str]) -> dict[str, Any]:
    """Reads a line of JSON from the brain. If the brain has exited, this process exits."""
    line = stream.readline()
    if not line:
        raise SystemExit(0)
    found: dict[str, Any] = json.loads(line)
    return found


def watch(stream: IO[str], over: threading.Event) -> None:
    """Waits until the brain exits, then ends this process, even if a call of Ray blocks. Ray notices that it ended."""
    stream.read()
    over.set()
    time.sleep(LAST_SECONDS)
    os._exit(1)


def main() -> None:
    """Runs the command."""
    # Ray and its workers may print, but stdout is only for the brain.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: str) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    asked = Asked(**told(sys.stdin))
    try:
        answer(address=connect())
    except Exception as error:
        answer(error=str(error).strip())
        raise SystemExit(1) from error
    door = Door(**told(sys.stdin))
    over = threading.Event()
    threading.Thread(target=watch, args=(sys.stdin, over), daemon=True).start()
    serve(asked, door, over)
    ray.shutdown()


if __name__ == "__main__":
    main()
