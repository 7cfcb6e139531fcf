"""Limits of control groups: memory and threads that are planned under them, and hands that the kernel kills.

A folder of files stands for a machine (`FOREBAY_MACHINE_ROOT`). One test makes a real control group, if it may.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from forebay.compute.prompts import slice_bytes
from tests.e2e.conftest import Models
from tests.e2e.models import Model
from tests.e2e.processes import children, is_hand
from tests.e2e.server import BINARY, Server, free_port
from tests.e2e.waiting import eventually

MIB = 1 << 20
GROUP = "sys/fs/cgroup/system.slice/forebay.service"
UNIFIED = {
    "proc/meminfo": "MemTotal: 16777216 kB\nMemAvailable: 12582912 kB\n",
    "proc/self/mountinfo": "30 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
    "proc/self/cgroup": "0::/system.slice/forebay.service\n",
    f"{GROUP}/memory.events": "oom_kill 0\n",
}
FIRST = {
    "proc/meminfo": "MemTotal: 16777216 kB\nMemAvailable: 12582912 kB\n",
    "proc/self/mountinfo": "31 23 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
    "proc/self/cgroup": "4:memory:/a/b\n1:cpu:/a\n0::/\n",
}
MACHINES: dict[str, tuple[Mapping[str, str], int]] = {
    "the first version": (
        {
            **FIRST,
            "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": str(600 * MIB),
            "sys/fs/cgroup/memory/a/b/memory.usage_in_bytes": str(100 * MIB),
        },
        500 * MIB,
    ),
    "a slice": (
        {
            **UNIFIED,
            "sys/fs/cgroup/system.slice/memory.max": str(900 * MIB),
            "sys/fs/cgroup/system.slice/memory.current": str(500 * MIB),
            f"{GROUP}/memory.max": "max",
        },
        400 * MIB,
    ),
    "high below max": (
        {
            **UNIFIED,
            f"{GROUP}/memory.max": str(2048 * MIB),
            f"{GROUP}/memory.high": str(600 * MIB),
            f"{GROUP}/memory.current": str(150 * MIB),
        },
        450 * MIB,
    ),
    "a page cache full of files": (
        {
            **UNIFIED,
            f"{GROUP}/memory.max": str(600 * MIB),
            f"{GROUP}/memory.current": str(599 * MIB),
            f"{GROUP}/memory.stat": f"anon 9\ninactive_file {300 * MIB}\nactive_file {199 * MIB}\n",
        },
        500 * MIB,
    ),
}
READY = re.compile(r"hand ready.* pages=(\d+) .*weight_bytes=(\d+) kv_bytes=(\d+) ")
FLAGS = ("--dtype", "float32", "--log-interval", "0", "--page-size", "16")


def write(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


class Started:
    """Starts servers on machines that are folders of files."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack

    def __call__(self, model: Model, root: Path, *flags: str, healthy: bool = True) -> Server:
        log = self._folder / f"server-{uuid.uuid4().hex}.log"
        server = Server(model.path, *FLAGS, *flags, log=log, environment={"FOREBAY_MACHINE_ROOT": str(root)})
        self._stack.callback(server.kill)
        if healthy:
            server.wait_for_health()
        return server


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Started]:
    with ExitStack() as stack:
        yield Started(tmp_path, stack)


def planned(server: Server) -> tuple[int, int, int]:
    """Pages, bytes of weights and bytes of pages, as logged."""
    (told,) = READY.findall(server.log())
    pages, weights, kv = map(int, told)
    return pages, weights, kv


def info(server: Server) -> dict[str, Any]:
    """The server's configuration and the facts of its hand."""
    answer = server.http.get("/server_info").json()
    return {**answer["config"], **answer["facts"]}


def share(available: int, fraction: float = 0.6) -> int:
    """The bytes of the available memory that a hand may use."""
    return int(fraction * available)


def beside(server: Server) -> int:
    """The bytes that a step needs in addition to weights and pages."""
    return slice_bytes(info(server)["vocab_size"], 1024)


def threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


@pytest.mark.parametrize("name", MACHINES)
def test_pages_fit_into_what_the_groups_leave(start: Started, tiny: Model, tmp_path: Path, name: str) -> None:
    files, available = MACHINES[name]
    root = write(tmp_path / "machine", files)
    # Enough slots that memory is the limit.
    server = start(tiny, root, "--max-running-requests", "2000", "--hand", "rust")
    pages, weights, kv = planned(server)
    assert pages == (share(available) - weights - beside(server)) // (kv // pages)


