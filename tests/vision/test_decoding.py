"""Decoded images equal those of Pillow: all kinds of JPEG, other formats, orientation and transparency."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps

from tests.vision.preparing import KINDS, QWEN3, Pixels, Preparing, Refused, picture

# The number of JPEGs of each kind. `make test-image-sizes` tests more.
JPEGS = 150 if "FOREBAY_IMAGE_SIZES" in os.environ else 12
# Pillow guesses the encoded length of a progressive JPEG, and fails if a small image needs more.
ImageFile.MAXBLOCK = 1 << 20


def pillow(path: Path) -> Pixels:
    """The upright image on white, with three bytes for each pixel."""
    with Image.open(path) as file:
        image = ImageOps.exif_transpose(file)
        if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
            image = image.convert("RGBA")
            white = Image.new("RGB", image.size, (255, 255, 255))
            white.paste(image, mask=image.split()[3])
            image = white
        return np.asarray(image.convert("RGB"))


def difference(vision: Preparing, path: Path) -> int:
    """The largest difference of a value between our image and Pillow's."""
    ours, theirs = vision.pixels(path).astype(int), pillow(path).astype(int)
    assert ours.shape == theirs.shape
    return int(np.abs(ours - theirs).max())


def some_picture(random: np.random.Generator, longest: int = 300) -> Image.Image:
    # At least 2, because no side may be more than 200 times as long as the other.
    height, width = random.integers(2, longest if random.random() < 0.8 else 18, 2).tolist()
    return Image.fromarray(picture(KINDS[int(random.integers(4))], height, width, random))


def jpeg_options(random: np.random.Generator) -> dict[str, Any]:
    options: dict[str, Any] = {"quality": int(random.integers(1, 101)), "optimize": bool(random.random() < 0.3)}
    if random.random() < 0.3:
        options["restart_marker_blocks"] = int(random.integers(1, 20))
    elif random.random() < 0.2:
        options["restart_marker_rows"] = int(random.integers(1, 4))
    return options


@pytest.mark.parametrize("progressive", [False, True], ids=["baseline", "progressive"])
@pytest.mark.parametrize("kind", ["4:4:4", "4:2:2", "4:2:0", "4:1:1", "grey", "rgb", "cmyk", "ycck"])
def test_jpegs_are_those_of_pillow(vision: Preparing, kind: str, progressive: bool, tmp_path: Path) -> None:
    random = np.random.default_rng([27, progressive, *kind.encode()])
    for number in range(JPEGS):
        image, options = some_picture(random), jpeg_options(random)
        if kind == "grey":
            image = image.convert("L")
        elif kind == "rgb":
            options["keep_rgb"] = True
        elif kind in ("cmyk", "ycck"):
            image = image.convert("CMYK")
            options["subsampling"] = 0
        else:
            options["subsampling"] = kind
        path = tmp_path / f"{number}.jpg"
        image.save(path, progressive=progressive, **options)
        if kind == "ycck":
            # The coefficients are unchanged, but Adobe's segment now declares YCCK.
            file = bytearray(path.read_bytes())
            file[file.index(b"Adobe") + 11] = 2
            path.write_bytes(file)
        assert difference(vision, path) == 0, (image.size, options)


