"""Runs a benchmark by its name, or lists them.

    python -m benchmarks                          # names, minutes, and lines
    python -m benchmarks startup --peers llama    # flags of its module
    python -m benchmarks --dry-run cpu            # prints the commands

`make bench NAME=startup` builds what a benchmark needs, and then runs this.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from types import FrameType

from benchmarks import registry

USAGE = """usage: python -m benchmarks NAME [FLAGS] [ROUNDS=N PEERS='vllm llama' ...]
       python -m benchmarks --dry-run NAME ...   print the commands
       python -m benchmarks --needs NAME         print the targets of make that come before

Flags are those of the benchmark's module; --help prints them. Benchmarks with their minutes on two cores:
"""


def main(words: list[str]) -> int:
    """Runs the command line; returns the exit status."""
    if not words or words[0] in ("-h", "--help"):
        print(f"{USAGE}\n{registry.listing()}")
        return 0
    option = words[0] if words[0] in ("--dry-run", "--needs") else ""
    names = words[1:] if option else words
    try:
        if not names or names[0].startswith("-"):
            raise registry.UsageError("a benchmark's name comes first: `python -m benchmarks` lists them")
        benchmark = registry.named(names[0])
        lines = registry.command_lines(benchmark, names[1:])
    except registry.UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if option:
        print(benchmark.needs if option == "--needs" else "\n".join(lines))
        return 0
    for line in lines:
        print(f"==> {line}", file=sys.stderr, flush=True)
        if status := run(line):
            return status
    return 0


def run(line: str) -> int:
    """Runs one command to its end; returns its exit status, 128 or more if a signal ended it.

    A signal to this process ends the command and its servers first.
    """
    words = shlex.split(line)
    variables = dict(os.environ)
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    command = [sys.executable if words[0] == "python" else words[0], *words[1:]]
    children: list[subprocess.Popen[bytes]] = []
    ended = False

    def end(_number: int, _frame: FrameType | None) -> None:
        nonlocal ended
        ended = True
        for child in children:
            child.terminate()

    # A terminal sends SIGINT to both processes, so the command ends by itself.
    before = signal.signal(signal.SIGTERM, end), signal.signal(signal.SIGINT, lambda *_: None)
    try:
        children.append(subprocess.Popen(command, cwd=registry.ROOT, env=variables))
        if ended:
            children[0].terminate()
        status = children[0].wait()
    except FileNotFoundError:
        print(f"error: there is no {words[0]} on PATH", file=sys.stderr)
        return 127
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
