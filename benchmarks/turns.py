"""Prompts that share steps: the wait of short ones beside long ones, and the cost of limiting it, in virtual time.

    python -m benchmarks.turns --mooncake FILE

Schedulers are real, and the device takes the time of a profile (`forebay plan`). Nothing is measured here, so
one run is enough. Each traffic is simulated twice: without shares of a step and a bound of gaps, and with both.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import records
from benchmarks.cells import markdown, number, table_of
from benchmarks.records import Results, Run
from benchmarks.servers import FOREBAY

PROFILE = "h100-llama-3.1-8b"
SECONDS = 300
STATES = {"off": ("--disable-step-shares", "--disable-queue-moves", "--decode-gap-ms", "off"), "on": ()}
SHORT = 200
"""Tokens of a short prompt."""
ANSWER = 32
"""Tokens of an answer, unless the traffic says otherwise."""
FLOODS = (0, 10, 20, 40, 60, 80, 100)
"""Short prompts a second beside a long one."""


@dataclass(frozen=True)
class Entry:
    """A request of a traffic."""

    second: float
    prompt: int
    answer: int = ANSWER
    client: int = 0

    def line(self) -> str:
        """The request's line in a trace."""
        fields = {"timestamp": 1000 * self.second, "input_length": self.prompt, "output_length": self.answer}
        return json.dumps({**fields, "client": self.client})


@dataclass(frozen=True)
class Traffic:
    """A traffic, and the values of its outcome that are kept."""

    name: str
    entries: list[Entry]
    kept: Callable[[dict[str, Any]], dict[str, float | None]]
    arguments: tuple[str, ...] = ()
    replicas: int = 1


def stream(rate: float, seconds: float = SECONDS, client: int = 0, prompt: int = SHORT) -> list[Entry]:
    """Prompts of one length that arrive at random, at a mean rate a second."""
    chance = random.Random(7)
    found, at = [], 0.0
    while rate > 0 and (at := at + chance.expovariate(rate)) < seconds:
        found.append(Entry(at, prompt, client=client))
    return found


def every(seconds: float, prompt: int, client: int = 0, answer: int = ANSWER) -> list[Entry]:
    """One prompt every so many seconds, the first after half a second."""
    return [Entry(0.5 + at * seconds, prompt, answer, client) for at in range(int(SECONDS / seconds))]


def ttft(outcome: dict[str, Any], longer: bool, client: int | None = None) -> dict[str, float | None]:
    """The TTFT of short or of long prompts, in milliseconds."""
    for group in outcome["groups"]:
        if (group["prompts_from"] > 1) == longer and client in (None, group["client"]):
            found: dict[str, float | None] = group["ttft_ms"]
            return found
    return {}


def both(outcome: dict[str, Any]) -> dict[str, float | None]:
    """The TTFT of short prompts and of long ones."""
    short, long = ttft(outcome, longer=False), ttft(outcome, longer=True)
    values = {f"short_{key}": short.get(key) for key in ("p50", "p90", "p99")}
    return {**values, "long_p50": long.get("p50"), "long_max": long.get("max"), "goodput": outcome["goodput"]}


def gaps(outcome: dict[str, Any]) -> dict[str, float | None]:
    """The times between tokens of an answer."""
    return {f"gap_{key}": outcome["itl_ms"][key] for key in ("p50", "p99", "max")}


def throughput(outcome: dict[str, Any]) -> dict[str, float | None]:
    """Tokens a second, and the median TTFT."""
    return {"throughput": outcome["output_throughput"], "ttft_p50": outcome["ttft_ms"]["p50"]}


def chats() -> list[Entry]:
    """Requests with lengths like those of ShareGPT: log-normal, 220 tokens in and 190 out on average, all at once."""
    chance = random.Random(11)

    def length(mean: float, sigma: float) -> int:
        return max(4, min(2000, round(chance.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))))

    return [Entry(0.0, length(220, 1.2), length(190, 0.9)) for _ in range(3000)]


def uniform() -> list[Entry]:
    """Requests of 1024 tokens in and 128 out, all at once."""
    return [Entry(0.0, 1024, 128) for _ in range(2000)]


def skewed() -> list[Entry]:
    """A traffic in which every fourth prompt is long."""
    return [Entry(0.02 * at, 8000 if at % 4 == 0 else 500, 64) for at in range(3000)]


def tails(outcome: dict[str, Any]) -> dict[str, float | None]:
    """The TTFT of all requests, and the number of moves."""
    return {**{f"ttft_{key}": outcome["ttft_ms"][key] for key in ("p50", "p99")}, "moves": outcome["moves"]}


