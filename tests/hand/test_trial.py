"""A parameter that is tried, in PyTorch's hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from tests.hand.support import PlanBuilder, Sampling
from tests.hand.test_sampler import Rig


def sampled(percent: int, temperature: float) -> list[int]:
    rig, builder = Rig(5), PlanBuilder()
    for slot in range(4):
        builder.slot(slot, [1, 2], Sampling(temperature=temperature, seed=slot))
    values = [(slot, percent) for slot in range(4) if percent != 100]
    plan = replace(builder.build(), logit_percents=np.array(values, np.int32).reshape(-1, 2))
    rig.tables.read(plan, np.zeros(0, np.uint8))
    logits = torch.tensor([[0.1, 0.9, 1.7, 1.6, -1.0]] * 4)
    return rig.sample(logits, range(4), [2] * 4).tokens.tolist()


def test_a_percentage_multiplies_logits() -> None:
    assert sampled(50, 0.0) == sampled(100, 0.0) == [2] * 4
    assert sampled(0, 0.0) == [0] * 4
    assert sampled(50, 0.5) == sampled(100, 1.0)
