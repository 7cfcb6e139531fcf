"""Sparse slots of a hand: against transformers, their copies and fences, their sizes, and refusals."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.described import model_config
from forebay.protocol.constants import COPY_FAILED, COPY_OK, COPY_RESTORE, COPY_RESTORE_INDEX, COPY_SAVE, NO_PAGE
from forebay.runner.copier import Copier
from forebay.runner.host_tier import HostMemory
from forebay.runner.runner import ModelRunner
from forebay.state.checks import PlanError
from forebay.state.config import ConfigError, RunnerConfig
from forebay.state.hot_rows import HotRows
from forebay.state.pages import page_bytes
from forebay.state.sizes import Sizes
from tests.hand.greedy import model_of
from tests.hand.sparse_slot import FULL, PROMPT, Slot, compare, says_what_transformers_says
from tests.hand.sparse_stories import EACH_HAND, HOST, SIZE, SPARSE, sparse_runner, twins
from tests.hand.support import (
    FAMILIES,
    PlanBuilder,
    Sampling,
    greedy_reference,
    hf_config,
    reference_model,
    runner_of,
    wire_config,
)

__all__ = ["twins"]


@EACH_HAND
@SPARSE
def test_a_sparse_slot_says_what_transformers_says(family: str, hand: dict[str, Any]) -> None:
    says_what_transformers_says(family, hand)


@EACH_HAND
@SPARSE
def test_a_slot_may_be_sparse_from_its_first_position(family: str, hand: dict[str, Any]) -> None:
    """This is the case of a preempted request whose pages do not fit on the device.

    Some queries have fewer positions than the top-k.
    """
    slot = Slot(family, **hand)
    results = []
    for position in range(len(PROMPT) + 6):
        builder = slot.plan()
        if position == 0:
            slot.write(builder, PROMPT, Sampling(logprobs=5))
            slot.become_sparse(builder, 0)
        page = position // SIZE
        if position % SIZE == 0 and page >= 2:
            # The save of this page has been reported.
            builder.page_writes.append((1, page - 2, NO_PAGE))
        builder.row(1, position, 1, position >= len(PROMPT) - 1)
        if position % SIZE == SIZE - 1:
            builder.copies.append((page, COPY_SAVE, 10 + page, 100 + page))
        result = slot.take(builder)
        if len(builder.copies):
            slot.until_ended(1)
        results += [result] if len(result.tokens) else []
    compare(results, family)


@EACH_HAND
def test_rows_that_do_not_wait_for_a_save_are_seen(hand: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is dropped before its save is reported. With a fence results are right, and without one they differ."""
    expected = greedy_reference(model_of("deepseek-v32"), PROMPT, 2)[1][1]

    def difference(order: str) -> tuple[float, int]:
        slot = Slot(kv_save_order=order, copy_gbps=1e-4, **hand)
        first = slot.plan()
        slot.write(first, PROMPT, Sampling(logprobs=130))
        first.row(1, 0, len(PROMPT))
        first.copies += [(index, COPY_SAVE, 10 + index, 100 + index) for index in range(FULL)]
        second = slot.plan()
        slot.become_sparse(second)
        second.row(1, len(PROMPT), 1)
        launched = [slot.runner.launch(builder.build()) for builder in (first, second)]
        results = [step.collect() for step in launched]
        waited = sum(int(result.copy_wait_us.sum()) for result in results)
        most = np.abs(results[1].logprob_values - expected[torch.from_numpy(results[1].logprob_ids).long()].numpy())
        return float(most.max()), waited

    page = page_bytes(model_config(config_json("deepseek-v32")), SIZE, torch.float32)
    for order in ("fence", "inline"):
        distance, waited = difference(order)
        assert distance < 1e-4
        assert waited > 0.9e6 * (FULL - 1) * page / 1e5
    distance, waited = difference("behind")
    assert distance > 0.1
    assert waited == 0
    monkeypatch.setattr(Copier, "wait_for_saves", lambda *_: None)
    assert difference("fence")[0] > 0.1


def config_json(family: str) -> dict[str, Any]:
    """The `config.json` of a family."""
    kind, config = FAMILIES[family]
    return hf_config(config, kind.__name__)


# Copies.


def parts(slot: Slot, hot: int, host: int) -> tuple[bytes, bytes]:
    main, index = (part.pieces()[0] for part in slot.runner.kv.parts)
    return main[hot].numpy().tobytes(), index[host].numpy().tobytes()


