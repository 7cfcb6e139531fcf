"""Rotary positions in prompts with images, and where image pages hold the rows of image positions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.state.checks import PlanError
from forebay.state.images import ImageSpan, Layout, RowImages, SlotImages, pages_of
from tests.hand.image_models import Image, Part, Prompt, model_of
from tests.hand.support import PlanBuilder

SLOTS, PAGES = 6, 64
FAMILIES = ["qwen3-vl", "qwen2.5-vl"]


def spans_of(prompt: Prompt) -> list[ImageSpan]:
    """The spans of a prompt's images, on separate pages in reverse order."""
    spans, last = [], PAGES
    for position, rope, image in prompt.images:
        count = pages_of(image.grid.positions)
        spans.append(ImageSpan(position, *image.grid, rope, np.arange(last, last - count, -1) - 1))
        last -= count
    return spans


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    """Up to four images, with text before, between and after them."""
    parts: list[Part] = [draw(st.integers(0, 5))]
    for _ in range(draw(st.integers(0, 4))):
        parts += [Image.random(draw(st.integers(1, 12)), draw(st.integers(1, 12))), draw(st.integers(1, 5))]
    return Prompt.of(*parts, 1)


@pytest.mark.parametrize("family", FAMILIES)
@given(prompt=prompts(), generated=st.integers(0, 9))
def test_positions_are_those_of_get_rope_index(family: str, prompt: Prompt, generated: int) -> None:
    inputs = prompt.inputs()
    expected, delta = model_of(family).model.get_rope_index(
        inputs["input_ids"], inputs["mm_token_type_ids"], image_grid_thw=inputs.get("image_grid_thw")
    )
    total = len(prompt.ids)
    behind = torch.arange(total, total + generated).expand(3, -1) + delta
    expected = torch.cat((expected[:, 0], behind), dim=1)
    if prompt.images:
        layout = Layout(spans_of(prompt))
        assert layout.positions(0, total + generated).tolist() == expected.tolist()
        assert layout.shift == int(delta)
    else:
        assert expected.tolist() == [list(range(total + generated))] * 3


@given(prompt=prompts(), data=st.data())
def test_pieces_of_rows_get_what_the_whole_gets(prompt: Prompt, data: st.DataObject) -> None:
    """Cuts a slot's positions into pieces, with rows of another slot in between."""
    total = len(prompt.ids) + 3
    cuts = sorted({0, total, *data.draw(st.lists(st.integers(0, total), max_size=4))})
    start, end = np.array(cuts[:-1]), np.array(cuts[1:])
    layout = Layout(spans_of(prompt)) if prompt.images else None
    # Rows of a slot without images come between the pieces.
    start, length = np.stack((start, start)).T.ravel(), np.repeat(end - start, 2)
    row = np.tile([0, 1], len(cuts) - 1)
    shift, behind = (0, 0) if layout is None else (layout.shift, layout.end)
    found = RowImages((layout, None), np.array([shift, 0]), np.array([behind, 0])).tokens(row, start, length)

    numbers = np.broadcast_to(found.positions, (3, length.sum()))
    slot = np.repeat(row, length)
    plain = np.broadcast_to(np.arange(total), (3, total))
    assert numbers[:, slot == 1].tolist() == plain.tolist()
    whole = plain if layout is None else layout.positions(0, total)
    assert numbers[:, slot == 0].tolist() == whole.tolist()
    assert (slot[found.at] == 0).all()
    entries = dict(zip(found.at.tolist(), found.entries.tolist(), strict=True))
    expected = {
        int(np.flatnonzero(slot == 0)[span.first + at]): int(span.pages[at // 64] * 64 + at % 64)
        for span in spans_of(prompt)
        for at in range(span.count)
    }
    assert entries == expected


def table() -> SlotImages:
    return SlotImages(SLOTS, 100, PAGES)


def read(slots: SlotImages, *spans: Sequence[object], new: Sequence[int] = ()) -> None:
    builder = PlanBuilder()
    for slot in new:
        builder.slot(slot, [1, 2])
    for span in spans:
        builder.image_span(*span)  # type: ignore[arg-type]
    slots.read(builder.build())


def positions(slots: SlotImages, slot: int, start: int, length: int) -> list[int] | None:
    """The rotary positions of a row after all images of its slot; None if the slot has no images."""
    one = np.array([0])
    found = slots.of_rows(np.array([slot]), np.array([start]), np.array([length]))
    return None if found is None else found.tokens(one, np.array([start]), np.array([length])).positions.tolist()


def test_images_stay_until_the_slot_is_written_anew() -> None:
    slots = table()
    assert positions(slots, 1, 0, 4) is None
    read(slots, (1, 2, (3, 4), 2), (2, 0, (1, 2), 0), new=[1, 2])
    assert positions(slots, 1, 14, 2) == [6, 7]
    assert positions(slots, 2, 2, 1) == [2]
    assert positions(slots, 3, 0, 4) is None
    read(slots, (1, 20, (2, 2), 12))
    assert positions(slots, 1, 24, 1) == [14]
    read(slots, new=[1])
    assert positions(slots, 1, 24, 1) is None
    assert positions(slots, 2, 2, 1) == [2]


def test_a_row_waits_for_the_pages_of_its_images_only() -> None:
    slots = table()
    read(slots, (1, 2, (3, 4), 2, [7]), (1, 20, (9, 8), 12), new=[1])
    assert positions(slots, 1, 0, 20) is not None
    assert positions(slots, 1, 92, 3) == [21, 22, 23]
    for start, length in ((0, 21), (20, 1), (91, 1), (90, 5)):
        with pytest.raises(PlanError, match="image at position 20, which has no pages"):
            positions(slots, 1, start, length)
    read(slots, (1, 20, (9, 8), 12, [3, 5]))
    assert positions(slots, 1, 0, 95) is not None


@pytest.mark.parametrize(
    ("span", "message"),
    [
        ((SLOTS, 0, (1, 1), 0), "image: slot"),
        ((1, 0, (0, 4), 0), "an image of 0x4"),
        ((1, 90, (3, 4), 0), "3x4 positions from 90 on"),
        ((1, 5, (1, 1), 6), "numbered from 6 on"),
        ((1, 0, (9, 8), 0, [1]), "1 pages for an image of 72"),
        ((1, 0, (1, 1), 0, [1, 2]), "2 pages for an image of 1"),
        ((1, 0, (1, 1), 0, [PAGES]), "image: page"),
        ((1, 9, (2, 2), 9), "overlap"),
        ((1, 12, (1, 1), 12), "overlap"),
    ],
)
def test_images_that_can_not_be(span: tuple[object, ...], message: str) -> None:
    slots = table()
    read(slots, (1, 10, (1, 4), 10), new=[1])
    with pytest.raises(PlanError, match=message):
        read(slots, span)
