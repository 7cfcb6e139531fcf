"""The CPU time of a streamed token by its parts, from samples of the running server.

    python -m benchmarks.studies.profile --streams 2048

Needs Linux's `perf`. A chunk has one token, as in `benchmarks.egress`. Samples are taken of every thread, and each goes
to the first group whose words occur in its call stack. The load generator reads the server's CPU time in the same run,
which converts shares to microseconds.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks import compare, models, records
from benchmarks.cells import markdown, table_of
from benchmarks.egress import server, workload
from benchmarks.load import load, start
from benchmarks.records import Results, Run, median_of

STREAMS = 2048
WARM_SECONDS = 3.0
SAMPLED_SECONDS = 5.0
FREQUENCY = 2500

GROUPS = [
    ("egress", r"try_to_wake_up|ep_poll_callback|sock_def_readable", "kernel: waking the client"),
    (
        "egress",
        r"net_rx_action|handle_softirqs|__do_softirq",
        "kernel: the client's half of loopback",
    ),
    ("egress", r"sys_sendto|tcp_sendmsg|__send\b", "kernel: TCP send"),
    ("egress", r"entry_SYSCALL|asm_sysvec|asm_exc", "kernel: other"),
    ("egress", r"Line::|try_write|ScheduledIo|Registration|TcpStream", "the socket's state in user space"),
    ("egress", r"Encoder|Cut::|write_json|OneLine|Chunk|memmove", "encoding the chunk"),
    ("egress", r"Detokenizer|Incomplete|StopStrings|Tokenizer|from_utf8", "text of the token, stop strings"),
    ("egress", r"Metrics|[Hh]istogram|Timeline", "metrics"),
    ("egress", r"", "finding the stream, its mailbox and its tally"),
    ("engine", r"", "scheduler, plan, result, the (simulated) hand"),
    ("http", r"", "requests, heads and ends of answers"),
    ("text", r"", "chat template and tokeniser"),
    ("", r"", "other threads"),
]
"""For each group: the beginning of thread names, a pattern for the stack, and the group's name."""


def group(thread: str, stack: str) -> str:
    """The group of a sample."""
    for name, pattern, title in GROUPS:
        if thread.startswith(name) and re.search(pattern, stack):
            return f"{name}: {title}" if name else title
    raise AssertionError("the last group takes all")


def samples(script: str) -> Iterator[tuple[str, str]]:
    """The thread and stack of each sample in the output of `perf script -F comm,ip,sym`."""
    for block in script.split("\n\n"):
        thread, _, stack = block.strip("\n").partition("\n")
        if thread.strip():
            yield thread.strip(), stack


def record(pid: int, into: Path) -> None:
    """Samples a process for a while, once its load is steady."""
    time.sleep(WARM_SECONDS)
    command = ["perf", "record", "-e", "cpu-clock", "-F", str(FREQUENCY), "-g", "-p", str(pid), "-o", str(into)]
    subprocess.run([*command, "--", "sleep", str(SAMPLED_SECONDS)], check=True, capture_output=True)


@table_of("profile")
def table(found: Results) -> str:
    """Microseconds of each group of samples, and their sum."""
    rows = []
    for streams in found.workloads():
        runs = [run.values for run in found.runs if run.workload == streams]
        groups = median_of(values["groups_us_per_token"] for values in runs)
        total = sum(groups.values())
        ordered = sorted(groups.items(), key=lambda item: -item[1])
        rows += [[name, f"{value:.2f}", f"{value / total:.0%}"] for name, value in ordered if value >= total / 200]
        rows.append([f"all, {streams}", f"{total:.2f}", ""])
    return markdown(["where", "CPU us/token", "share"], rows)


def main() -> None:
    """Runs the command line."""
    flags = compare.parser("Where the CPU time of a streamed token goes.", rounds=1)
    flags.add_argument("--streams", type=int, default=STREAMS)
    chosen = flags.parse_args()
    if shutil.which("perf") is None:
        raise SystemExit("perf is not installed")
    found = records.new("profile", chosen.rounds)
    models.build(force=False)
    work = workload(chosen.streams)
    for number in range(1, chosen.rounds + 1):
        with tempfile.TemporaryDirectory(prefix="forebay-bench-") as folder:
            data = Path(folder) / "perf.data"
            direct = server("direct")
            with start(direct, work.setting) as running:
                sampler = threading.Thread(target=record, args=(running.pid, data))
                sampler.start()
                values = load(direct, work, running)
                sampler.join()
            script = ["perf", "script", "-i", str(data), "-F", "comm,ip,sym"]
            done = subprocess.run(script, check=True, capture_output=True, text=True, errors="replace")
        counts = Counter(group(*sample) for sample in samples(done.stdout))
        each = values["server_cpu_us_per_token"] / counts.total()
        groups = {name: count * each for name, count in counts.most_common()}
        found.runs.append(Run(f"{chosen.streams} streams", "direct", number, {**values, "groups_us_per_token": groups}))
    compare.finish(found, chosen.output)


if __name__ == "__main__":
    main()
