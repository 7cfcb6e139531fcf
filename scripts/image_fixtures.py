"""Writes what crates/vision is held against: what Pillow, torchvision and transformers make of the same images.

Run it with pillow, torchvision and transformers installed: `python scripts/image_fixtures.py`. The tests read only
what it wrote.
"""

from __future__ import annotations

import io
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

FOLDER = Path(__file__).parents[1] / "crates/vision/tests/data"
GEOMETRIES = [(16, 65_536, 16_777_216), (14, 3136, 12_845_056)]
"""Patch, fewest and most pixels: of Qwen3-VL and Qwen2.5-VL."""
MERGE = 2
SIZES = 1000
LARGEST = 3000


def drawn(kind: int, width: int, height: int, seed: int) -> Any:
    """An image that tests draw again: noise, a gradient, or waves; uint8 [height, width, 3]."""
    axes = np.meshgrid(np.arange(height), np.arange(width), np.arange(3), indexing="ij")
    y, x, c = (axis.astype(np.uint64) for axis in axes)
    if kind == 0:
        bits = (y * 2_654_435_761 + x * 2_246_822_519 + c * 3_266_489_917 + seed * 668_265_263) & 0xFFFF_FFFF
        bits = ((bits ^ (bits >> np.uint64(15))) * 2_246_822_519) & 0xFFFF_FFFF
        values = bits >> np.uint64(24)
    elif kind == 1:
        values = (x * (1 + seed % 3) + y * (1 + seed % 5) + c * 40 + seed) >> np.uint64(2)
    else:
        values = (x * x * (1 + seed % 7) + y * y * 3 + x * y * c + seed) >> np.uint64(9)
    return (values & 255).astype(np.uint8)


def resized() -> list[list[int]]:
    """Of images of random sizes: patch, width, height, kind, seed; and rows, columns and the CRC-32 of the patches."""
    random = np.random.default_rng(7)
    found = []
    for number in range(SIZES):
        patch, least, most = GEOMETRIES[number % 2]
        longest = LARGEST if number % 10 == 0 else 700
        width, height = (int(side) for side in random.integers(28, longest, 2))
        kind, seed = number % 3, int(random.integers(0, 1 << 20))
        pixels = drawn(kind, width, height, seed)
        processor = Qwen2VLImageProcessor(
            patch_size=patch,
            merge_size=MERGE,
            size={"shortest_edge": least, "longest_edge": most},
            do_normalize=False,
            do_rescale=False,
        )
        image = torch.from_numpy(pixels).permute(2, 0, 1)
        given = processor(images=[image], return_tensors="pt")
        _, high, wide = given["image_grid_thw"][0].tolist()
        # Values of both frames of a still image are equal; they are still bytes.
        values = given["pixel_values"].reshape(high * wide, 3, 2, patch * patch)[:, :, 0]
        mine = values.to(torch.uint8).numpy().tobytes()
        found.append([patch, width, height, kind, seed, high // MERGE, wide // MERGE, zlib.crc32(mine)])
    return found


def photograph(width: int, height: int, seed: int) -> Image.Image:
    """Waves with some noise."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    waves = [127 + 100 * np.sin(x / 17 + y / 31), 127 + 90 * np.cos(x / 23 - y / 11), 127 + 80 * np.sin((x + y) / 29)]
    values = np.stack(waves, -1) + random.normal(0, 6, (height, width, 3))
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    """A file."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def files() -> dict[str, bytes]:
    """Small files of all formats, by name."""
    found = {}
    random = np.random.default_rng(3)
    for number in range(12):
        width, height = (int(side) for side in random.integers(1, 60, 2))
        image = photograph(width, height, number)
        options: dict[str, Any] = {"quality": int(random.integers(1, 101)), "progressive": number % 3 == 0}
        options["subsampling"] = ("4:4:4", "4:2:2", "4:2:0", "4:1:1")[number % 4]
        if number % 5 == 0:
            options["restart_marker_rows"] = 1
        if number % 11 == 0:
            image = image.convert("L")
            del options["subsampling"]
        found[f"{number:02}.jpg"] = encoded(image, "JPEG", **options)
    cmyk = photograph(33, 21, 50).convert("CMYK")
    found["cmyk.jpg"] = encoded(cmyk, "JPEG", quality=90)
    for turn in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = turn
        found[f"turned{turn}.jpg"] = encoded(photograph(37, 18, turn), "JPEG", quality=90, exif=exif)
    exif = Image.Exif()
    exif[0x0112] = 6
    found["turned6.png"] = encoded(photograph(13, 8, 60), "PNG", exif=exif)
    plain = photograph(31, 17, 61)
    found["plain.png"] = encoded(plain, "PNG")
    found["grey.png"] = encoded(plain.convert("L"), "PNG")
    found["palette.png"] = encoded(plain.quantize(32), "PNG")
    found["bits.png"] = encoded(plain.convert("1"), "PNG")
    found["plain.bmp"] = encoded(plain, "BMP")
    found["plain.gif"] = encoded(plain.quantize(64), "GIF")
    found["frames.gif"] = encoded(
        plain.quantize(64), "GIF", save_all=True, append_images=[photograph(31, 17, 62).quantize(64)]
    )
    found["lossless.webp"] = encoded(plain, "WEBP", lossless=True)
    return found


def main() -> None:
    """The command."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "resized.json").write_text("[\n" + ",\n".join(map(json.dumps, resized())) + "\n]\n")
    read = {}
    for name, content in files().items():
        (FOLDER / name).write_bytes(content)
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB")
        read[name] = [image.width, image.height, zlib.crc32(np.asarray(image).tobytes())]
        if name.endswith(".jpg"):
            # Decoders differ by some levels, so what Pillow reads is kept.
            (FOLDER / f"{name}.png").write_bytes(encoded(image, "PNG"))
    (FOLDER / "files.json").write_text(json.dumps(read, indent=1) + "\n")


if __name__ == "__main__":
    main()
