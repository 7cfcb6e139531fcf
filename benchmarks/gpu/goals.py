"""Goals of a hand, written for an H200. A slower card may take longer, by the ratio of its copies or products.

A floor is the bytes divided by the speed of a copy on the device; for a prompt, the products by that of a large one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.gpu.ceilings import COPY, PRODUCT, SIDE
from benchmarks.records import Results


@dataclass(frozen=True)
class Ceiling:
    """A limit of a card: its key in the results, and the H200's value."""

    case: tuple[str, str, str]
    h200: float


COPIES = Ceiling((f"ceilings: {COPY}", "device", "gbps"), 4300.0)
PRODUCTS = Ceiling((f"ceilings: {PRODUCT.format(side=SIDE)}", "device", "tflops"), 860.0)


@dataclass(frozen=True)
class Goal:
    """A goal for a case: at most `must`, or at least `must` if more is better."""

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
    """The factor from the unit of the results to `unit`."""
    bound: Ceiling | None = None
    """The limit of the card to which the time of this case is proportional."""

    def measured(self, found: Results) -> float | None:
        """The median of the results; None if the case was not measured."""
        value = found.median(*self.case)
        return None if value is None else value * self.scale

    def slower(self, found: Results) -> float:
        """How many times slower the card is than an H200; 1 where that does not matter or was not measured."""
        if self.bound is None:
            return 1.0
        value = found.median(*self.bound.case)
        return self.bound.h200 / value if value else 1.0

    def reached(self, value: float, slower: float = 1.0) -> str:
        """The better of the two goals that a value reaches, on a card that is slower by this factor."""
        for name, bound in (("aim", self.aim * slower), ("must", self.must * slower)):
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
        bound=COPIES,
    ),
    Goal("8B, 1 row", ("steps: decode 1 x 512", LARGE, STEP), "ms", 5.0, 4.2, 3.5, scale=1e-3, bound=COPIES),
    Goal(
        "0.6B, 64 rows x 512", ("steps: decode 64 x 512", SMALL, STEP), "ms", 2.4, 1.9, 1.15, scale=1e-3, bound=COPIES
    ),
    Goal(
        "8B, 256 rows x 1500",
        ("steps: decode 256 x 1500", LARGE, STEP),
        *("ms", 24, 20, 16.7),
        "SGLang 16.2k and vLLM 12.6k tokens/s, offline ShareGPT, bfloat16, H100 (AIMultiple)",
        scale=1e-3,
        bound=COPIES,
    ),
    Goal(
        "8B, 2048 tokens of a prompt",
        ("steps: prefill 2048", LARGE, STEP),
        "ms",
        80,
        55,
        38,
        scale=1e-3,
        bound=PRODUCTS,
    ),
    Goal(
        "0.6B server, 512/128, 500 prompts at once",
        ("server: all 500 at once, 512/128", SMALL, "request_throughput"),
        *("req/s", 150, 250, None),
        "vLLM 0.19 on an H100: 94.9 req/s (kvcached #331)",
        more=True,
    ),
    *(
        Goal(
            f"gaps between decode steps, 0.6B, rows: {rows}",
            (f"steps: decode {rows} x 512", SMALL, "gap_percent"),
            "%",
            2,
            1,
        )
        for rows in (1, 64, 256)
    ),
    *(
        Goal(
            f"no kernel runs, 0.6B, rows: {rows}",
            (f"steps: decode {rows} x 512", SMALL, "idle_percent"),
            "%",
            must,
            aim,
        )
        for rows, must, aim in ((1, 35, 15), (64, 15, 8), (256, 5, 2))
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
