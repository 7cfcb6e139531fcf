"""Facts about processes, read from /proc."""

from __future__ import annotations

from pathlib import Path


def children(pid: int) -> list[int]:
    """The living children of a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in task.read_text().split()]
        except OSError:
            # The thread ended while the folder was being read.
            continue
    return [child for child in found if alive(child)]


def descendants(pid: int) -> list[int]:
    """All living processes below a process."""
    found = []
    for child in children(pid):
        found += [child, *descendants(child)]
    return found


def alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def command_line(pid: int) -> list[str]:
    """The arguments that a process was started with; empty after its end."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    except OSError:
        return []


def is_hand(pid: int) -> bool:
    """Whether the process is a hand, in Python or in Rust."""
    line = command_line(pid)
    return "forebay.worker" in line or line[1:] == ["hand"]


def peak_memory(pid: int) -> int:
    """The peak memory of a process in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM in /proc/PID/status")


def shared_memory() -> set[str]:
    """Names of the shared-memory files of the machine."""
    return {path.name for path in Path("/dev/shm").iterdir()}
