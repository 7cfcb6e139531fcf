"""Outposts that Ray places on a cluster of two nodes, which are processes of this machine."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.models import Model
from tests.e2e.processes import alive, command_line
from tests.e2e.server import ROOT, Server
from tests.e2e.test_outposts import streams
from tests.e2e.waiting import eventually

PYTHON = ROOT / ".venv/ray/bin/python"
SECONDS = 120
TOKENS = 600

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="`make setup-ray` installs Ray")


class Cluster:
    """A Ray cluster of small nodes. Always `end` it."""

    def __init__(self, folder: Path) -> None:
        quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "PYTHONPATH": str(ROOT / "python")}
        # Hands with PyTorch use the tests' own Python environment.
        hands = {"FOREBAY_PYTHON": str(ROOT / ".venv/bin/python")}
        self._log = (folder / "ray.log").open("wb")
        self._process = subprocess.Popen(
            [PYTHON, Path(__file__).with_name("ray_cluster.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **quiet, **hands},
        )
        self.address: str = self.ask("address")

    def ask(self, order: str) -> Any:
        """Sends a command to `ray_cluster.py`; returns its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{order}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, Path(self._log.name).read_text(errors="replace")[-4000:]
        return json.loads(answer)

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(SECONDS)
        finally:
            self._process.kill()
            self._log.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    found = Cluster(tmp_path)
    try:
        found.ask("add")
        yield found
    finally:
        found.end()


def placed(model: Model, cluster_address: str, folder: Path, *flags: str) -> Server:
    """A server with outposts that Ray places."""
    given = ("--dtype", "float32", "--log-interval", "0", "--threads", "1", "--hand-restarts", "50")
    return Server(
        model.path,
        *given,
        *("--placement", "ray", "--python", str(PYTHON), *flags),
        log=folder / f"server-{len(list(folder.iterdir()))}.log",
        environment={"RAY_ADDRESS": cluster_address, "PYTHONPATH": str(ROOT / "python")},
    )


def outposts(server: Server) -> list[int]:
    """The processes that have joined this server; Ray's processes are their parents."""
    join = {word.split()[-1] for word in server.log().splitlines() if "hands join at" in word}
    found = []
    for folder in Path("/proc").iterdir():
        line = command_line(int(folder.name)) if folder.name.isdigit() else []
        if line[1:3] == ["worker", "--join"] and line[3] in join:
            found.append(int(folder.name))
    return found


def shown() -> str:
    """The command lines of all processes."""
    lines = (command_line(int(folder.name)) for folder in Path("/proc").iterdir() if folder.name.isdigit())
    return "\n".join(" ".join(line) for line in lines)


def test_a_cluster_serves_and_the_loss_of_a_node_is_no_loss_of_streams(
    cluster: Cluster, tiny: Model, tmp_path: Path
) -> None:
    alone = Server(tiny.path, "--dtype", "float32", "--threads", "1", log=tmp_path / "alone.log")
    try:
        alone.wait_for_health()
        wanted = asyncio.run(streams(alone, tiny, TOKENS))
    finally:
        alone.kill()
    server = placed(tiny, cluster.address, tmp_path, "--dp-size", "2")
    try:
        server.wait_for_health()
        assert cluster.ask("groups") == ["CREATED"]
        assert len(outposts(server)) == 2
        assert server.hands() == []
        assert "fbw1." not in shown(), "no command line contains the join token"
        assert asyncio.run(streams(server, tiny, TOKENS)) == wanted
        before = outposts(server)

        async def lost() -> None:
            removed = asyncio.create_task(asyncio.to_thread(cluster.ask, "remove"))
            while not (removed.done() and server.metric("forebay:hand_deaths_total")):
                assert await streams(server, tiny, TOKENS) == wanted

        asyncio.run(asyncio.wait_for(lost(), SECONDS))
        assert server.metric("forebay:hand_deaths_total") == 1
        eventually(lambda: sum(map(alive, before)) == 1, "the node's outpost has ended with it")
        cluster.ask("add")
        eventually(lambda: len(outposts(server)) == 2, "Ray places another outpost", SECONDS)
        server.wait_for_health()
        assert asyncio.run(streams(server, tiny, TOKENS)) == wanted
        left = outposts(server)
        assert server.terminate() == 0
        eventually(lambda: not any(map(alive, left)), "the outposts have ended")
        assert cluster.ask("groups") == ["REMOVED"]
        assert set(cluster.ask("actors")) == {"DEAD"}

        # Put the ranks of one replica on both nodes, and kill the brain.
        server = placed(tiny, cluster.address, tmp_path, "--tp-size", "2", "--collective-interface", "lo")
        server.wait_for_health()
        left = outposts(server)
        assert len(left) == 2
        assert asyncio.run(streams(server, tiny, 24)) == [answer[:24] for answer in wanted]
        server.kill()
        eventually(lambda: not any(map(alive, left)), "the outposts have ended", SECONDS)
        eventually(lambda: set(cluster.ask("groups")) == {"REMOVED"}, "no placement group is left", SECONDS)
        eventually(lambda: set(cluster.ask("actors")) == {"DEAD"}, "no actor is left", SECONDS)
    finally:
        server.kill()


def test_without_a_cluster_the_start_ends_with_a_sentence(tiny: Model, tmp_path: Path) -> None:
    client = placed(tiny, "ray://127.0.0.1:1", tmp_path)
    try:
        assert client.process.wait(SECONDS) == 1
        assert "error: --placement ray: RAY_ADDRESS is of Ray's client" in client.log()
    finally:
        client.kill()
