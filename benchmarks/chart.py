"""The chart of docs/performance.md: Forebay's output rate beside that of its peers.

    python -m benchmarks.chart           # draws docs/performance/rates.svg from benchmarks/results/*.json
    python -m benchmarks.chart --check   # exits 1 if that would change it

A bar is a server's output rate divided by Forebay's, of the same workload and round; the median of the rounds. So
each group has its own scale.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from benchmarks import records
from benchmarks.records import Results
from benchmarks.servers import FOREBAY_CPU, ROOT

TARGET = ROOT / "docs/performance/rates.svg"
GROUPS = (
    ("host_ceiling", "64", "host alone, 64 streams"),
    ("host_ceiling", "1024", "host alone, 1024 streams"),
    ("cpu_model", "256/128, 1 at a time", "SmolLM2 on the CPU, 1 at a time"),
    ("cpu_model", "256/128, 8 at a time", "SmolLM2 on the CPU, 8 at a time"),
    ("cpu_model", "256/128, 32 at a time", "SmolLM2 on the CPU, 32 at a time"),
)
PEERS = {"vllm": "vLLM", "vllm, Rust front": "vLLM, Rust front end", "sglang": "SGLang", "llama-server": "llama-server"}
WIDTH, LABEL, BAR, GAP, HEAD = 760, 190, 16, 34, 40
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.title { font-weight: 600 }
.note { fill: #59636e; font-size: 12px }
.ours { fill: #0b6e72 }
.peer { fill: #8c959f }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc }
  .note { fill: #9198a1 }
  .ours { fill: #3fb6ba }
  .peer { fill: #6e7681 }
}
""".strip()


@dataclass(frozen=True)
class Bar:
    """A server's rate relative to Forebay's."""

    name: str
    share: float
    """The rate as a share of Forebay's."""
    rate: float
    """Output tokens a second."""
    ours: bool


def bars(found: Results, workload: str) -> list[Bar]:
    """Forebay's bar first, then those of the measured peers."""
    rate = {name: found.median(workload, name, "output_throughput") for name in (FOREBAY_CPU.name, *PEERS)}
    ours = rate[FOREBAY_CPU.name]
    assert ours, f"{workload} has no row of Forebay"
    rows = [Bar("Forebay", 1.0, ours, True)]
    for name, title in PEERS.items():
        # As in the tables: the median of the rounds' ratios, not the ratio of their medians.
        ratio = found.ratio(workload, FOREBAY_CPU.name, name, "output_throughput")
        if ratio and (value := rate[name]):
            rows.append(Bar(title, 1 / ratio.median, value, False))
    return rows


def group(title: str, rows: list[Bar], top: int) -> Iterator[str]:
    """Draws a workload's bars, from `top` downwards."""
    yield f'<text class="title" x="0" y="{top}">{escape(title)}</text>'
    room = WIDTH - LABEL - 150
    for at, bar in enumerate(rows):
        y = top + 10 + at * (BAR + 4)
        kind = "ours" if bar.ours else "peer"
        said = f"{bar.rate:,.0f} tokens/s" + ("" if bar.ours else f" ({1 / bar.share:.1f} times less)")
        yield f'<text x="{LABEL - 8}" y="{y + 12}" text-anchor="end">{escape(bar.name)}</text>'
        size = f'width="{max(1.0, room * bar.share):.1f}" height="{BAR}"'
        yield f'<rect class="{kind}" x="{LABEL}" y="{y}" {size} rx="2"/>'
        yield f'<text class="note" x="{LABEL + room * bar.share + 8:.1f}" y="{y + 12}">{said}</text>'


def draw(results: dict[str, Results]) -> str:
    """Draws the whole picture."""
    lines: list[str] = []
    top = HEAD
    for benchmark, workload, title in GROUPS:
        rows = bars(results[benchmark], workload)
        lines += group(title, rows, top)
        top += 10 + len(rows) * (BAR + 4) + GAP
    machines = sorted({found.machine["cpu"] for found in results.values()})
    lines.append(f'<text class="note" x="0" y="{top - 8}">{escape(", ".join(machines))} without AMX, 2 cores</text>')
    head = '<text class="title" x="0" y="14">Output tokens a second; a bar is the share of Forebay\'s</text>'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" role="img">'
    return "\n".join([opening, f"<style>{STYLE}</style>", head, *lines, "</svg>"]) + "\n"


def main() -> None:
    """Runs the command line."""
    flags = argparse.ArgumentParser(description="Draw the chart of docs/performance.md.")
    flags.add_argument("--check", action="store_true", help="change nothing; exit 1 if something would change")
    check: bool = flags.parse_args().check
    names = dict.fromkeys(benchmark for benchmark, _, _ in GROUPS)
    picture = draw({name: records.read(records.RESULTS / f"{name}.json") for name in names})
    if check and (not TARGET.is_file() or TARGET.read_text(encoding="utf-8") != picture):
        raise SystemExit("docs/performance/rates.svg is not what benchmarks/results says: python -m benchmarks.chart")
    TARGET.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
