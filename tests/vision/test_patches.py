"""The patches of crates/vision equal those of transformers' image processors, value by value."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.gemma3.image_processing_gemma3 import Gemma3ImageProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor, smart_resize

from tests.vision.preparing import GEMMA3, HALF, KINDS, QWEN2_5, QWEN3, Family, Preparing, picture

FAMILIES = [QWEN3, QWEN2_5]
# The number of tested sizes. `make test-image-sizes` tests a thousand.
SIZES = int(os.environ.get("FOREBAY_IMAGE_SIZES", "60"))
# The longest side. It is smaller in an ordinary run, which must be short.
LONGEST = 3000 if SIZES > 100 else 1200


def processor(family: Family) -> Qwen2VLImageProcessor:
    return Qwen2VLImageProcessor(
        patch_size=family.patch,
        merge_size=family.merge,
        temporal_patch_size=2,
        size={"shortest_edge": family.min_pixels, "longest_edge": family.max_pixels},
        image_mean=list(family.mean),
        image_std=list(family.std),
    )


def values(patches: np.ndarray, family: Family, times: int = 2) -> torch.Tensor:
    """The hand's input from patches by a table, each patch repeated `times`: float32 [patches, 3 * times * patch^2]."""
    mean, std = torch.tensor(family.mean) * 255, torch.tensor(family.std) * 255
    table = (torch.arange(256, dtype=torch.float32)[None] - mean[:, None]) / std[:, None]
    colours = torch.from_numpy(patches.copy()).view(-1, 3, 1, family.patch**2).long()
    looked_up = table[torch.arange(3)[None, :, None, None], colours]
    return looked_up.expand(-1, -1, times, -1).reshape(len(patches), -1)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_value_is_that_of_transformers(vision: Preparing, family: Family, tmp_path: Path) -> None:
    reference = processor(family)
    random = np.random.default_rng([24, family.patch])
    for number in range(SIZES // 2):
        # Logarithms of sides are uniform, so there are as many small images as large ones.
        height, width = np.exp(random.uniform(np.log(28), np.log(LONGEST), 2)).astype(int).tolist()
        kind = KINDS[number % len(KINDS)]
        image = Image.fromarray(picture(kind, height, width, random))
        path = tmp_path / ("image.png" if number % 3 else "image.jpg")
        image.save(path, compress_level=1, quality=int(random.integers(1, 101)))
        with Image.open(path) as file:
            expected = reference(images=[file.convert("RGB")], return_tensors="pt")
        prepared = vision.prepare(path, family)
        told = f"{kind} of {height} x {width}"
        grid = [[1, prepared.grid[0] * family.merge, prepared.grid[1] * family.merge]]
        assert expected["image_grid_thw"].tolist() == grid, told
        assert torch.equal(values(prepared.patches, family), expected["pixel_values"]), told


def test_every_value_of_one_size_is_that_of_transformers(vision: Preparing, tmp_path: Path) -> None:
    """Images of any size and ratio become 896 x 896."""
    reference = Gemma3ImageProcessor(size={"height": 896, "width": 896}, image_mean=HALF, image_std=HALF)
    random = np.random.default_rng(27)
    for number in range(SIZES // 3):
        height, width = np.exp(random.uniform(np.log(28), np.log(LONGEST), 2)).astype(int).tolist()
        kind = KINDS[number % len(KINDS)]
        path = tmp_path / ("image.png" if number % 3 else "image.jpg")
        image = Image.fromarray(picture(kind, height, width, random))
        image.save(path, compress_level=1, quality=int(random.integers(1, 101)))
        with Image.open(path) as file:
            expected = reference(images=[file.convert("RGB")], return_tensors="pt")["pixel_values"][0]
        prepared = vision.prepare(path, GEMMA3)
        assert prepared.grid == (16, 16)
        squares = values(prepared.patches, GEMMA3, 1).view(16, 16, 4, 4, 3, 14, 14)
        found = squares.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, 896, 896)
        assert torch.equal(found, expected), f"{kind} of {height} x {width}"


def png_header(height: int, width: int) -> bytes:
    """The chunk of a PNG that has its size."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_grids_are_those_of_transformers(vision: Preparing, family: Family, tmp_path: Path) -> None:
    random = np.random.default_rng([25, family.patch])
    side = family.patch * family.merge
    sizes = np.exp(random.uniform(0, np.log(7000), (1000, 2))).astype(int).tolist()
    # Sizes halfway between two grids round to even. Others are at the limits on the number of pixels.
    sizes += [(side * rows // 2, side * columns // 2) for rows in range(1, 24) for columns in range(1, 24)]
    path = tmp_path / "image.png"
    for height, width in sizes:
        if max(height, width) > 200 * min(height, width):
            continue
        path.write_bytes(png_header(height, width))
        prepared = vision.prepare(path, family, rounds=0)
        expected = smart_resize(height, width, side, family.min_pixels, family.max_pixels)
        assert (prepared.grid[0] * side, prepared.grid[1] * side) == expected, (height, width)


def test_an_upright_image_is_resized_as_it_is_seen(vision: Preparing, tmp_path: Path) -> None:
    """The rows of the upright image are resized first, not those of the stored one."""
    random = np.random.default_rng(26)
    stored = Image.fromarray(picture("noise", 333, 411, random))
    exif = Image.Exif()
    exif[0x0112] = 6
    turned, upright = tmp_path / "turned.png", tmp_path / "upright.png"
    stored.save(turned, exif=exif)
    stored.transpose(Image.Transpose.ROTATE_270).save(upright)
    expected = vision.prepare(upright, QWEN3)
    prepared = vision.prepare(turned, QWEN3)
    assert prepared.grid == expected.grid
    assert np.array_equal(prepared.patches, expected.patches)
