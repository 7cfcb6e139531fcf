"""Angles from the table equal computed angles."""

from __future__ import annotations

import pytest
import torch

from forebay.layers.rotary import Rotary


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_angles_are_those_that_are_computed(dtype: torch.dtype) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    computed, kept = (Rotary(16, 1e4, scaling, 256, dtype, torch.device("cpu")) for _ in range(2))
    kept.keep(256)
    kept.keep(8)  # A second call keeps the first table.
    positions = torch.tensor([0, 255, 17, 17])
    for given, expected in zip(kept(positions), computed(positions), strict=True):
        assert given.equal(expected)