def test_inks_of_unequal_size_are_close(vision: Preparing, tmp_path: Path) -> None:
    """The exact decoder does not support these files, so another one reads them. Few values differ by more than 8."""
    random = np.random.default_rng(28)
    for subsampling in (1, 2):
        image = Image.fromarray(picture("photograph", 120, 150, random)).convert("CMYK")
        path = tmp_path / "image.jpg"
        image.save(path, quality=90, subsampling=subsampling)
        ours, theirs = vision.pixels(path).astype(int), pillow(path).astype(int)
        assert (np.abs(ours - theirs) > 8).mean() < 0.02


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_pngs_are_those_of_pillow(vision: Preparing, mode: str, tmp_path: Path) -> None:
    random = np.random.default_rng([29, *mode.encode()])
    for number in range(6):
        image = some_picture(random, 100)
        if mode in ("LA", "RGBA"):
            alpha = Image.fromarray(picture("noise", image.height, image.width, random)[..., 0])
            image = image.convert(mode[:-1])
            image.putalpha(alpha)
        else:
            image = image.convert(mode)
        path = tmp_path / f"{number}.png"
        if mode == "P" and number % 2:
            image.info["transparency"] = 3
        image.save(path)
        assert difference(vision, path) == 0, (mode, image.size)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_orientation_is_applied(vision: Preparing, suffix: str, orientation: int, tmp_path: Path) -> None:
    image = Image.fromarray(picture("noise", 33, 70, np.random.default_rng(30)))
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"image.{suffix}"
    image.save(path, exif=exif, lossless=True)
    assert difference(vision, path) == 0
    assert vision.prepare(path, QWEN3, rounds=0).size == pillow(path).shape[:2]


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB"])
def test_bitmaps_and_gifs_are_those_of_pillow(vision: Preparing, mode: str, tmp_path: Path) -> None:
    random = np.random.default_rng([31, *mode.encode()])
    for suffix in ("bmp", "gif"):
        for _ in range(5):
            path = tmp_path / f"image.{suffix}"
            some_picture(random, 100).convert(mode).save(path)
            assert difference(vision, path) == 0, suffix


def test_webps_are_those_of_pillow(vision: Preparing, tmp_path: Path) -> None:
    """Lossless images are equal. In lossy ones, colors are interpolated with other roundings."""
    random = np.random.default_rng(32)
    path = tmp_path / "image.webp"
    for number in range(8):
        image = some_picture(random, 200)
        image.save(path, lossless=True)
        assert difference(vision, path) == 0
        image.putalpha(Image.fromarray(picture("noise", image.height, image.width, random)[..., 0]))
        image.save(path, lossless=True, exact=True)
        assert difference(vision, path) == 0
        image.convert("RGB").save(path, quality=[1, 50, 90, 100][number % 4])
        assert difference(vision, path) <= 2


def test_of_an_animation_the_first_frame_is_seen(vision: Preparing, tmp_path: Path) -> None:
    random = np.random.default_rng(33)
    first, second = (Image.fromarray(picture("blocks", 40, 60, random)) for _ in range(2))
    for suffix in ("gif", "png", "webp"):
        path = tmp_path / f"image.{suffix}"
        # Formats without these options ignore them.
        first.save(path, save_all=True, append_images=[second], lossless=True)
        assert difference(vision, path) == 0, suffix


def test_of_sixteen_bits_the_upper_eight_are_kept(vision: Preparing, tmp_path: Path) -> None:
    """The reference is not Pillow: it clips gray values above 255, which makes nearly all of the image white."""
    deep = np.random.default_rng(34).integers(0, 1 << 16, (20, 30), dtype=np.uint16)
    path = tmp_path / "image.png"
    Image.fromarray(deep).save(path)
    assert np.array_equal(vision.pixels(path), np.repeat((deep >> 8).astype(np.uint8)[..., None], 3, -1))


@pytest.mark.parametrize("progressive", [False, True])
def test_half_a_jpeg_is_refused_as_pillow_refuses_it(vision: Preparing, progressive: bool, tmp_path: Path) -> None:
    path = tmp_path / "image.jpg"
    Image.fromarray(picture("noise", 100, 100, np.random.default_rng(35))).save(path, progressive=progressive)
    whole = path.read_bytes()
    for length in (len(whole) // 2, len(whole) - 20):
        path.write_bytes(whole[:length])
        with pytest.raises(OSError, match="truncated"):
            pillow(path)
        with pytest.raises(Refused, match="the JPEG file is damaged or incomplete"):
            vision.pixels(path)
