"""Tables of values that only some new slots have."""

from __future__ import annotations

import numpy as np
import pytest

from forebay.device import open_device
from forebay.protocol.columns import SLOT_VALUES, PlanColumns
from forebay.protocol.constants import SLOT_VALUE_WORDS
from forebay.state.config import RunnerConfig
from forebay.state.slots import SlotTables
from tests.hand.support import FAMILIES, PlanBuilder, hf_config, wire_config

CONFIG = RunnerConfig.from_dict(wire_config(hf_config(FAMILIES["llama"][1], "LlamaForCausalLM"), slots=4))


def new_slots(slots: list[int], values: list[tuple[int, int]]) -> PlanBuilder:
    builder = PlanBuilder(slot_places=values)
    for slot in slots:
        builder.slot(slot, [1, 2])
    return builder


@pytest.mark.parametrize("change_logits", [False, True])
def test_a_new_slot_replaces_the_value_of_the_last_one(change_logits: bool) -> None:
    tables = SlotTables(CONFIG, 7, open_device("cpu", 1))
    places = tables.values("slot_places", -1, change_logits=change_logits)
    for slots, values, expected in [
        ([0, 2], [(2, 5)], [-1, -1, 5, -1]),
        ([3, 1], [(3, 0), (1, 9)], [-1, 9, 5, 0]),
        ([2, 1], [(1, 8)], [-1, 8, -1, 0]),
    ]:
        tables.read(new_slots(slots, values).build(), np.zeros(0, np.uint8))
        assert places.tolist() == expected
        with_value = dict(values).keys() if change_logits else ()
        assert [slot for slot in slots if not tables.plain[slot]] == [slot for slot in slots if slot in with_value]


def test_columns_of_values_have_their_records() -> None:
    assert {"segments", "embeds", "allowed_counts"} <= set(SLOT_VALUES)
    columns = PlanColumns()
    assert {getattr(columns, name).shape for name in SLOT_VALUES} == {(0, SLOT_VALUE_WORDS)}
