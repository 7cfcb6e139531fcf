"""The benchmark of a hand's host side: it times each part of a step, and counts launches outside of graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks import hand_host, in_process, records
from benchmarks.described import handshake_model
from benchmarks.gpu.shapes import SHAPES
from benchmarks.hand_host import CASES, HAND, PARTS, Case, Hand, Times
from benchmarks.records import Results, Run
from forebay.runner.warm import asking_all


@pytest.fixture(scope="module")
def hand() -> Iterator[Hand]:
    with hand_host.absent_gpu() as device:
        runner = in_process.runner(
            handshake_model(SHAPES["tiny"]),
            slots=66,
            context=hand_host.CONTEXT,
            tokens=66 * hand_host.CONTEXT,
            threads=1,
            device="cuda",
            attention_backend="triton",
            dummy=True,
        )
        runner.warm_up()
        yield Hand(runner, device)


def steps(hand: Hand, case: Case, count: int) -> tuple[Times, int]:
    """The times of some steps, and the number of launches of the last one."""
    hand.runner.launch(hand_host.first_plan(case, in_process.PAGE).staged()).collect()
    times = Times()
    for position in range(1, count):
        hand.step(hand_host.step_plan(case, position).encode(), times)
    with hand_host.Launches() as launches:
        hand.step(hand_host.step_plan(case, count).encode(), None)
    return times, launches.count


@pytest.mark.parametrize("case", [case for case in CASES if case.rows <= 64], ids=lambda case: case.name)
def test_a_step_of_graphs_is_two_copies(hand: Hand, case: Case) -> None:
    """The plan and the results are copied. Nothing else is launched one by one, whatever the sampling is."""
    times, launches = steps(hand, case, 20)
    values = times.values()
    assert all(values[name] > 0 for name in PARTS)
    assert values["all_p99"] >= values["all"] > max(values[name] for name in PARTS)
    # A penalty adds a third copy, of the rows of token counts.
    assert launches == (2 if case.penalty == 1 else 3)


def test_operators_behind_a_graph_are_counted(hand: Hand) -> None:
    """Rows with a bias are sampled by operators, which are launched one by one after the graph."""
    case = Case("8 decode rows with biases", 8)
    hand.runner.launch(asking_all(hand_host.first_plan(case, in_process.PAGE)).staged()).collect()
    with hand_host.Launches() as launches:
        hand.step(hand_host.step_plan(case, 1).encode(), None)
    assert launches.count > 20


def test_the_table_has_a_row_for_each_case() -> None:
    found = Results("hand_host", rounds=1)
    values = dict.fromkeys([*PARTS, "all", "all_p99"], 1.0)
    found.runs = [Run(case.name, HAND, 1, {**values, "launches": 2}) for case in CASES]
    table = hand_host.table(records.from_json(records.to_json(found)))
    assert [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[2 : 2 + len(CASES)]] == [
        case.name for case in CASES
    ]
