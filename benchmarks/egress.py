"""The cost of writing a streamed chunk, by the writer: CPU microseconds, user and kernel.

    python -m benchmarks.egress --rounds 3 --streams 64,2048

The simulated device makes a token every 30 microseconds whatever the number of streams. That is slow enough that each
token gets its own chunk, so the comparison is of the cost per chunk, not of merged chunks. The whole process is
counted: sockets, detokenisation, scheduler.
"""

from __future__ import annotations

from benchmarks import compare, models, records
from benchmarks.cells import markdown, number, spread, table_of
from benchmarks.load import Workload, measure
from benchmarks.records import Results
from benchmarks.servers import TOKEN_EVERY_30_US, Forebay, Setting

STREAMS = [64, 512, 2048, 4096]
MODES = ["direct", "tasks", "naive"]
ANSWER = 128


def workload(streams: int) -> Workload:
    """A workload with enough tokens for some seconds."""
    setting = Setting(model="tiny", streams=streams, context=512)
    return Workload(str(streams), setting, 10, ANSWER, requests=max(2048, 2 * streams))


def server(mode: str) -> Forebay:
    """Forebay with chunks written that way."""
    return Forebay(mode, "forebay-chat", flags=("--egress", mode), profile=TOKEN_EVERY_30_US)


@table_of("egress")
def table(found: Results) -> str:
    """CPU time per chunk for each way of writing; the ratios are of the others to the first."""
    head = ["streams", "chunks written by", "CPU us/token", "user", "kernel", "chunks/token", "ITL ms", "p99 ITL ms"]
    keys = ("server_cpu_us_per_token", "server_user_us_per_token", "server_kernel_us_per_token", "chunks_per_token")
    rows = []
    for workload in found.workloads():
        first = found.servers(workload)[0]
        for server in found.servers(workload):
            cells = [number(found.median(workload, server, key)) for key in (*keys, "mean_itl_ms", "p99_itl_ms")]
            rows.append([workload, server, *cells, spread(found.ratio(workload, server, first, keys[0]))])
    return markdown([*head, "CPU / direct"], rows)


def main() -> None:
    """Runs the command line."""
    flags = compare.parser("CPU time of a streamed chunk, by who writes it.", rounds=3)
    flags.add_argument("--streams", type=compare.numbers, default=STREAMS, metavar="N,N")
    chosen = flags.parse_args()
    found = records.new("egress", chosen.rounds)
    models.build(force=False)
    for streams in chosen.streams:
        compare.measure_in_turn(found, workload(streams), [server(mode) for mode in MODES], chosen.rounds, measure)
    compare.finish(found, chosen.output)


if __name__ == "__main__":
    main()
