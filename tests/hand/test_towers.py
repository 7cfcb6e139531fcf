"""Towers against transformers: pixels, rows and deepstack outputs. Slices give the same bits as a whole run."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.layers.vision import Grid, ImageDecoder, Pixels, Tower
from forebay.models.qwen2_5_vl import windows
from forebay.weights.vision import Preprocessing
from tests.hand.image_models import FAMILIES, PREPROCESSING, Image, image_runner, model_of

CPU = torch.device("cpu")
GRIDS = [(1, 1), (1, 5), (4, 1), (3, 3), (7, 3), (6, 9), (20, 20)]
CONSTANTS = {
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "halves": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}


def tower_of(family: str) -> Tower:
    model = image_runner(family, image_pool_tokens=64, max_total_tokens=64).model
    assert isinstance(model, ImageDecoder)
    return model.tower


def run(tower: Tower, image: Image, cuts: list[int]) -> torch.Tensor:
    """The rows of an image. Layers are computed in slices that end at `cuts`."""
    with torch.inference_mode():
        state = tower.begin([image.pixels], image.grid)
        for first, end in pairwise([0, *cuts, tower.vision.layers]):
            tower.layers(state, first, end)
        return tower.finish(state)


def reference_rows(model: Any, image: Image) -> torch.Tensor:
    """The rows that transformers gives to the decoder and to its deepstack layers, side by side."""
    with torch.inference_mode():
        out = model.model.get_image_features(image.pixels, torch.tensor([image.patch_grid]))
    deepstack = [rows[0] for rows in getattr(out, "deepstack_features", None) or []]
    return torch.cat([out.pooler_output[0], *deepstack], dim=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_those_of_transformers(family: str) -> None:
    tower = tower_of(family)
    for grid in GRIDS:
        image = Image.random(*grid)
        rows = run(tower, image, [])
        expected = reference_rows(model_of(family), image)
        assert rows.shape == (image.grid.positions, tower.vision.position_elements)
        assert expected.abs().mean() > 0.05
        torch.testing.assert_close(rows, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_slices_give_the_bits_of_a_whole_run(family: str) -> None:
    tower, image = tower_of(family), Image.random(7, 5)
    whole = run(tower, image, [])
    for cuts in ([1], [2], [3], [1, 2], [1, 2, 3]):
        assert torch.equal(run(tower, image, cuts), whole)


@pytest.mark.parametrize("constants", CONSTANTS)
def test_pixels_have_the_bits_of_transformers(constants: str) -> None:
    """Rescaling and normalising are fused: both constants times 255 in float32, then a subtraction and a division."""
    mean, std = CONSTANTS[constants]
    images = Preprocessing(4, 2, 2, 64, 64, mean, std, 1 / 255)
    levels = np.random.default_rng(1).permutation(np.arange(3 * 256) % 256).astype(np.uint8)
    patches = torch.from_numpy(levels).view(-1, 3 * 16)
    given = Pixels(images, CPU)(patches)

    channels = patches.view(-1, 3, 1, 16).float()
    fused_mean, fused_std = (torch.tensor(values).view(3, 1, 1) * (1.0 / (1 / 255)) for values in (mean, std))
    # Both frames of a still image are equal.
    expected = channels.sub(fused_mean).div(fused_std).expand(-1, -1, 2, -1).reshape(len(patches), -1)
    assert torch.equal(given, expected)
    assert torch.equal(torch.cat(list(Pixels(images, CPU).blocks(patches.repeat(1000, 1)))), expected.repeat(1000, 1))


@given(st.integers(1, 13), st.integers(1, 13), st.integers(1, 5))
def test_windows_are_squares_and_each_position_is_in_one(height: int, width: int, side: int) -> None:
    order, groups = windows(Grid(height, width), side, 4, CPU)
    assert sorted(order.tolist()) == list(range(height * width))
    first = 0
    for group in groups:
        assert group.first == first
        first = group.tokens.stop
        for members in order[group.first // 4 : first // 4].view(group.count, -1):
            corners = {(at // width // side, at % width // side) for at in members.tolist()}
            assert len(corners) == 1
    assert first == 4 * height * width


def test_the_bytes_of_a_patch_are_what_the_description_says() -> None:
    assert tower_of("qwen3-vl").vision.patch_bytes == 3 * PREPROCESSING.patch**2
