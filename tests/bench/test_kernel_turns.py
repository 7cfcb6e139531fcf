"""Two builds of the kernels in turns: who follows whom, and what the table says."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from benchmarks.studies import kernel_turns
from forebay.kernels.library import PARTS

if TYPE_CHECKING:
    from benchmarks.studies.kernel_turns import Measured, Pairs, Side


class Fake:
    """A side whose steps take longer and longer."""

    def __init__(self, name: str, log: list[str], factor: float) -> None:
        self._name, self._log, self._factor = name, log, factor
        self._count = 0

    def step(self, case: str) -> Measured:
        self._log.append(f"{self._name} {case}")
        self._count += 1
        return {"step": self._factor * self._count, **dict.fromkeys(PARTS, 0.01)}


def test_sides_alternate_and_the_first_pair_warms_up() -> None:
    log: list[str] = []
    old, new = (cast("Side", Fake(name, log, factor)) for name, factor in (("old", 3.0), ("new", 2.0)))
    found: Pairs = {}
    kernel_turns.turns(old, new, ["a"], 3, found)
    assert log == ["new a", "old a", "old a", "new a", "new a", "old a", "old a", "new a"]
    assert [(before["step"], after["step"]) for before, after in found["a"]] == [(6, 4), (9, 6), (12, 8)]
    kernel_turns.turns(old, new, ["a", "b"], 1, found)
    assert [len(found[case]) for case in "ab"] == [4, 1]


def test_the_table_has_ratios_of_pairs_and_leaves_out_what_takes_no_time() -> None:
    pairs = [({"step": old, **dict.fromkeys(PARTS, 0.01)}, {"step": new, **dict.fromkeys(PARTS, 0.01)}) for old, new in
             ((2.0, 1.0), (40.0, 10.0), (3.0, 1.0))]  # fmt: skip
    assert kernel_turns.table({"a": pairs}).splitlines()[2:] == ["| a | step | 3.00 | 1.00 | 3.00 | 2.00 and 4.00 |"]
