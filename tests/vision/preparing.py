"""A process of crates/vision that makes patches, and pictures to test it with."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from tests.binary import example

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Family:
    """The parameters with which a family of models prepares images.

    If `min_pixels` is 0, each image has `max_pixels` positions, with as many rows as columns.
    """

    name: str
    patch: int
    merge: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


HALF = (0.5, 0.5, 0.5)
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
QWEN3 = Family("Qwen3-VL", 16, 2, 65_536, 16_777_216, HALF, HALF)
QWEN2_5 = Family("Qwen2.5-VL", 14, 2, 3_136, 12_845_056, CLIP_MEAN, CLIP_STD)
# Each image has 256 positions.
GEMMA3 = Family("Gemma 3", 14, 4, 0, 256, HALF, HALF)
# Each pixel is a patch, without resizing, so the patches are the decoded image.
AS_IT_IS = Family("as it is", 1, 1, 1, 1 << 30, HALF, HALF)


class Refused(Exception):
    """The crate's error for a file."""


@dataclass(frozen=True)
class Prepared:
    """The size of the upright image, its grid, its patches, and the seconds of all rounds together.

    Patches are uint8 [patches, 3 * patch * patch].
    """

    size: tuple[int, int]
    grid: tuple[int, int]
    patches: Pixels
    seconds: float


class Preparing:
    """A process of crates/vision's example `prepare`."""

    def __init__(self, program: Path | None = None) -> None:
        command = [str(program or example("prepare"))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __enter__(self) -> Preparing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate(timeout=60)

    def prepare(self, path: Path, family: Family, rounds: int = 1) -> Prepared:
        """The patches of a file. With 0 rounds only its size and grid."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        words = (family.patch, family.merge, family.min_pixels, family.max_pixels, rounds, path)
        self._process.stdin.write((" ".join(map(str, words)) + "\n").encode())
        self._process.stdin.flush()
        answer = self._process.stdout.readline().decode().rstrip("\n")
        kind, _, rest = answer.partition(" ")
        if kind == "error":
            raise Refused(rest)
        assert kind == "ok", f"the process ended: {answer!r}"
        height, width, rows, columns, count, nanoseconds = map(int, rest.split())
        patches = np.frombuffer(self._process.stdout.read(count), np.uint8)
        return Prepared(
            (height, width), (rows, columns), patches.reshape(-1, 3 * family.patch**2), int(nanoseconds) / 1e9
        )

    def pixels(self, path: Path) -> Pixels:
        """The decoded image [height, width, 3]."""
        prepared = self.prepare(path, AS_IT_IS)
        return prepared.patches.reshape(*prepared.size, 3)


def picture(kind: str, height: int, width: int, random: np.random.Generator) -> Pixels:
    """Pixels [height, width, 3] of a `kind`.

    Kinds are noise, a gradient, flat blocks, and waves with a little noise, which resemble photographs.
    """
    if kind == "noise":
        return random.integers(0, 256, (height, width, 3), dtype=np.uint8)
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    if kind == "gradient":
        planes = [x / max(width - 1, 1), y / max(height - 1, 1), (x + y) / (width + height)]
        return (np.stack(planes, -1) * 255).astype(np.uint8)
    if kind == "blocks":
        blocks = random.integers(0, 256, (height // 7 + 1, width // 7 + 1, 3), dtype=np.uint8)
        return blocks.repeat(7, 0).repeat(7, 1)[:height, :width]
    waves = np.zeros((height, width, 3), np.float32)
    for _ in range(6):
        along, down = random.uniform(0.005, 0.3, 2).astype(np.float32)
        waves += np.sin((x * along + y * down)[..., None] + random.uniform(0, 6, 3).astype(np.float32))
    noise = random.normal(0, 4, waves.shape).astype(np.float32)
    return np.clip(127 + waves * 20 + noise, 0, 255).astype(np.uint8)


KINDS = ("noise", "gradient", "blocks", "photograph")
