"""The images per second that one core converts to patches: crates/vision compared with Pillow and torchvision.

    python -m benchmarks.image_prepare --rounds 9

One core, no server. The input is a file in memory, the output the patches of Qwen3-VL. `forebay` and `pillow` give the
same bytes: a file is decoded, resized and put in patch order. `transformers` is the whole of its image processor, as
other servers call it, whose patches are float32, each twice; Forebay's hand makes such patches by a table.
"""

from __future__ import annotations

import io
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as vision
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor, smart_resize

from benchmarks import compare, records
from benchmarks.cells import markdown, number, spread, table_of
from benchmarks.records import Results, Run
from benchmarks.servers import ROOT
from tests.vision.preparing import QWEN3, Preparing, picture

SIDE = 1200
SECONDS = 0.5
"""Seconds of each measurement."""
PROGRAM = ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "release/examples/prepare"
NOTES = {
    "forebay": "crates/vision, built as users' binaries are",
    "pillow": "Pillow decodes, torchvision resizes bytes, torch puts them in patch order",
    "transformers": "Qwen2VLImageProcessor with its default backend, from Pillow's image to float32",
}


def files(folder: Path) -> dict[str, Path]:
    """Waves with a little noise in place of a photograph, and noise, each as JPEG and PNG."""
    random = np.random.default_rng(24)
    photograph = Image.fromarray(picture("photograph", SIDE, SIDE, random))
    noise = Image.fromarray(picture("noise", SIDE, SIDE, random))
    photograph.save(folder / "photograph.jpg", quality=85)
    noise.save(folder / "noise.jpg", quality=75)
    photograph.save(folder / "photograph.png")
    named = {"JPEG, photograph": "photograph.jpg", "JPEG, noise": "noise.jpg", "PNG, photograph": "photograph.png"}
    return {name: folder / file for name, file in named.items()}


def patches(file: bytes) -> torch.Tensor:
    """The uint8 patches [patches, 3 * patch * patch] that crates/vision gives for `file`."""
    image = vision.pil_to_tensor(Image.open(io.BytesIO(file)).convert("RGB"))
    side = QWEN3.patch * QWEN3.merge
    height, width = smart_resize(*image.shape[1:], side, QWEN3.min_pixels, QWEN3.max_pixels)
    resized = vision.resize(image, [height, width], InterpolationMode.BICUBIC, antialias=True)
    parts = resized.view(3, height // side, QWEN3.merge, QWEN3.patch, width // side, QWEN3.merge, QWEN3.patch)
    return parts.permute(1, 4, 2, 5, 0, 3, 6).reshape(-1, 3 * QWEN3.patch**2)


def processed(file: bytes, processor: Qwen2VLImageProcessor) -> torch.Tensor:
    """The float32 patches that transformers gives."""
    image = Image.open(io.BytesIO(file)).convert("RGB")
    found: torch.Tensor = processor(images=[image], return_tensors="pt")["pixel_values"]
    return found


def rate(work: Callable[[], object]) -> float:
    """Calls a second, measured over as many calls as fit."""
    count, start = 0, time.perf_counter()
    while time.perf_counter() < start + SECONDS:
        work()
        count += 1
    return count / (time.perf_counter() - start)


def ours(preparing: Preparing, path: Path) -> float:
    """Images per second. The program reads the file before its clock starts."""
    once = preparing.prepare(path, QWEN3, rounds=3).seconds / 3
    count = max(int(SECONDS / once), 1)
    return count / preparing.prepare(path, QWEN3, rounds=count).seconds


def measure(found: records.Results) -> None:
    """Measures every file with each program, in turn."""
    processor = Qwen2VLImageProcessor(
        patch_size=QWEN3.patch,
        size={"shortest_edge": QWEN3.min_pixels, "longest_edge": QWEN3.max_pixels},
        image_mean=list(QWEN3.mean),
        image_std=list(QWEN3.std),
    )
    with tempfile.TemporaryDirectory() as folder, Preparing(PROGRAM) as preparing:
        for name, path in files(Path(folder)).items():
            file = path.read_bytes()
            if not np.array_equal(patches(file).numpy(), preparing.prepare(path, QWEN3).patches):
                raise SystemExit(f"{name}: both do not give the same patches")
            work: dict[str, Callable[[], float]] = {
                "forebay": lambda path=path: ours(preparing, path),
                "pillow": lambda file=file: rate(lambda: patches(file)),
                "transformers": lambda file=file: rate(lambda: processed(file, processor)),
            }
            for number, server in records.in_turn(found.rounds, list(work)):
                value = work[server]()
                compare.say(f"{name}, {server}, round {number}: {value:.1f} images/s")
                found.runs.append(Run(name, server, number, {"images_per_second": value, "file_bytes": len(file)}))


@table_of("image_prepare")
def table(found: Results) -> str:
    """Images a second of one core; ratios are of the first row to the others."""
    head = ["file, 1200 x 1200", "MB", "by", "images/s", "forebay / this"]
    rows = []
    for workload in found.workloads():
        first = found.servers(workload)[0]
        for server in found.servers(workload):
            megabytes = (found.median(workload, server, "file_bytes") or 0) / 1e6
            rate = number(found.median(workload, server, "images_per_second"))
            ratio = spread(found.ratio(workload, first, server, "images_per_second"))
            rows.append([workload, f"{megabytes:.2f}", server, rate, ratio])
    return markdown(head, rows)


def main() -> None:
    """Runs the command line."""
    chosen = compare.parser("Compare how fast images are prepared.", rounds=9).parse_args()
    # The last core, since interrupts go to the first. Child processes inherit it.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    found = records.new("image_prepare", chosen.rounds)
    found.machine["cores"] = os.cpu_count()
    found.notes = NOTES
    torch.set_num_threads(1)
    measure(found)
    compare.finish(found, chosen.output)


if __name__ == "__main__":
    main()
