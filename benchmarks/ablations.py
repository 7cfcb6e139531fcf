"""The benefit of each mechanism: Forebay with and without it, side by side.

    python -m benchmarks.ablations --rounds 3 --only lookahead

A switch is a line of `SWITCHES`: its name, the flags with which it is on and off, and the workload that shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import compare, intake, models, records
from benchmarks.cells import markdown, number, spread, table_of
from benchmarks.load import Workload, measure
from benchmarks.records import Results
from benchmarks.servers import STEPS_OF_5_MS, TOKEN_EVERY_30_US, Forebay, Server, Setting

TINY = Setting(model="tiny", streams=256, context=512, threads=1)
PREFIXES = (
    *("--dataset-name", "generated-shared-prefix", "--gsp-num-groups", "8", "--gsp-prompts-per-group", "6"),
    *("--gsp-system-prompt-len", "1024", "--gsp-question-len", "32", "--gsp-output-len", "32"),
)
CHAT = Workload("chat, tiny model", TINY, 10, 128, requests=1024)
CHAT_5_MS = Workload("chat, simulated steps of 5 ms", TINY, 10, 128, requests=1024)
CHAT_30_US = Workload("chat, a simulated token every 30 us", replace(TINY, streams=2048), 10, 128, requests=4096)
SHARED = Workload(
    "48 prompts with 8 beginnings of 1024 tokens, SmolLM2",
    Setting(model="smollm2", streams=8, context=2048, step_tokens=1024),
    1056,
    32,
    requests=48,
    arguments=PREFIXES,
)
LONG_PREFIXES = (
    *("--dataset-name", "generated-shared-prefix", "--gsp-num-groups", "24", "--gsp-prompts-per-group", "20"),
    *("--gsp-system-prompt-len", "6000", "--gsp-question-len", "64", "--gsp-output-len", "16"),
)
LONG_SHARED = Workload(
    "480 prompts with 24 beginnings of 6000 tokens, simulated steps of 5 ms",
    Setting(model="smollm2", streams=64, context=8192, step_tokens=65536),
    6064,
    16,
    requests=480,
    arguments=LONG_PREFIXES,
)
LONG_SHARED_STATES = replace(
    LONG_SHARED,
    name="480 prompts with 24 beginnings of 6000 tokens, simulated Qwen3.6-35B-A3B on an H100",
    setting=replace(LONG_SHARED.setting, step_tokens=4096),
)
SHORT_AT_ONCE = Workload(
    "500 tokens in and 1 out, 256 at once, simulated steps of 5 ms",
    Setting(model="smollm2", streams=256, context=1024, step_tokens=65536),
    500,
    1,
    requests=4096,
)


@dataclass(frozen=True)
class Switch:
    """A mechanism that can be switched off."""

    name: str
    on: tuple[str, ...]
    off: tuple[str, ...]
    workload: Workload
    profile: str | None = None
    """The profile of the simulated device; None is the real hand."""
    elsewhere: str = ""
    """The published gain of a patch with the same idea, on other machines and models."""
    kind: type[Forebay] = Forebay
    once: Callable[[Server, Workload], dict[str, Any]] = measure
    """Measures one server of that kind under a workload."""

    @property
    def title(self) -> str:
        """The title of the switch's rows."""
        return f"{self.name}: {self.workload.name}"

    @property
    def servers(self) -> list[Forebay]:
        """The servers with the switch on and off."""
        return [
            self.kind(state, "forebay-chat", flags=flags, prefix_cache=True, profile=self.profile)
            for state, flags in (("on", self.on), ("off", self.off))
        ]


STREAMING = "SGLang #22658: throughput x1.20, TPOT x0.84"
INTAKE = "SGLang #13986: requests/s x1.05, P99 TTFT x0.95, P99 ITL x0.99"
STATES = "tpu-inference #3412: throughput x3.5"
TOKENIZING = "SGLang #9382: P99 x0.10 at 500 requests/s, x1.28 at 300"

SWITCHES = [
    Switch("lookahead", (), ("--lookahead", "0"), CHAT_5_MS, profile=STEPS_OF_5_MS),
    Switch("lookahead", (), ("--lookahead", "0"), CHAT),
    Switch("direct egress", (), ("--egress", "naive"), CHAT_30_US, TOKEN_EVERY_30_US, STREAMING),
    Switch("direct egress", (), ("--egress", "naive"), CHAT, elsewhere=STREAMING),
    Switch("prefix cache", (), ("--disable-radix-cache",), SHARED),
    Switch("text threads", (), ("--tokenizer-mode", "inline"), SHORT_AT_ONCE, STEPS_OF_5_MS, TOKENIZING),
    Switch(
        "intake threads",
        (),
        ("--inline-intake",),
        replace(intake.WORKLOAD, name="64 streams of 5 ms steps beside bursts of 96 requests with 1.4 MB"),
        STEPS_OF_5_MS,
        INTAKE,
        kind=intake.Case,
        once=intake.measure,
    ),
    Switch("state cache", (), ("--disable-state-cache",), LONG_SHARED_STATES, "h100-qwen3.6-35b-a3b", elsewhere=STATES),
    Switch("text cache", (), ("--text-cache-bytes", "0"), LONG_SHARED, profile=STEPS_OF_5_MS),
]


@table_of("ablations")
def table(found: Results) -> str:
    """A table with the ratio of on to off for every switch: throughput and latency."""
    head = [
        "switch",
        "workload",
        "tokens/s on",
        "off",
        "throughput on/off",
        "TTFT on/off",
        "ITL on/off",
        "CPU/token on/off",
        "P99 TTFT on/off",
        "P99 ITL on/off",
        "published elsewhere",
    ]
    keys = (
        *("output_throughput", "mean_ttft_ms", "mean_itl_ms", "server_cpu_us_per_token"),
        *("p99_ttft_ms", "p99_itl_ms"),
    )
    rows = []
    for case in found.workloads():
        switch, _, workload = case.partition(": ")
        throughputs = [number(found.median(case, state, "output_throughput")) for state in ("on", "off")]
        ratios = [spread(found.ratio(case, "on", "off", key)) for key in keys]
        rows.append([switch, workload, *throughputs, *ratios, found.elsewhere.get(switch, "-")])
    return markdown(head, rows)


def main() -> None:
    """Runs the command line."""
    flags = compare.parser("On/off ratios of Forebay's switches.", rounds=3)
    names = list(dict.fromkeys(switch.name for switch in SWITCHES))
    flags.add_argument("--only", choices=names, nargs="+", default=names, metavar="SWITCH", help=", ".join(names))
    chosen = flags.parse_args()
    found = records.new("ablations", chosen.rounds)
    found.elsewhere = {switch.name: switch.elsewhere for switch in SWITCHES if switch.elsewhere}
    models.build(force=False)
    for switch in SWITCHES:
        if switch.name in chosen.only:
            workload = replace(switch.workload, name=switch.title)
            compare.measure_in_turn(found, workload, switch.servers, chosen.rounds, switch.once)
    compare.finish(found, chosen.output)


if __name__ == "__main__":
    main()
