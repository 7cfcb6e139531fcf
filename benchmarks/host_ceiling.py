"""The speed of each server's host side: streamed chat with a model that takes almost no time.

    python -m benchmarks.host_ceiling --rounds 3 --streams 64,1024

About 56 tokens in (46 of them the chat template), 128 out. Forebay runs twice: with a simulated device that takes no
time, which no peer has, and with the real hand on the same tiny model as the peers.
"""

from __future__ import annotations

from benchmarks import compare
from benchmarks.beside import servers_table
from benchmarks.cells import table_of
from benchmarks.load import Workload
from benchmarks.records import Results
from benchmarks.servers import FOREBAY_CPU, FOREBAY_SIM, Setting

SERVERS = ["forebay-sim", "forebay", "vllm", "vllm-rust", "sglang", "llama"]
STREAMS = [64, 256, 1024, 2048, 4096]
PROMPT = 10
ANSWER = 128
CONTEXT = 512


def workload(streams: int) -> Workload:
    """A workload that uses each stream at least twice and takes several seconds."""
    # The tiny model's arithmetic is too short to be divided among threads.
    setting = Setting(model="tiny", streams=streams, context=CONTEXT, threads=1)
    return Workload(str(streams), setting, PROMPT, ANSWER, requests=max(1024, 2 * streams))


@table_of("host_ceiling")
def table(found: Results) -> str:
    """The table of streams and servers."""
    return servers_table(found, [FOREBAY_SIM.name, FOREBAY_CPU.name], "streams", "output_throughput")


def main() -> None:
    """Runs the command line."""
    flags = compare.parser("Host ceiling: streamed chat on a nearly free model.", rounds=3)
    compare.add_servers(flags, SERVERS)
    flags.add_argument("--streams", type=compare.numbers, default=STREAMS, metavar="N,N")
    chosen = flags.parse_args()
    workloads = [workload(streams) for streams in chosen.streams]
    compare.finish(compare.compare("host_ceiling", workloads, chosen.servers, chosen.rounds), chosen.output)


if __name__ == "__main__":
    main()
