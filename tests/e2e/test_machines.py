"""Workers with network stacks of their own, as on other machines: none reaches the loopback of another."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.conftest import Serve
from tests.e2e.models import Model
from tests.e2e.processes import descendants, is_hand
from tests.e2e.server import BINARY, CACHE, free_port
from tests.e2e.test_apart import TOKENS, spoken_from
from tests.e2e.test_outposts import gone, streams
from tests.e2e.waiting import eventually

BRAIN, MACHINES = "10.197.66.1", {"a": "10.197.66.2", "b": "10.197.66.3"}
"""Addresses of a network that exists only during this test."""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


def name(machine: str) -> str:
    return f"fb{os.getpid()}{machine}"


@pytest.fixture
def network() -> Iterator[None]:
    """A bridge with the brain's address, and for each machine a namespace that is linked to it."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and `ip` to make networks")
    with ExitStack() as stack:
        try:
            ip("link", "add", name("r"), "type", "bridge")
            stack.callback(ip, "link", "del", name("r"))
            ip("addr", "add", f"{BRAIN}/24", "dev", name("r"))
            ip("link", "set", name("r"), "up")
            for machine, address in MACHINES.items():
                ip("netns", "add", name(machine))
                stack.callback(ip, "netns", "del", name(machine))
                ip("link", "add", name(machine), "type", "veth", "peer", "name", "cable", "netns", name(machine))
                ip("link", "set", name(machine), "master", name("r"), "up")
                ip("-n", name(machine), "addr", "add", f"{address}/24", "dev", "cable")
                ip("-n", name(machine), "link", "set", "cable", "up")
                ip("-n", name(machine), "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"networks can't be made here: {error.stderr.decode().strip()}")
        yield


class Machine:
    """A machine that runs a worker. Always `end` it."""

    def __init__(self, folder: Path, machine: str, port: int) -> None:
        join = ["--join", f"{BRAIN}:{port}", "--token-file", str(folder / "token")]
        line = ["ip", "netns", "exec", name(machine), str(BINARY), "worker", *join, "--name", machine]
        with (folder / f"{machine}.log").open("wb") as log:
            variables = {**os.environ, "NO_COLOR": "1", "FOREBAY_CACHE": str(CACHE)}
            self._process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=variables)

    def hands(self) -> list[int]:
        return [pid for pid in descendants(self._process.pid) if is_hand(pid)]

    def end(self) -> None:
        self._process.kill()
        self._process.wait(30)


def test_ranks_on_two_machines_and_a_cable_that_is_pulled(
    network: None, serve: Serve, tiny: Model, tmp_path_factory: pytest.TempPathFactory
) -> None:
    alone = serve(tiny, "--tp-size", "2")
    wanted = asyncio.run(streams(alone, tiny, TOKENS))
    alone.kill()
    folder, port = tmp_path_factory.mktemp("machines"), free_port()
    gate = ("--listen-hands", f"{BRAIN}:{port}", "--join-token-file", str(folder / "token"))
    flags = ("--tp-size", "2", "--collective-interface", "cable", "--hand-restarts", "50")
    server = serve(tiny, *gate, *flags, healthy=False)
    eventually((folder / "token").is_file, "the token is made", 60)
    with ExitStack() as stack:
        machines = {machine: Machine(folder, machine, port) for machine in MACHINES}
        for machine in machines.values():
            stack.callback(machine.end)
        server.wait_for_health()
        for key, machine in machines.items():
            (hand,) = machine.hands()
            assert spoken_from(hand) == {MACHINES[key]}
        assert asyncio.run(streams(server, tiny, TOKENS)) == wanted
        hands = [hand for machine in machines.values() for hand in machine.hands()]

        async def pulled() -> list[list[int]]:
            running = asyncio.create_task(streams(server, tiny, TOKENS))
            await asyncio.sleep(0.1)
            # The network goes silent without notice to either side.
            await asyncio.to_thread(ip, "link", "set", name("b"), "down")
            for hand in hands:
                await asyncio.to_thread(gone, hand)
            await asyncio.to_thread(ip, "link", "set", name("b"), "up")
            return await running

        assert asyncio.run(pulled()) == wanted
        assert server.metric("forebay:hand_deaths_total") == 1, "the link is cut under load"
