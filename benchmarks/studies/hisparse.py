"""The benefit of sparse decoding from host memory in simulated time: requests that run, tokens, and the wait for saves.

    python -m benchmarks.studies.hisparse

Schedulers are real; devices, copies and misses take the time of a profile, and nothing is measured. So one run is
enough, and a ratio is of two simulations of the same traffic. The number of misses among chosen positions is assumed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cells import markdown
from benchmarks.servers import FOREBAY

BLOCK_TOKENS = 512
"""Prompt tokens that a block id of a trace stands for."""


@dataclass(frozen=True)
class Setting:
    """A traffic pattern: this many requests at once, of equal lengths, without common prefixes."""

    profile: str
    requests: int
    input_tokens: int
    output_tokens: int
    running: int
    """The most running requests."""


PRESSURE = Setting("h200x8-v3.2-fp8", 256, 32_768, 8_192, 256)
"""The setting of the published claim of more than three times the output."""
PUBLISHED = Setting("h20x8-v3.2-bf16", 30, 8_192, 1_500, 5)
"""The setting in which SGLang #21932 moved the save after the forward pass."""
ARMS = {
    "token, inline": ("token", "inline"),
    "token, fence": ("token", "fence"),
    "token, behind": ("token", "behind"),
    "page, behind": ("page", "behind"),
}
"""Four arms: before that change, after it, without waiting, and with the default settings."""
MISSES = (20, 40, 100, 200, 400)
RATIO = "8"


def plan(setting: Setting, *flags: str) -> dict[str, Any]:
    """The result of one replica."""
    with tempfile.TemporaryDirectory(prefix="forebay-plan-") as folder:
        trace, output = Path(folder) / "trace.jsonl", Path(folder) / "plan.json"
        trace.write_text("".join(lines(setting)))
        command = [str(FOREBAY), "plan", "--trace", str(trace), "--sim-profile", setting.profile]
        command += ["--max-running-requests", str(setting.running), "--page-size", "64"]
        command += ["--chunked-prefill-size", "2048", "--max-replicas", "1", "--slo", "ttft:1e9"]
        ended = subprocess.run(
            [*command, "--output-file", str(output), *flags], check=False, capture_output=True, text=True
        )
        if not output.is_file():
            raise SystemExit(ended.stderr)
        outcome: dict[str, Any] = json.loads(output.read_text())["tried"][0]
        if outcome["completed"] != setting.requests:
            raise SystemExit(f"{outcome['refused']} of {setting.requests} requests were refused")
        return outcome


def lines(setting: Setting) -> Iterator[str]:
    """The lines of the traffic's trace."""
    blocks = -(-setting.input_tokens // BLOCK_TOKENS)
    for request in range(setting.requests):
        entry = {
            "timestamp": 0,
            "input_length": setting.input_tokens,
            "output_length": setting.output_tokens,
            "hash_ids": [request * blocks + block for block in range(blocks)],
        }
        yield json.dumps(entry) + "\n"


def pressure(setting: Setting, misses: tuple[int, ...]) -> str:
    """More requests than the device can hold: without sparse decoding, and with several miss rates per layer."""
    base = plan(setting)
    rows = [capacity_row("off", base, base)]
    for count in misses:
        found = plan(setting, "--enable-hisparse", "--hicache-ratio", RATIO, "--miss-rows", str(count))
        rows.append(capacity_row(f"{count} misses a layer", found, base))
    return markdown(["sparse decoding", "running", "", "tokens/s", "", "preemptions", "mean ITL ms"], rows)


def capacity_row(name: str, found: dict[str, Any], base: dict[str, Any]) -> list[str]:
    """A row of the table, with its ratios to the row without sparse decoding."""
    running, output = found["running_peak"], found["output_throughput"]
    return [
        name,
        str(running),
        f"{running / base['running_peak']:.2f}",
        f"{output:.0f}",
        f"{output / base['output_throughput']:.2f}",
        str(found["preemptions"]),
        f"{found['mean_tpot_ms']:.1f}",
    ]


def small(setting: Setting) -> str:
    """Fewer requests than the device can hold: sparse decoding should lose nothing."""
    rows = []
    for running in (1, 2, 4):
        few = Setting(setting.profile, 2 * running, setting.input_tokens, setting.output_tokens, running)
        base, found = plan(few), plan(few, "--enable-hisparse", "--hicache-ratio", RATIO)
        ratio = found["output_throughput"] / base["output_throughput"]
        rows.append(
            [str(running), f"{base['output_throughput']:.1f}", f"{found['output_throughput']:.1f}", f"{ratio:.3f}"]
        )
    return markdown(["at a time", "off, tokens/s", "on, tokens/s", "ratio"], rows)


def arms(setting: Setting) -> str:
    """The table of steps that wait for saves."""
    found = {
        name: plan(setting, "--enable-hisparse", "--kv-save", save, "--kv-save-order", order)
        for name, (save, order) in ARMS.items()
    }
    if found["page, behind"]["sparse"]["waited_s"] > 0:
        raise SystemExit("rows waited for pages that are saved behind the steps")
    base = found["token, inline"]
    rows = []
    for name, outcome in found.items():
        itl = outcome["itl_ms"]
        rows.append(
            [
                name,
                f"{outcome['mean_tpot_ms']:.2f}",
                f"{outcome['mean_tpot_ms'] / base['mean_tpot_ms']:.3f}",
                f"{itl['p50']:.2f}",
                f"{itl['p99']:.1f}",
                f"{outcome['sparse']['waited_s']:.2f}",
                str(outcome["steps"]),
            ]
        )
    return markdown(["saves", "mean ITL ms", "", "p50", "p99", "rows waited s", "steps"], rows)


def main() -> None:
    """Runs the command line."""
    flags = argparse.ArgumentParser(description="What sparse decoding from host memory is worth, in simulated time.")
    flags.add_argument("--quick", action="store_true", help="an eighth of the traffic")
    part = 8 if flags.parse_args().quick else 1
    crowd = Setting(
        PRESSURE.profile, PRESSURE.requests // part, PRESSURE.input_tokens, PRESSURE.output_tokens, PRESSURE.running
    )
    print(
        f"{crowd.requests} requests of {crowd.input_tokens} and {crowd.output_tokens} tokens at once, "
        f"{crowd.profile}:\n"
    )
    print(pressure(crowd, MISSES[1:3] if part > 1 else MISSES))
    print("\nThe same lengths, few at a time:\n")
    print(small(crowd))
    print(f"\nWhat waits for saves, {PUBLISHED.requests} requests of {PUBLISHED.input_tokens} and ", end="")
    print(f"{PUBLISHED.output_tokens} tokens, {PUBLISHED.running} at a time, {PUBLISHED.profile}:\n")
    print(arms(PUBLISHED))


if __name__ == "__main__":
    main()