def streams_beside(prompt: int) -> list[Entry]:
    """64 streams, and every three seconds a long prompt whose answer has one token."""
    return [Entry(0.0, 128, 3000, 1) for _ in range(64)] + every(3, prompt, answer=1)[:20]


def traffics(mooncake: Path | None) -> list[Traffic]:
    """All traffics."""
    long = [Entry(1.0, 16_000, ANSWER, 1) for _ in range(64)]
    found = [Traffic("short prompts alone", stream(20), both)]
    for prompt in (32_000, 100_000):
        found.append(Traffic(f"{prompt} tokens alone", every(10, prompt), both))
        found.append(Traffic(f"short ones beside {prompt} tokens", stream(20) + every(10, prompt), both))
    other = stream(20) + every(10, 60_000, client=1)
    found.append(Traffic("short ones beside 60000 tokens of another client", other, both))
    for rate in FLOODS:
        flood = [*stream(rate, 60), Entry(10.0, 100_000)]
        found.append(Traffic(f"curve: {rate} short ones a second beside 100000 tokens", flood, both))
    found.append(Traffic("5 short ones a second alone", stream(5, 60), both))
    crowd = "5 short ones a second beside 64 prompts of 16000 tokens of another client"
    found.append(Traffic(crowd, stream(5, 60) + long, both))
    for gap in ("auto", "25", "40"):
        flags = () if gap == "auto" else ("--decode-gap-ms", gap)
        found.append(Traffic(f"64 streams beside 32000 tokens, gap {gap}", streams_beside(32_000), gaps, flags))
    four = "four replicas by round robin, one of which gets all long prompts"
    found.append(Traffic(four, skewed(), tails, replicas=4))
    found.append(Traffic("throughput: ShareGPT's lengths", chats(), throughput))
    found.append(Traffic("throughput: 1024 in, 128 out", uniform(), throughput))
    if mooncake is not None:
        found.append(Traffic("throughput: Mooncake's conversations", [], throughput, ("--trace", str(mooncake))))
    return found


def simulate(traffic: Traffic, state: tuple[str, ...]) -> dict[str, Any]:
    """The outcome of a traffic on one replica."""
    with tempfile.TemporaryDirectory(prefix="forebay-turns-") as folder:
        trace, output = Path(folder) / "trace.jsonl", Path(folder) / "plan.json"
        command = [str(FOREBAY), "plan", "--sim-profile", PROFILE, "--slo", "ttft:500", "--slo", "tpot:60"]
        command += ["--max-replicas", str(traffic.replicas), "--output-file", str(output)]
        if traffic.replicas > 1:
            # No number of replicas meets this target, so the plan reports the largest number.
            command += ["--slo", "e2el:0.001"]
        if "--trace" in traffic.arguments:
            # Ten times the rate that one replica can serve, so that the queue never runs empty.
            command += ["--num-prompts", "600", "--speed", "1000"]
        else:
            trace.write_text("".join(f"{entry.line()}\n" for entry in traffic.entries), encoding="utf-8")
            command += ["--trace", str(trace)]
        gap_is_off = "off" in state
        command += [*state, *(() if gap_is_off and "--trace" not in traffic.arguments else traffic.arguments)]
        ended = subprocess.run(command, check=False, capture_output=True, text=True)
        if not output.is_file():
            raise SystemExit(ended.stderr)
        outcome: dict[str, Any] = json.loads(output.read_text())["tried"][-1]
        return outcome


@table_of("turns")
def table(found: Results) -> str:
    """A row for each traffic, with its values without and with shares and the bound."""
    rows = []
    for name in found.workloads():
        keys = next(run.values for run in found.runs if run.workload == name)
        cells = []
        for state in STATES:
            values = {key: found.median(name, state, key) for key in keys}
            known = {key: value for key, value in values.items() if value is not None}
            cells.append(", ".join(f"{key.replace('_', ' ')} {number(value)}" for key, value in known.items()))
        rows.append([name, *cells])
    return markdown(["traffic (ms, tokens/s, or a share)", "off", "on"], rows)


def main() -> None:
    """Runs the command line."""
    flags = argparse.ArgumentParser(description="Short prompts beside long ones, in virtual time.")
    flags.add_argument("--mooncake", type=Path, help="Mooncake's conversation trace, for its throughput")
    flags.add_argument("--output", type=Path, help="the file of the results")
    chosen = flags.parse_args()
    found = records.new("turns", 0)
    for traffic in traffics(chosen.mooncake):
        for state, switches in STATES.items():
            values = traffic.kept(simulate(traffic, switches))
            found.runs.append(Run(traffic.name, state, 1, values))
            print(traffic.name, state, {key: value and round(value, 2) for key, value in values.items()}, flush=True)
    print(table(found))
    print(records.save(found, chosen.output))


if __name__ == "__main__":
    main()