@SPARSE
def test_a_page_is_saved_from_two_places_and_restored_to_each(family: str) -> None:
    slot = Slot(family)
    slot.prefill()
    slot.until_ended(FULL)
    main, index = parts(slot, 12, 102)
    assert any(main)
    assert any(index)
    builder = slot.plan()
    builder.copies = [(1, COPY_RESTORE, 30, 102)]
    slot.take(builder)
    assert slot.until_ended(1) == [[1, COPY_OK]]
    assert parts(slot, 30, 102) == (main, index)
    _, pool = slot.runner.kv.parts
    pool.pieces()[0][102] = 0x5C
    builder = slot.plan()
    builder.copies = [(2, COPY_RESTORE, 31, 102), (3, COPY_RESTORE_INDEX, NO_PAGE, 102)]
    slot.take(builder)
    assert slot.until_ended(2) == [[2, COPY_OK], [3, COPY_OK]]
    assert parts(slot, 31, 102) == (main, index)
    assert not any(parts(slot, 32, 103)[0]), "no other page is written"


@SPARSE
def test_a_page_that_is_saved_by_positions_is_sealed_when_it_is_whole(family: str) -> None:
    slot = Slot(family)
    first = slot.plan()
    slot.write(first, PROMPT)
    first.row(1, 0, len(PROMPT))
    first.copies = [(1, COPY_SAVE, 12, 102), (2, COPY_SAVE, 12, 103), (3, COPY_SAVE, 12, 102)]
    # The second save copies page 12 to page 103 too. The index part of 103 belongs to another page.
    first.copy_spans = [(0, 1), (0, 0), (1, 2)]
    slot.take(first)
    assert slot.until_ended(3) == [[1, COPY_OK], [2, COPY_OK], [3, COPY_OK]]
    builder = slot.plan()
    builder.copies = [(4, COPY_RESTORE, 30, 102)]
    slot.take(builder)
    assert slot.until_ended(1) == [[4, COPY_FAILED]], "the last position is missing"
    builder = slot.plan()
    builder.copies, builder.copy_spans = [(5, COPY_SAVE, 12, 102)], [(3, 1)]
    slot.take(builder)
    slot.until_ended(1)
    builder = slot.plan()
    builder.copies = [(6, COPY_RESTORE, 30, 102), (7, COPY_RESTORE, 31, 103)]
    slot.take(builder)
    assert slot.until_ended(2) == [[6, COPY_OK], [7, COPY_OK]]
    assert parts(slot, 30, 102) == parts(slot, 12, 102)
    assert parts(slot, 31, 102)[0] == parts(slot, 12, 102)[0]


# Sizes.


@pytest.mark.parametrize("family", ["deepseek-v32", "glm-dsa-shared"])
def test_pages_are_what_the_formula_says(family: str) -> None:
    model = model_config(config_json(family))
    assert model.indexer is not None
    index = SIZE * model.indexer.position_elements * 4
    main = page_bytes(model, SIZE, torch.float32) - index

    def sizes(budget: int, **changes: Any) -> Sizes:
        wanted = {**HOST, "max_total_tokens": None, **changes}
        config = RunnerConfig.from_dict(wire_config(config_json(family), **wanted))
        rest = HotRows.bytes_of(config, model) + main
        return Sizes.of(config, model, 2 * (budget + rest + 5000), 5000)

    budget = 50 * (main + 4 * index)
    assert sizes(budget) == Sizes(50, 200)
    assert sizes(budget - 1) == Sizes(49, 196)
    assert sizes(budget, host_ratio=1.5).pages == int(budget / (main + 1.5 * index))
    assert sizes(budget, host_ratio=None, host_bytes=100 * (main + index)) == Sizes((budget - 100 * index) // main, 100)
    assert sizes(budget, host_pages=100) == Sizes((budget - 100 * index) // main, 100)
    assert sizes(0, max_total_tokens=30 * SIZE) == Sizes(30, 120)
    assert sizes(1 << 40) == Sizes(8 * 24, 4 * 8 * 24)
    with pytest.raises(ConfigError, match=r"5 pages of 4 tokens .* hot rows needs 6"):
        sizes(0, max_total_tokens=5 * SIZE)
    with pytest.raises(ConfigError, match="holds no page"):
        sizes(budget, host_ratio=None, host_bytes=10, max_total_tokens=30 * SIZE)


def test_tables_are_as_large_as_they_are_counted() -> None:
    slot = Slot()
    hot = slot.runner.tables.hot
    assert hot is not None
    tables = [hot.host_table, hot.table]
    for number in range(4):
        tables += hot.group(number)
    assert sum(table.nbytes for table in tables) == HotRows.bytes_of(slot.runner.config, slot.runner.decoder.config)


@pytest.mark.parametrize(("wanted", "rows"), [(0, 16), (8, 8), (9, 12), (30, 32)])
def test_ready_tells_hot_rows_in_whole_pages(wanted: int, rows: int) -> None:
    facts = sparse_runner("deepseek-v32", hot_row_tokens=wanted).facts()
    assert facts["hot_row_tokens"] == rows
    assert facts["host_page_count"] == 4 * int(facts["page_count"])


# Plans that are refused.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hot_row_tokens": 7}, "7 hot rows are not supported: use 8, as many as the model chooses, to 32767"),
        ({"hot_row_tokens": 32768}, "32768 hot rows"),
        ({"sparse_top_k": 9}, "a top-k of 9: the model chooses 8 positions"),
        ({"host_ratio": None}, "needs a host tier"),
        ({"kv_save_order": "sometimes"}, "save order 'sometimes' is not supported: use behind or fence or inline"),
    ],
)
def test_a_config_that_makes_no_sense(changes: dict[str, Any], message: str) -> None:
    assert sparse_runner("deepseek-v32", sparse_top_k=8).config.sparse_top_k == 8
    with pytest.raises(ConfigError, match=message):
        sparse_runner("deepseek-v32", **changes)


