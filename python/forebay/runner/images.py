"""Images in plans: layers of the vision tower run before a step's rows, which read the tower's output."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from forebay.device import Device
from forebay.layers.vision import Grid, ImageDecoder, Pixels, TowerState
from forebay.models.registry import Model
from forebay.protocol.constants import ImageRecord
from forebay.protocol.plan import Plan
from forebay.state.checks import PlanError, within
from forebay.state.config import ConfigError, RunnerConfig
from forebay.state.counts import Int64s
from forebay.state.images import PAGE_POSITIONS, ImagePool, SlotImages, entries_of, image_page_count, pages_of

_IMAGE_FACTS = ("image_page_count", "image_page_tokens", "tower_layers")


@dataclass
class _Encoding:
    """An image with layers that are not computed yet."""

    grid: Grid
    layer: int = 0
    """The next layer to queue."""
    state: TowerState | None = None
    """The image's state in the tower, on the device."""


class Images:
    """A model's vision tower, the pages for its output, and the images in slots."""

    def __init__(self, config: RunnerConfig, model: ImageDecoder, arena: npt.NDArray[np.uint8], device: Device) -> None:
        """Raises `ConfigError`."""
        images, vision = config.images, model.tower.vision
        if images is None:
            raise ConfigError(
                f"the description of a {model.config.architecture} does not say how images become patches"
            )
        self._tower, self._arena, self._device = model.tower, arena, device
        self._pixels = Pixels(images, device.torch_device, config.dtype)
        pages = image_page_count(config, images)
        self.nbytes = ImagePool.nbytes(vision, pages, config.dtype)
        """Bytes of the image pages."""
        self.pool = ImagePool(vision, pages, config.dtype, device)
        self.slots = SlotImages(config.slots, config.context_length, pages, whole=vision.both_ways)
        self.most_positions = min(images.most_positions, config.context_length, pages * PAGE_POSITIONS)
        """Positions of the largest image that fits."""
        self._encoding: dict[int, _Encoding] = {}

    @classmethod
    def of(cls, config: RunnerConfig, model: Model, arena: npt.NDArray[np.uint8], device: Device) -> Images | None:
        """Returns the images of a model; None for a text-only model."""
        return cls(config, model, arena, device) if isinstance(model, ImageDecoder) else None

    def facts(self) -> dict[str, int | str]:
        """The facts about images for `ready`."""
        values = self.pool.page_count, PAGE_POSITIONS, self._tower.vision.layers
        return dict(zip(_IMAGE_FACTS, values, strict=True))

    def warm_up(self, positions: int = 1) -> None:
        """Queues an image of one row of `positions`, or of the tower's fixed size. Its output is discarded."""
        vision, fixed = self._tower.vision, self._tower.fixed_grid
        grid = fixed or Grid(1, positions)
        # One layer of a fixed-size image already takes long, and all layers warm up the same code.
        end = vision.layers if fixed is None else 1
        bytes_ = np.zeros(grid.positions * vision.merge**2 * vision.patch_bytes, np.uint8)

        def work() -> None:
            (patches,) = self._device.copy_in(bytes_)
            state = self._begun(patches, grid)
            self._tower.layers(state, 0, end)
            self._tower.finish(state)

        self._device.queue(work)

    def read(self, plan: Plan) -> None:
        """Reads the plan's images and spans, and queues the plan's layers of the tower. Raises `PlanError`."""
        self.slots.read(plan)
        if not len(plan.images):
            return
        if len(plan.image_pages):
            within(plan.image_pages, self.pool.page_count, "image page")
            if len(set(plan.image_pages.tolist())) < len(plan.image_pages):
                raise PlanError(f"image pages {plan.image_pages.tolist()} are not distinct")
        edges = np.cumsum(plan.images[:, ImageRecord.PAGE_COUNT])[:-1]
        pages = np.split(plan.image_pages.astype(np.int64), edges)
        for words, of_image in zip(plan.images.tolist(), pages, strict=True):
            image, first, end, height, width, offset, _ = words
            if end == 0:
                self._forget(image, first, len(of_image))
            else:
                self._queue(image, (first, end), Grid(height, width), offset, of_image)

    def _forget(self, image: int, first: int, pages: int) -> None:
        if first or pages or self._encoding.pop(image, None) is None:
            raise PlanError(f"image {image} is given up, and no layer of it was computed")

    def _queue(self, image: int, layers: tuple[int, int], grid: Grid, offset: int, pages: Int64s) -> None:
        """Queues the layers `first .. end` of an image."""
        (first, end), last = layers, self._tower.vision.layers
        fixed = self._tower.fixed_grid
        if not first < end <= last or min(grid) < 1 or fixed not in (None, grid):
            raise PlanError(f"layers {first}..{end} of {last} of an image of {grid.height}x{grid.width} positions")
        if len(pages) != (pages_of(grid.positions) if end == last else 0):
            raise PlanError(f"{len(pages)} pages for layers {first}..{end} of {last} and {grid.positions} positions")
        if first == 0:
            if image in self._encoding:
                raise PlanError(f"image {image} begins again before its last layer")
            self._encoding[image] = _Encoding(grid)
        encoding = self._encoding.get(image)
        if encoding is None or encoding.layer != first or encoding.grid != grid:
            raise PlanError(f"layer {first} of image {image} is not the next one of such an image")
        if first == 0:
            self._device.queue(partial(self._begin, encoding, self._place(offset, grid)))
        encoding.layer = end
        self._device.queue(partial(self._run, encoding, first, end))
        if end == last:
            del self._encoding[image]
            entries = entries_of(pages, np.arange(grid.positions))
            self._device.queue(partial(self._keep, encoding, entries))

    def _place(self, offset: int, grid: Grid) -> slice:
        """Returns the range of bytes in the arena that contains an image's patches."""
        vision = self._tower.vision
        size = grid.positions * vision.merge**2 * vision.patch_bytes
        if not 0 <= offset <= len(self._arena) - size:
            raise PlanError(f"patches at bytes {offset}..{offset + size} of an arena of {len(self._arena)}")
        return slice(offset, offset + size)

    def _begin(self, encoding: _Encoding, place: slice) -> None:
        """Reads the patches. They are copied, so that no tensor refers to the arena. Runs as queued work."""
        (patches,) = self._device.copy_in(self._arena[place].copy())
        encoding.state = self._begun(patches, encoding.grid)

    def _begun(self, patches: torch.Tensor, grid: Grid) -> TowerState:
        """Returns the state before layer 0, computed from the bytes of all patches."""
        pixels = self._pixels.blocks(patches.view(-1, self._tower.vision.patch_bytes))
        return self._tower.begin(pixels, grid)

    def _run(self, encoding: _Encoding, first: int, end: int) -> None:
        """Computes layers. Runs as queued work."""
        assert encoding.state is not None
        self._tower.layers(encoding.state, first, end)

    def _keep(self, encoding: _Encoding, entries: Int64s) -> None:
        """Writes the tower's output to its pages. Runs as queued work."""
        assert encoding.state is not None
        (where,) = self._device.copy_in(entries)
        self.pool.write(where, self._tower.finish(encoding.state))
        encoding.state = None
