"""A column that is tried, in PyTorch's hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from forebay.state.checks import PlanError
from tests.hand.greedy import model_of
from tests.hand.support import PlanBuilder, runner_of


def test_plans_come_in_the_order_in_which_they_were_made() -> None:
    runner = runner_of(model_of("llama"))
    for step, made in [(1, 5), (2, 5), (3, 9)]:
        runner.step(replace(PlanBuilder(step).build(), made_ms=np.array([made], np.int32)).staged())
    with pytest.raises(PlanError, match="made at 8 ms, behind one made at 9 ms"):
        runner.step(replace(PlanBuilder(4).build(), made_ms=np.array([8], np.int32)).staged())
