"""The table that compares servers: a row for each workload and server."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.cells import markdown, number, spread
from benchmarks.records import Results, median_of

_PROCESSES = 4
"""The number of processes that a cell shows."""


def processes(found: Results, workload: str, server: str) -> str:
    """The CPU time of each process, the largest first."""
    rows = [
        run.values["processes_us_per_token"] for run in found.runs if (run.workload, run.server) == (workload, server)
    ]
    largest = sorted(median_of(rows).items(), key=lambda item: -item[1])[:_PROCESSES]
    return ", ".join(f"{name} {number(value)}" for name, value in largest)


def client_share(found: Results, workload: str, server: str) -> str:
    """The load generator's CPU time as a share of the server's, with a mark if it is over a third."""
    ours = found.median(workload, server, "client_cpu_us_per_token")
    theirs = found.median(workload, server, "server_cpu_us_per_token")
    if ours is None or not theirs:
        return "-"
    share = ours / theirs
    return f"{share:.0%}" + (" (!)" if share > 1 / 3 else "")


def chunks_per_second(found: Results, workload: str, server: str) -> str:
    """Chunks per second: a server that puts several tokens into one chunk does less work per token."""
    tokens = found.median(workload, server, "output_throughput")
    chunks = found.median(workload, server, "chunks_per_token")
    return number(None if tokens is None or chunks is None else tokens * chunks)


def servers_table(found: Results, ours: Sequence[str], first: str, throughput: str) -> str:
    """A row for each workload and server; the last columns are the ratios of our throughput to the row's."""
    measured = {run.server for run in found.runs}
    ours = [name for name in ours if name in measured]
    head = [first, "server", "tokens/s", "TTFT ms", "TPOT ms", "ITL ms", "chunks/token", "CPU us/token", "of which"]
    head += ["chunks/s", "client CPU/server CPU", *(f"{name} / this" for name in ours)]
    rows = []
    for workload in found.workloads():
        for server in found.servers(workload):
            keys = (
                throughput,
                "mean_ttft_ms",
                "mean_tpot_ms",
                "mean_itl_ms",
                "chunks_per_token",
                "server_cpu_us_per_token",
            )
            row = [workload, server, *(number(found.median(workload, server, key)) for key in keys)]
            row += [
                processes(found, workload, server),
                chunks_per_second(found, workload, server),
                client_share(found, workload, server),
            ]
            row += [spread(found.ratio(workload, name, server, throughput)) for name in ours]
            rows.append(row)
    return markdown(head, rows)
