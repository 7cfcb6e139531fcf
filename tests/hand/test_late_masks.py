"""A row whose mask is not ready gives no token. It gives the same token in a later step."""

from __future__ import annotations

import numpy as np
import pytest

from forebay.protocol.frames import WireError
from forebay.protocol.masks import EVERYTHING, INLINE, Masks
from tests.hand.greedy import model_of
from tests.hand.late_masks import PATTERN, Late, Step, check_late
from tests.hand.support import runner_of
from tests.hand.test_wire import frame_of


@pytest.mark.parametrize("device", ["cpu", "deferred"])
@PATTERN
def test_a_row_whose_mask_is_not_ready_says_the_same_later(device: str, late: Late) -> None:
    def step_of() -> Step:
        runner = runner_of(model_of("llama"), device=device)
        return lambda plan, masks: runner.step(plan, lambda: masks)

    check_late(step_of, late)


@pytest.mark.parametrize(("offset", "row"), [(INLINE, 0), (64, 0), (EVERYTHING, 1), (EVERYTHING, -1)])
def test_only_a_masked_row_without_a_mask_gives_no_token(offset: int, row: int) -> None:
    masks = Masks(1, np.array([offset], np.int32), np.zeros(5, np.int32), np.array([row], np.int32))
    with pytest.raises(WireError, match="without a token"):
        Masks.decode(frame_of(masks.encode()))
