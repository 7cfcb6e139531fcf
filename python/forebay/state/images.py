"""Images in slots: the pages of the tower's output, the positions of images, and RoPE positions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from forebay.device import Device
from forebay.protocol.constants import ImageSpanRecord, SlotRecord
from forebay.protocol.plan import Plan
from forebay.state.checks import PlanError, within
from forebay.state.config import ConfigError, RunnerConfig
from forebay.state.counts import Int64s, ragged
from forebay.weights.vision import Preprocessing, Vision

PAGE_POSITIONS = 64
"""The number of positions of an image page."""
_LEAST_POSITIONS = 8192
"""The smallest number of positions of a pool whose size is not given."""
_NOWHERE: Int64s = np.zeros(0, np.int64)


def image_page_count(config: RunnerConfig, images: Preprocessing) -> int:
    """Returns the number of image pages: for the given number of positions, or otherwise for twice the largest image.

    Raises `ConfigError`.
    """
    positions = config.image_pool_tokens
    if positions is None:
        positions = max(_LEAST_POSITIONS, 2 * min(images.most_positions, config.context_length))
    if positions < 1:
        raise ConfigError(f"image_pool_tokens {positions}: a model that sees images needs at least 1")
    return pages_of(positions)


def pages_of(positions: int) -> int:
    """Returns the number of image pages for this many positions."""
    return -(-positions // PAGE_POSITIONS)


class ImagePool:
    """The outputs of the vision tower, a row per position, `[pages * 64, (1 + deepstack) * hidden]`.

    The rows are zero at first.
    """

    def __init__(self, vision: Vision, pages: int, dtype: torch.dtype, device: Device) -> None:
        self.page_count = pages
        self._shape = (1 + len(vision.deepstack), vision.out_size)
        self._rows = device.zeros((pages * PAGE_POSITIONS, vision.position_elements), dtype)

    @staticmethod
    def nbytes(vision: Vision, pages: int, dtype: torch.dtype) -> int:
        """Returns the bytes of this many pages."""
        return pages * PAGE_POSITIONS * vision.position_elements * dtype.itemsize

    def write(self, entries: torch.Tensor, rows: torch.Tensor) -> None:
        """Stores rows [m, (1 + deepstack) * hidden] at entries int64 [m]. Runs as queued work."""
        self._rows.index_copy_(0, entries, rows)

    def read(self, entries: torch.Tensor) -> torch.Tensor:
        """Returns the rows at entries int64 [m], [m, 1 + deepstack, hidden]. Runs as queued work."""
        rows: torch.Tensor = self._rows.index_select(0, entries).unflatten(1, self._shape)
        return rows


def entries_of(pages: Int64s, positions: Int64s) -> Int64s:
    """Returns the pool entries of positions [m] of an image with these pages, in order."""
    return pages[positions // PAGE_POSITIONS] * PAGE_POSITIONS + positions % PAGE_POSITIONS


@dataclass(frozen=True)
class ImageSpan:
    """An image in a slot. Its positions are in row-major order."""

    first: int
    height: int
    width: int
    rope: int
    """The RoPE position of its first position."""
    pages: Int64s
    """The image pages of its positions; empty until a plan's row reaches the image."""

    @property
    def count(self) -> int:
        return self.height * self.width

    @property
    def end(self) -> int:
        return self.first + self.count


@dataclass(frozen=True)
class Tokens:
    """A step's `n` tokens, if slots have images; `m` tokens are in images."""

    positions: Int64s  # [n], or [3, n] (time, row, column) if the three differ
    at: Int64s  # [m]: the indices of tokens in images
    entries: Int64s  # [m]: the pool entries of their rows


class Layout:
    """The images of a slot, in order. A layout is immutable: changes create a new layout."""

    def __init__(self, spans: Iterable[ImageSpan]) -> None:
        """Raises `PlanError` if images overlap."""
        self._spans = sorted(spans, key=lambda span: span.first)
        for before, after in zip(self._spans, self._spans[1:], strict=False):
            if after.first < before.end:
                raise PlanError(f"images at positions {before.first}..{before.end} and from {after.first} on overlap")
        self.end = self._spans[-1].end
        """The position after the last image."""

    def with_(self, span: ImageSpan) -> Layout:
        """Returns the layout with this image added, or in place of the image with the same first position."""
        return Layout([span, *(old for old in self._spans if old.first != span.first)])

    @cached_property
    def shift(self) -> int:
        """The number to add to a position after the last image to get its RoPE position."""
        return int(self._columns[4][-1]) - self.end

    @cached_property
    def _columns(self) -> tuple[Int64s, ...]:
        """Per image: first position, count, width, and the RoPE positions of its first position and after its last."""
        words = [(s.first, s.count, s.width, s.rope, s.rope + max(s.height, s.width)) for s in self._spans]
        return tuple(np.array(words, np.int64).T)

    def check(self, start: int, end: int, whole: bool) -> None:
        """Raises `PlanError` if positions `start .. end` overlap an image without pages.

        With `whole`, also if `end` is within an image.
        """
        for first, behind in self.within(start, end):
            if whole and end < behind:
                raise PlanError(f"a row {start}..{end} ends within the image at positions {first}..{behind}")
        for span in self._spans:
            if start < span.end and span.first < end and not len(span.pages):
                raise PlanError(f"a row {start}..{end} in the image at position {span.first}, which has no pages")

    def within(self, start: int, end: int) -> list[tuple[int, int]]:
        """Returns the images that overlap positions `start .. end`: each one's first position, and its end."""
        return [(span.first, span.end) for span in self._spans if start < span.end and span.first < end]

    def positions(self, start: int, length: int) -> Int64s:
        """Returns the RoPE positions of `length` positions from `start` on, [3, length]."""
        first, count, width, rope, behind = self._columns
        at = np.arange(start, start + length)
        image = np.searchsorted(first, at, side="right") - 1
        # Before the first image the index is -1, which selects the last image's columns; their values are not used.
        offset = at - first[image]
        inside = (image >= 0) & (offset < count[image])
        text = np.where(image < 0, at, behind[image] + offset - count[image])
        row, column = offset // width[image], offset % width[image]
        numbers: Int64s = np.stack([np.where(inside, rope[image] + part, text) for part in (0, row, column)])
        return numbers

    def rows(self, start: int, length: int) -> tuple[Int64s, Int64s]:
        """Returns offsets [m] from `start` of image positions among `length` positions, and their pool entries [m]."""
        at, entries = [_NOWHERE], [_NOWHERE]
        for span in self._spans:
            first, end = max(start, span.first), min(start + length, span.end)
            if first < end:
                positions = np.arange(first, end)
                at.append(positions - start)
                entries.append(entries_of(span.pages, positions - span.first))
        return np.concatenate(at), np.concatenate(entries)


