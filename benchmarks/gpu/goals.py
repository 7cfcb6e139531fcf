"""Goals of a hand on an H200. Floors are bytes by the speed of a copy on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.records import Results


@dataclass(frozen=True)
class Goal:
    """A number of a case: at most `must`, or at least it where more is better."""

    name: str
    case: tuple[str, str, str]
    """Workload, shape and key of the results."""
    unit: str
    must: float
    aim: float
    floor: float | None = None
    others: str = ""
    more: bool = False
    scale: float = 1.0
    """From the results' unit to this."""

    def measured(self, found: Results) -> float | None:
        """The median of the results; None: it was not measured."""
        value = found.median(*self.case)
        return None if value is None else value * self.scale

    def reached(self, value: float) -> str:
        """The better one of both that a value reaches."""
        for name, bound in (("aim", self.aim), ("must", self.must)):
            if value >= bound if self.more else value <= bound:
                return name
        return "missed"


SMALL, LARGE = "Qwen3-0.6B", "Qwen3-8B"
STEP = "step_p50"
GOALS: Sequence[Goal] = (
    Goal(
        "0.6B, 1 row, short context",
        ("steps: decode 1 x 512", SMALL, STEP),
        *("ms", 1.1, 0.75, 0.28),
        "vLLM 0.19 on an H100 at 16 requests a second: TPOT 2.39 ms (kvcached #331)",
        scale=1e-3,
    ),
    Goal("8B, 1 row", ("steps: decode 1 x 512", LARGE, STEP), "ms", 5.0, 4.2, 3.5, scale=1e-3),
    Goal("0.6B, 64 rows x 512", ("steps: decode 64 x 512", SMALL, STEP), "ms", 2.4, 1.9, 1.15, scale=1e-3),
    Goal(
        "8B, 256 rows x 1500",
        ("steps: decode 256 x 1500", LARGE, STEP),
        *("ms", 24, 20, 16.7),
        "SGLang 16.2k and vLLM 12.6k tokens/s, offline ShareGPT, bfloat16, H100 (AIMultiple)",
        scale=1e-3,
    ),
    Goal("8B, 2048 tokens of a prompt", ("steps: prefill 2048", LARGE, STEP), "ms", 80, 55, 38, scale=1e-3),
    Goal(
        "0.6B server, 512/128, 500 prompts at once",
        ("server: all 500 at once, 512/128", SMALL, "request_throughput"),
        *("req/s", 150, 250, None),
        "vLLM 0.19 on an H100: 94.9 req/s (kvcached #331)",
        more=True,
    ),
    *(
        Goal(
            f"idle between decode steps, 0.6B, rows: {rows}",
            (f"steps: decode {rows} x 512", SMALL, "idle_percent"),
            "%",
            2,
            1,
        )
        for rows in (1, 64, 256)
    ),
    Goal("64 draws of 151 936", ("operators: draw, 64 rows", SMALL, "us"), "us", 150, 150),
    Goal("64 largest logits", ("operators: largest logit, 64 rows", SMALL, "us"), "us", 15, 15),
    *(
        Goal(
            f"the host's time for a launch, 0.6B, rows: {rows}",
            (f"steps: decode {rows} x 512", SMALL, "host_p50"),
            "us",
            120,
            120,
        )
        for rows in (1, 256)
    ),
)
