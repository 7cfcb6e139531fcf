"""Ranks of one replica on several workers, which communicate over a named interface."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from ipaddress import ip_address
from pathlib import Path

import pytest

from tests.e2e.conftest import Serve
from tests.e2e.models import Model
from tests.e2e.test_outposts import Gate, Worker, gone, streams
from tests.e2e.waiting import eventually

TOKENS = 200
SIOCGIFADDR = 0x8915
"""The ioctl that reads the IPv4 address of an interface."""
KILLS = int(os.environ.get("FOREBAY_KILLS", "2"))
"""How often a worker is killed under load."""


@pytest.fixture
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    with ExitStack() as stack:
        yield Gate(tmp_path_factory.mktemp("gate"), stack)


def interface() -> tuple[str, bool]:
    """A network interface with an address; True if only this machine can reach it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing: it only looks up the route.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "lo", True
        own = probe.getsockname()[0]
    for _, name in socket.if_nameindex():
        if name != "lo" and own in addresses_of(name):
            return name, False
    return "lo", True


def addresses_of(name: str) -> list[str]:
    """The IPv4 addresses of an interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
        except OSError:
            return []
    return [socket.inet_ntoa(found[20:24])]


def spoken_from(pid: int) -> set[str]:
    """The local addresses of a process's connections over TCP."""
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(os.readlink(link))
        except OSError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in links and fields[3] == "01":
                digits = bytes.fromhex(fields[1].split(":")[0])
                words = b"".join(digits[at : at + 4][::-1] for at in range(0, len(digits), 4))
                address = ip_address(words)
                found.add(str(getattr(address, "ipv4_mapped", None) or address))
    return found


def variable(pid: int, name: str) -> str | None:
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    found = dict(entry.split(b"=", 1) for entry in entries if b"=" in entry).get(name.encode())
    return None if found is None else found.decode()


def loopback(pid: int) -> bool:
    found = spoken_from(pid)
    assert found
    return all(ip_address(address).is_loopback for address in found)


def test_two_workers_give_the_tokens_of_one_machine_and_end_together(serve: Serve, tiny: Model, gate: Gate) -> None:
    alone = serve(tiny, "--tp-size", "2")
    wanted = asyncio.run(streams(alone, tiny, TOKENS))
    assert all(loopback(hand) for hand in alone.hands())
    alone.kill()
    name, only_here = interface()
    flags = ("--tp-size", "2", "--collective-interface", name, "--hand-restarts", "50")
    server = serve(tiny, *gate.flags(), *flags, healthy=False)
    workers = [gate.worker("--name", "first")]
    waits = "waits for outposts with free hands: 1/2"
    eventually(lambda: waits in server.http.get("/health").text, "/health names what is missing", 60)
    workers.append(gate.worker("--name", "second", "--collective-interface", name))
    server.wait_for_health()
    for worker in workers:
        (hand,) = worker.hands()
        for library in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "UCX_NET_DEVICES"):
            assert variable(hand, library) == name
        assert loopback(hand) == only_here
    assert asyncio.run(streams(server, tiny, TOKENS)) == wanted

    for number in range(KILLS):
        server.wait_for_health()
        hands = [pid for worker in workers for pid in worker.hands()]
        assert len(hands) == 2
        lost: Worker = workers.pop(number % 2)

        async def killed(lost: Worker = lost, number: int = number) -> list[list[int]]:
            running = asyncio.create_task(streams(server, tiny, TOKENS))
            await asyncio.sleep(0.05 + 0.03 * (number % 10))
            os.kill(lost.process.pid, signal.SIGKILL)
            workers.append(gate.worker("--name", f"again-{number}"))
            return await running

        assert asyncio.run(killed()) == wanted
        assert server.metric("forebay:hand_deaths_total") == number + 1, "the worker is killed under load"
        for hand in hands:
            gone(hand)

    # One worker with room for both ranks is enough, and then they communicate only within the machine.
    whole = gate.worker("--hands", "2", "--name", "whole")
    for worker in workers:
        worker.kill()
    eventually(lambda: len(whole.hands()) == 2, "the ranks run together", 60)
    server.wait_for_health()
    assert all(loopback(hand) for hand in whole.hands())
    assert asyncio.run(streams(server, tiny, TOKENS)) == wanted


def test_nothing_leaves_a_machine_unless_an_interface_is_named(serve: Serve, tiny: Model, gate: Gate) -> None:
    server = serve(tiny, *gate.flags(), "--tp-size", "2", healthy=False)
    workers = [gate.worker(), gate.worker()]
    eventually(lambda: server.log().count("has joined") == 2, "both workers have joined", 60)
    waits = "waits for an outpost with free hands: 1/2"
    eventually(lambda: waits in server.http.get("/health").text, "/health names what is missing", 60)
    assert [worker.hands() for worker in workers] == [[], []]


def test_an_interface_that_is_not_there_is_said(serve: Serve, tiny: Model, gate: Gate) -> None:
    flags = ("--tp-size", "2", "--collective-interface", "nowhere0", "--hand-restarts", "0")
    server = serve(tiny, *gate.flags(), *flags, healthy=False)
    worker = gate.worker("--collective-interface", "nowhere1")
    assert worker.ends() == 1
    assert "no network interface nowhere1 is here (but " in worker.log()
    _ = gate.worker(), gate.worker()
    assert server.process.wait(120) == 1
    assert "no network interface nowhere0 is here (but " in server.log()