def test_a_model_without_an_indexer_is_refused() -> None:
    for family in ("deepseek-v3", "llama"):
        with pytest.raises(ConfigError, match=r"by an index, and \w+ForCausalLM reads all of them"):
            runner_of(reference_model(family), None, HostMemory(os.memfd_create("host"), 0), **HOST)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"host_writes": [(8, 0, 0)]}, "host write: slot 8..8"),
        ({"host_writes": [(0, 24, 0)]}, "host write: index 24..24"),
        ({"host_writes": [(0, 0, 768)]}, "host write: page 768..768"),
        ({"page_writes": [(0, 0, 192)]}, "page write: page"),
        ({"page_writes": [(0, 0, -2)]}, "page write: page"),
        ({"hot_rows": [(0, 0, 192), (0, 1, 5)]}, "hot rows: page 5..192"),
        ({"hot_rows": [(0, 2, 4), (0, 1, 5)]}, "hot rows: index 1..2"),
        ({"hot_rows": [(0, 1, 4), (0, 1, 5)]}, "2 pages for the hot rows of 1 slots, which need 2"),
        ({"hot_rows": [(0, 0, 4), (3, 1, 5)]}, "2 pages for the hot rows of 2 slots"),
        ({"copies": [(1, COPY_SAVE, 192, 0)]}, "a copy outside of 192 pages and 768 of the host"),
        ({"copies": [(1, COPY_SAVE, 1, 0)], "copy_spans": [(2, 3)]}, "outside of a page of 4"),
        ({"hot_rows": [(1, 0, 4), (1, 1, 5)], "rows": [(1, 9, 2, 1)]}, r"with \[2\] positions, and not one"),
    ],
)
def test_a_plan_outside_the_tables(columns: dict[str, Any], message: str) -> None:
    slot = Slot()
    assert (slot.runner.kv.page_count, slot.runner.host_pages) == (192, 768)
    builder = slot.plan()
    for name, values in columns.items():
        setattr(builder, name, values)
    with pytest.raises(PlanError, match=message):
        slot.take(builder)


def test_a_new_slot_names_no_page_and_is_not_sparse() -> None:
    slot = Slot()
    slot.prefill()
    slot.until_ended(FULL)
    builder = slot.plan()
    slot.become_sparse(builder)
    builder.row(1, len(PROMPT), 1)
    assert slot.take(builder).sparse_rows.size
    builder = slot.plan()
    builder.slot(1, PROMPT)
    slot.take(builder)
    tables = slot.runner.tables
    assert tables.hot is not None
    for table in (tables.page_table, tables.hot.host_table, tables.hot.table):
        assert (table[1] == NO_PAGE).all()
    builder = slot.plan()
    slot.write(builder, PROMPT)
    builder.row(1, 0, len(PROMPT))
    assert not slot.take(builder).sparse_rows.size


def test_without_hot_rows_no_slot_is_backed() -> None:
    runner = ModelRunner(RunnerConfig.from_dict(wire_config(config_json("deepseek-v32"))))
    for columns in ({"host_writes": [(0, 0, 0)]}, {"hot_rows": [(0, 0, 0)]}):
        builder = PlanBuilder(1, **columns)  # type: ignore[arg-type]
        with pytest.raises(PlanError, match="never sparse"):
            runner.step(builder.build())