@pytest.mark.parametrize("given", [False, True], ids=["no limit", "a limit"])
def test_the_hand_in_python_is_told_what_it_may_use(start: Started, tiny: Model, tmp_path: Path, given: bool) -> None:
    files, available = MACHINES["the first version"] if given else (FIRST, 12 << 30)
    root = write(tmp_path / "machine", files)
    server = start(tiny, root, "--max-running-requests", "20000", "--hand", "torch")
    _, weights, kv = planned(server)
    # The hand subtracts what PyTorch itself has allocated, about 200 MiB.
    fraction = 0.6 if given else 0.3
    taken = weights + kv + beside(server)
    assert share(available - 400 * MIB, fraction) < taken <= share(available, fraction)


@pytest.mark.parametrize("hand", ["rust", "torch"])
def test_half_a_processor_has_one_thread(start: Started, tiny: Model, tmp_path: Path, hand: str) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one processor has one thread anyway")
    quota = {"sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "50000", "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000"}
    half, whole = write(tmp_path / "half", {**FIRST, **quota}), write(tmp_path / "whole", FIRST)
    found = []
    for root in (half, whole):
        server = start(tiny, root, "--hand", hand)
        server.ask("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 2})
        (pid,) = server.hands()
        if hand == "torch":
            environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
            found.append(int(next(v.partition("=")[2] for v in environment if v.startswith("OMP_NUM_THREADS="))))
        else:
            found.append(threads(pid))
        config = info(server)
        assert config["text_threads"] == (1 if root == half else 2)
        assert config["mask_threads"] == 1
        server.kill()
    assert found[0] < found[1]
    if hand == "torch":
        assert found[0] == 1


def test_doctor_and_the_brain_have_the_same_limits(start: Started, tiny: Model, tmp_path: Path) -> None:
    files, _ = MACHINES["the first version"]
    root = write(tmp_path / "machine", {**files, "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "50000"})
    write(root, {"sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000"})
    environment = {**os.environ, "FOREBAY_MACHINE_ROOT": str(root)}
    command = [str(BINARY), "doctor", "--json", "--offline"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=60)
    found = {finding["what"]: finding["says"] for finding in json.loads(done.stdout)["findings"]}
    assert found["cgroup limits"].startswith("629 MB of memory, 0.5 processors' worth of time: 1 thread of a hand")
    assert "524 MB of it available" in found["memory"]
    assert info(start(tiny, root))["max_request_bytes_in_flight"] == 150 * MIB
    plan = [str(BINARY), "plan", "--model", str(tiny.path), "--device", "cpu", "--dtype", "float32"]
    told = subprocess.run(plan, capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert told.returncode == 0, told.stderr


def kill_for_memory(server: Server, root: Path, count: int) -> None:
    """Imitates the kernel when memory runs out: it counts the kill, then kills the hand."""
    hand = server.hand()
    assert hand
    write(root, {f"{GROUP}/memory.events": f"oom_kill {count}\n"})
    os.kill(hand, signal.SIGKILL)


def test_a_hand_that_the_kernel_kills_comes_back_with_less(start: Started, tiny: Model, tmp_path: Path) -> None:
    files, _ = MACHINES["a page cache full of files"]
    root = write(tmp_path / "machine", files)
    # Pages for 4 requests of the largest length.
    server = start(tiny, root, "--max-total-tokens", str(4 * 256 * 16), "--hand", "rust")
    assert "warning" not in server.http.get("/health").json()
    prompt = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    before = server.ask("/v1/completions", prompt)["choices"][0]["text"]
    for count, pages in enumerate((768, 576, 432, 324, 256), 1):
        kill_for_memory(server, root, count)
        server.wait_for_metric("forebay:hand_memory_kills_total", float(count).__eq__)
        health = server.wait_for_health().json()
        times = "once" if count == 1 else f"{count} times"
        assert health["warning"] == f"memory ran out {times}: hands have fewer KV pages than at the start"
        assert info(server)["page_count"] == pages
        assert server.ask("/v1/completions", prompt)["choices"][0]["text"] == before
    assert "the kernel killed it because memory ran out (600 MiB are all there is)" in server.log()
    assert "it comes back with 768 KV pages in place of 1024" in server.log()
    # One request may need all of the 256 pages, so the server ends at the next kill.
    kill_for_memory(server, root, 6)
    assert server.process.wait(30) == 1
    assert "it can't do with fewer than 256 KV pages, because a request may have 4096 tokens" in server.log()


def test_a_kill_by_somebody_else_takes_no_pages(start: Started, tiny: Model, tmp_path: Path) -> None:
    files, _ = MACHINES["a page cache full of files"]
    server = start(tiny, write(tmp_path / "machine", files), "--max-total-tokens", "16384", "--hand", "rust")
    hand = server.hand()
    assert hand
    os.kill(hand, signal.SIGKILL)
    server.wait_for_metric("forebay:hand_deaths_total", lambda deaths: deaths == 1)
    assert "warning" not in server.wait_for_health().json()
    assert info(server)["page_count"] == 1024
    assert server.metric("forebay:hand_memory_kills_total") == 0


def test_a_worker_tells_of_its_own_machine(start: Started, tiny: Model, tmp_path: Path) -> None:
    files, available = MACHINES["a page cache full of files"]
    here, there = write(tmp_path / "here", UNIFIED), write(tmp_path / "there", files)
    token, port = tmp_path / "token", free_port()
    flags = ("--listen-hands", f"127.0.0.1:{port}", "--join-token-file", str(token))
    server = start(tiny, here, *flags, "--max-running-requests", "2000", "--hand", "rust", healthy=False)
    eventually(token.exists, "the token file exists", 30)
    environment = {**os.environ, "FOREBAY_MACHINE_ROOT": str(there)}
    command = [str(BINARY), "worker", "--join", f"127.0.0.1:{port}", "--token-file", str(token)]
    with subprocess.Popen(command, env=environment) as worker:
        try:
            server.wait_for_health()
            pages, weights, kv = planned(server)
            # The fraction is that of the brain, whose machine has no limit; the available bytes are those of the
            # worker.
            assert pages == (share(available, 0.3) - weights - beside(server)) // (kv // pages)
            (hand,) = [pid for pid in children(worker.pid) if is_hand(pid)]
            write(there, {f"{GROUP}/memory.events": "oom_kill 1\n"})
            os.kill(hand, signal.SIGKILL)
            server.wait_for_metric("forebay:hand_memory_kills_total", lambda kills: kills == 1)
            server.wait_for_health()
            assert info(server)["page_count"] == pages * 3 // 4
        finally:
            worker.terminate()


class Group:
    """A control group with a memory limit, inside the group of this process."""

    def __init__(self, limit: int) -> None:
        self.folder, name = self._make()
        self._limit(name, limit)

    @staticmethod
    def _make() -> tuple[Path, str]:
        """Makes the group's folder; skips the test if the machine does not allow it."""
        own = Path("/proc/self/cgroup").read_text().splitlines()
        for line in own:
            _, controllers, path = line.split(":", 2)
            first = controllers == "memory"
            base = Path("/sys/fs/cgroup/memory" if first else "/sys/fs/cgroup") / path.lstrip("/")
            if not first and (controllers or "memory" not in _words(base / "cgroup.subtree_control")):
                continue
            folder = base / f"forebay-test-{uuid.uuid4().hex}"
            try:
                folder.mkdir()
            except OSError:
                continue
            return folder, "memory.limit_in_bytes" if first else "memory.max"
        pytest.skip("no control group can be made here")

    def _limit(self, name: str, limit: int) -> None:
        try:
            (self.folder / name).write_text(str(limit))
        except OSError as error:
            self.folder.rmdir()
            pytest.skip(f"no limit can be set here: {error}")

    @property
    def entrance(self) -> tuple[str, ...]:
        """A command that runs another command in this group."""
        return ("sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$0" "$@"')

    def remove(self) -> None:
        eventually(lambda: not (self.folder / "cgroup.procs").read_text(), "all processes have left", 30)
        self.folder.rmdir()

    def kills(self) -> int:
        for name in ("memory.oom_control", "memory.events"):
            path = self.folder / name
            if path.exists():
                lines = dict(line.split() for line in path.read_text().splitlines())
                return int(lines["oom_kill"])
        raise AssertionError("no file counts the kills")


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


@pytest.fixture
def small_group() -> Iterator[Group]:
    group = Group(600 * MIB)
    try:
        yield group
    finally:
        group.remove()


# The default model's weights and the logits of a step take 328 MiB, more than the usual share of 600 MiB.
SMALL = [("llama", ("--max-running-requests", "2000"), 0.6), ("smollm2", ("--mem-fraction-static", "0.8"), 0.8)]


@pytest.mark.parametrize(("name", "flags", "fraction"), SMALL, ids=["llama", "smollm2"])
def test_a_server_in_600_mib_is_never_killed(
    models: Models, small_group: Group, tmp_path: Path, name: str, flags: tuple[str, ...], fraction: float
) -> None:
    path = models(name).path
    server = Server(path, "--log-interval", "0", *flags, log=tmp_path / "log", through=small_group.entrance)
    try:
        server.wait_for_health()
        pages, weights, kv = planned(server)
        assert kv > 8 * MIB
        assert weights + kv + beside(server) <= share(600 * MIB, fraction)
        assert info(server)["max_request_bytes_in_flight"] == 150 * MIB
        # Send prompts without a common prefix until every page has been written.
        length = min(pages * 16, 4000) - 8
        for at in range(pages * 16 // length + 2):
            prompt = [100 + (at * 7919 + token * (31 + at)) % 1900 for token in range(length)]
            server.ask("/v1/completions", {"prompt": prompt, "max_tokens": 4, "temperature": 0})
        assert server.metric("forebay:hand_deaths_total") == 0
        assert small_group.kills() == 0
    finally:
        server.kill()