@dataclass(frozen=True)
class RowImages:
    """The images of a step's `r` rows."""

    layouts: tuple[Layout | None, ...]  # [r]
    shift: Int64s  # [r]: the difference between a position after the last image and its RoPE position
    end: Int64s  # [r]: the position after the last image; 0 without images

    def within(self, row: Int64s, start: Int64s, length: Int64s) -> list[list[tuple[int, int]]]:
        """Returns the images that overlap pieces of rows [p], in the form of `Layout.within`."""
        pieces = zip(row.tolist(), start.tolist(), (start + length).tolist(), strict=True)
        layouts = ((self.layouts[number], first, end) for number, first, end in pieces)
        return [[] if layout is None else layout.within(first, end) for layout, first, end in layouts]

    def tokens(self, row: Int64s, start: Int64s, length: Int64s) -> Tokens:
        """Returns the image data of a step's tokens. The arguments are pieces of rows [p], in token order."""
        positions = ragged(start + self.shift[row], length)
        early = np.flatnonzero(start < self.end[row])
        if not len(early):
            return Tokens(positions, _NOWHERE, _NOWHERE)
        of_three = np.tile(positions, (3, 1))
        first = np.cumsum(length) - length
        at, entries = [_NOWHERE], [_NOWHERE]
        for piece in early.tolist():
            layout = self.layouts[row[piece]]
            assert layout is not None
            begin, count, to = int(start[piece]), int(length[piece]), int(first[piece])
            of_three[:, to : to + count] = layout.positions(begin, count)
            tokens, where = layout.rows(begin, count)
            at.append(tokens + to)
            entries.append(where)
        return Tokens(of_three, np.concatenate(at), np.concatenate(entries))


class SlotImages:
    """The images of each slot, on the host. A step uses the images known when its plan is read."""

    def __init__(self, slots: int, context_length: int, pages: int, whole: bool = False) -> None:
        """`whole`: the positions of an image attend to each other, so no row may end within an image."""
        self._slots, self._context_length, self._pages = slots, context_length, pages
        self._whole = whole
        self._layouts: dict[int, Layout] = {}

    def read(self, plan: Plan) -> None:
        """Removes the images of new slots, and reads those of the plan. Raises `PlanError`."""
        if self._layouts:
            for slot in plan.slots[:, SlotRecord.SLOT].tolist():
                self._layouts.pop(slot, None)
        if not len(plan.image_spans):
            return
        within(plan.image_spans[:, ImageSpanRecord.SLOT], self._slots, "image: slot")
        if len(plan.span_pages):
            within(plan.span_pages, self._pages, "image: page")
        edges = np.cumsum(plan.image_spans[:, ImageSpanRecord.PAGE_COUNT])[:-1]
        pages = np.split(plan.span_pages.astype(np.int64), edges)
        for words, of_span in zip(plan.image_spans.tolist(), pages, strict=True):
            slot, first, height, width, rope, _ = words
            span = ImageSpan(first, height, width, rope, of_span)
            if min(height, width) < 1 or span.end > self._context_length or rope > first:
                raise PlanError(
                    f"an image of {height}x{width} positions from {first} on, numbered from {rope} on, "
                    f"in slot {slot} of {self._context_length} positions"
                )
            if len(of_span) not in (0, pages_of(span.count)):
                raise PlanError(f"{len(of_span)} pages for an image of {span.count} positions")
            layout = self._layouts.get(slot)
            self._layouts[slot] = Layout([span]) if layout is None else layout.with_(span)

    def of_rows(self, slot: Int64s, start: Int64s, length: Int64s) -> RowImages | None:
        """Returns the images of rows [r]; None: their slots have no images.

        Raises `PlanError` for an image that can't be read yet.
        """
        if not self._layouts:
            return None
        layouts = tuple(self._layouts.get(number) for number in slot.tolist())
        if not any(layouts):
            return None
        end = np.array([0 if layout is None else layout.end for layout in layouts], np.int64)
        for row in np.flatnonzero(start < end).tolist():
            layout = layouts[row]
            assert layout is not None
            layout.check(int(start[row]), int(start[row] + length[row]), self._whole)
        shift = np.array([0 if layout is None else layout.shift for layout in layouts], np.int64)
        return RowImages(layouts, shift, end)
