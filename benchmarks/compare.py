"""Compares servers: in each round and workload, each server runs once, in a fresh process."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import models, records, tables
from benchmarks.load import Workload, load, measure, start
from benchmarks.processes import ServerError
from benchmarks.records import Results, Run
from benchmarks.servers import BY_KEY, ROOT, Server, Setting, Target, chosen

T = TypeVar("T", bound=Target)


def parser(description: str, *, rounds: int) -> argparse.ArgumentParser:
    """The common flags of all benchmarks. It also makes SIGTERM raise an error, so that servers end first."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    flags = argparse.ArgumentParser(description=description)
    flags.add_argument("--rounds", type=int, default=rounds, help="measurements of each thing [%(default)s]")
    flags.add_argument("--output", type=Path, help="file of the results [benchmarks/results/NAME.json]")
    return flags


def add_servers(flags: argparse.ArgumentParser, default: Sequence[str]) -> None:
    """The flags that choose the servers: all of them by name, or which of the peers run beside Forebay."""
    flags.add_argument(
        "--servers",
        type=words,
        default=list(default),
        metavar="NAMES",
        help=f"of {', '.join(BY_KEY)}; those not installed are left out [{','.join(default)}]",
    )
    flags.add_argument(
        "--peers", type=peers, action=_Narrow, metavar="NAMES", help="of the servers above, Forebay's and these only"
    )


class _Narrow(argparse.Action):
    """A flag that removes peers from the servers chosen so far."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        namespace.servers = [name for name in namespace.servers if name.startswith("forebay") or name in values]


def words(text: str) -> list[str]:
    """Names separated by commas or spaces; each must be the name of a server."""
    names = text.replace(",", " ").split()
    unknown = [name for name in names if name not in BY_KEY]
    if unknown:
        raise argparse.ArgumentTypeError(f"no server is called {', '.join(unknown)}: there are {', '.join(BY_KEY)}")
    return names


def peers(text: str) -> list[str]:
    """Like `words`, for peers: servers, and other packages that `make bench-setup` installs."""
    names = text.replace(",", " ").split()
    known = {path.stem for path in (ROOT / "benchmarks/requirements").glob("*.in")}
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(
            f"no peer is called {', '.join(unknown)}: there are {', '.join(sorted(known))}"
        )
    return names


def numbers(text: str) -> list[int]:
    """Whole numbers separated by commas or spaces."""
    return [int(word) for word in text.replace(",", " ").split()]


def say(text: str) -> None:
    """Prints progress to standard error, so that standard output has the table only."""
    print(text, file=sys.stderr, flush=True)


def compare(name: str, workloads: Sequence[Workload], keys: Sequence[str], rounds: int) -> Results:
    """Measures every workload on every installed server. Failures are reported and left out."""
    found, servers = _begin(name, keys, rounds)
    for workload in workloads:
        fitting = [server for server in servers if server.fits(workload.setting)]
        measure_in_turn(found, workload, fitting, rounds, measure)
    return found


def compare_together(
    name: str, workloads: Sequence[Workload], keys: Sequence[str], rounds: int, output: Path | None
) -> Results:
    """Like `compare`, but starts a server once a round for all workloads: some servers take minutes to start.

    Results are written after each server, so that a later failure does not lose hours of measurements.
    """
    found, servers = _begin(name, keys, rounds)
    setting = largest([workload.setting for workload in workloads])
    by_name = {server.name: server for server in servers if server.fits(setting)}
    for number, server in records.in_turn(rounds, list(by_name)):
        _measure_all(found, by_name[server], setting, workloads, number)
        if found.runs:
            records.save(found, output)
    return found


def largest(settings: Sequence[Setting]) -> Setting:
    """The setting of a server that can run all of these settings, which differ only in sizes."""
    return replace(
        settings[0],
        streams=max(setting.streams for setting in settings),
        context=max(setting.context for setting in settings),
        step_tokens=max(setting.step_tokens for setting in settings),
    )


def _begin(name: str, keys: Sequence[str], rounds: int) -> tuple[Results, list[Server]]:
    """Empty results with the data that is known beforehand, and the installed servers."""
    servers, skipped = chosen(keys)
    for server, reason in skipped.items():
        say(f"{server} is left out: {reason}")
    found = records.new(name, rounds)
    found.skipped = dict(skipped)
    found.notes = {server.name: server.note for server in servers if server.note}
    models.build(force=False)
    return found, servers


def _measure_all(found: Results, server: Server, setting: Setting, workloads: Sequence[Workload], number: int) -> None:
    """Adds one measurement of each workload to `found`, unless the server failed to start before."""
    if server.name in found.skipped:
        return
    try:
        running = start(server, setting)
    except ServerError as error:
        leave_out(found, server.name, error)
        return
    with running:
        for workload in workloads:
            _add(found, workload, server.name, number, partial(load, server, workload, running))


def leave_out(found: Results, where: str, error: ServerError) -> None:
    """Records which values are missing and why: a peer that cannot handle a load must not end the whole run."""
    found.skipped[where] = str(error).splitlines()[0]
    say(f"  {where} is left out: {error}")


def _add(found: Results, workload: Workload, server: str, number: int, once: Callable[[], dict[str, Any]]) -> None:
    """Adds one measurement to `found`, unless it failed before."""
    where = f"{workload.name}: {server}"
    if where in found.skipped:
        return
    try:
        values = once()
    except ServerError as error:
        leave_out(found, where, error)
        return
    found.runs.append(Run(workload=workload.name, server=server, round=number, values=values))
    say(f"  round {number} {where}: {values['output_throughput']:.0f} tokens/s")


def measure_in_turn(
    found: Results,
    workload: Workload,
    servers: Sequence[T],
    rounds: int,
    once: Callable[[T, Workload], dict[str, Any]],
) -> None:
    """Adds `rounds` measurements of each server to `found`, in turn: A B, A B."""
    by_name = {server.name: server for server in servers}
    for number, server in records.in_turn(rounds, list(by_name)):
        _add(found, workload, server, number, partial(once, by_name[server], workload))


def finish(found: Results, output: Path | None) -> None:
    """Writes the results and prints their table."""
    if not found.runs:
        raise SystemExit("nothing was measured")
    path = records.save(found, output)
    print(tables.render(found))
    say(f"written to {path.name}; `python -m benchmarks.tables` puts the tables into docs/performance")
