"""The benefit of a host tier for recorded traffic: prefix hits and replicas, by its size.

    python -m benchmarks.studies.plan_tiers --trace FILE

The trace is in Mooncake's format. Schedulers are real, devices and copies take the time that the profile states;
nothing is measured here, so one run is enough.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.cells import markdown
from benchmarks.servers import FOREBAY

RATIOS = (0, 1, 4, 16)
BAR = 40
"""The length of a bar for all prompt tokens, in characters."""


def plan(asked: argparse.Namespace, ratio: float) -> dict[str, Any]:
    """The output of one `forebay plan`."""
    with tempfile.TemporaryDirectory(prefix="forebay-plan-") as folder:
        output = Path(folder) / "plan.json"
        command = [str(FOREBAY), "plan", "--trace", str(asked.trace), "--sim-profile", asked.sim_profile]
        command += ["--slo", asked.slo, "--slo-percentile", str(asked.slo_percentile), "--router", asked.router]
        command += ["--hicache-ratio", str(ratio), "--output-file", str(output)]
        command += ["--max-replicas", str(asked.max_replicas), *asked.arguments]
        ended = subprocess.run(command, check=False, capture_output=True, text=True)
        if not output.is_file():
            raise SystemExit(ended.stderr)
        found: dict[str, Any] = json.loads(output.read_text())
        return found


def chosen(found: dict[str, Any]) -> dict[str, Any]:
    """The result for the planned number of replicas, or for the largest number that was tried."""
    tried: list[dict[str, Any]] = found["tried"]
    return next((outcome for outcome in tried if outcome["replicas"] == found["answer"]), tried[-1])


def row(ratio: float, found: dict[str, Any]) -> list[str]:
    """The row of one size of the host tier."""
    outcome = chosen(found)
    hits, host = outcome["prefix_hit_rate"], outcome["host_hit_rate"]
    bar = "█" * round(BAR * (hits - host)) + "░" * round(BAR * host)
    replicas = str(found["answer"]) if found["answer"] else f"more than {outcome['replicas']}"
    ttft = outcome["ttft_ms"]["p90"]
    return [f"{ratio:g}", f"{100 * hits:.1f} %", f"{100 * host:.1f} %", bar, replicas, f"{ttft:.0f}" if ttft else "-"]


def main() -> None:
    """Runs the command line."""
    flags = argparse.ArgumentParser(description="What a host tier is worth for a recorded traffic.")
    flags.add_argument("--trace", type=Path, required=True)
    flags.add_argument("--sim-profile", default="h100-llama-3.1-8b")
    flags.add_argument("--slo", default="ttft:2000")
    flags.add_argument("--slo-percentile", default="90")
    flags.add_argument("--router", default="prefix-aware")
    flags.add_argument("--max-replicas", type=int, default=64)
    flags.add_argument("arguments", nargs="*", help="further flags of `forebay plan`, after --")
    asked = flags.parse_args()
    rows = [row(ratio, plan(asked, ratio)) for ratio in RATIOS]
    heads = ["host pages by device pages", "prefix hits", "of them on the host", "", "replicas", "TTFT p90 ms"]
    print(markdown(heads, rows))


if __name__ == "__main__":
    main()
