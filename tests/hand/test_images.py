"""Prompts with images: tokens and log-probabilities against transformers, however prompt and tower are cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from benchmarks.described import handshake_model
from forebay.device.cpu import CpuDevice
from forebay.runner.runner import ModelRunner
from forebay.state.config import ConfigError
from forebay.state.slots import PlanError
from tests.hand.image_models import (
    CONTEXT,
    FAMILIES,
    PAD,
    PREPROCESSING,
    Image,
    ImageBrain,
    ImageRequest,
    Prompt,
    arena_of,
    image_runner,
    model_of,
    reference,
)
from tests.hand.support import DEVICES, PlanBuilder, Sampling, hf_config, reference_model, runner_of

COUNT = 64
SMALL, TALL, DOT, LARGE = Image.random(3, 5), Image.random(7, 2), Image.random(1, 1), Image.random(20, 20)
PROMPTS = (
    Prompt.of(7, seed=3),
    Prompt.of(3, SMALL, 4),
    Prompt.of(TALL, 1, DOT, 2),
    Prompt.of(2, SMALL, 1, TALL, 2, SMALL, 5, DOT, 3),
    Prompt.of(5, LARGE, 2),
)
MIXED = Prompt.of(3, SMALL, 2, Image.random(9, 8), 4)
"""The second image takes two pages."""
LAYERS = 4
WHOLE = (0, LAYERS)


@cache
def expected(family: str, prompt: int | None = None) -> tuple[list[int], torch.Tensor]:
    return reference(family, MIXED if prompt is None else PROMPTS[prompt], COUNT)


def requests(prompts: Sequence[Prompt], count: int = COUNT) -> tuple[npt.NDArray[np.uint8], list[ImageRequest]]:
    """Requests for `count` tokens each, and the arena with their images."""
    arena, offsets = arena_of([image for prompt in prompts for *_, image in prompt.images])
    asked = []
    for number, prompt in enumerate(prompts):
        own, offsets = offsets[: len(prompt.images)], offsets[len(prompt.images) :]
        sampling = Sampling(logprobs=5)
        asked.append(ImageRequest(prompt.ids, count, sampling, arrival=number, seen=prompt, offsets=own))
    return arena, asked


def check(request: ImageRequest, tokens: list[int], distributions: torch.Tensor) -> None:
    """Compares a request with the first tokens of a reference and their log-probabilities."""
    assert request.tokens == tokens[: request.count]
    for (ids, values), distribution in zip(request.logprobs, distributions, strict=False):
        np.testing.assert_allclose(values, distribution[torch.from_numpy(ids).long()], atol=1e-4)


@DEVICES
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers(family: str, device: str, lookahead: int) -> None:
    """Prompts have up to four images of 1 to 400 positions. Chunks have 50 tokens, and batches are mixed."""
    arena, asked = requests(PROMPTS)
    ImageBrain(image_runner(family, arena, device=device), lookahead=lookahead).serve(asked, chunk=50)
    for number, request in enumerate(asked):
        check(request, *expected(family, number))


@pytest.mark.parametrize("family", ["qwen3-vl", "qwen2.5-vl", "qwen3.5"])
def test_every_border_of_chunks_gives_the_same(family: str) -> None:
    """Computes a prompt in two chunks, once for each position of the border. Each border has its own slot."""
    total = len(MIXED.ids)
    borders, of_slot = dict(enumerate(range(1, total))), -(-(total + 2) // 4)
    arena, offsets = arena_of([image for *_, image in MIXED.images])
    runner = image_runner(family, arena, slots=len(borders), max_total_tokens=4 * of_slot * len(borders))
    first, second, third = PlanBuilder(1), PlanBuilder(2), PlanBuilder(3)
    pages = [[7], [3, 9]]
    for number, (*_, image) in enumerate(MIXED.images):
        first.image(number, WHOLE, image.grid, offsets[number], pages[number])
    for slot, border in borders.items():
        first.slot(slot, MIXED.ids, Sampling(logprobs=5))
        first.page_writes += [(slot, index, slot * of_slot + index) for index in range(of_slot)]
        for (position, rope, image), own in zip(MIXED.images, pages, strict=True):
            first.image_span(slot, position, image.grid, rope, own)
        first.row(slot, 0, border, sample=False)
        second.row(slot, border, total - border)
        third.row(slot, total, 1)
    tokens, distributions = expected(family)
    assert not len(runner.step(first.build()).tokens)
    for builder, token, distribution in zip((second, third), tokens, distributions, strict=False):
        result = runner.step(builder.build())
        assert result.tokens.tolist() == [token] * len(borders)
        values = distribution[torch.from_numpy(result.logprob_ids).long()]
        np.testing.assert_allclose(result.logprob_values, values, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3-vl", "qwen3.5"])
@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_small_chunks_give_the_same(chunk: int, family: str) -> None:
    arena, asked = requests([MIXED, *PROMPTS[:4]], count=8)
    ImageBrain(image_runner(family, arena, device="deferred"), chunk, lookahead=1).serve(asked, chunk)
    for request, prompt in zip(asked, [None, 0, 1, 2, 3], strict=True):
        check(request, *expected(family, prompt))


@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen3.5-moe"])
def test_a_replay_goes_on_where_it_stopped(family: str) -> None:
    tokens, _ = expected(family, 3)
    for kept in (1, 20):
        arena, (request,) = requests([PROMPTS[3]], count=30)
        request.replayed = tokens[:kept]
        ImageBrain(image_runner(family, arena), kept).serve([request], chunk=10)
        assert request.tokens == tokens[:30]


def test_text_alone_is_what_the_decoder_gives_by_itself() -> None:
    """Without images the three rotary positions of a token are equal."""
    prompt = PROMPTS[0]
    arena, (request,) = requests([prompt], count=12)
    ImageBrain(image_runner("qwen3-vl", arena)).serve([request])
    check(request, *expected("qwen3-vl", 0))


class Plans:
    """Runs plans one by one, for a slot whose prompt has one image."""

    def __init__(self, prompt: Prompt, device: str = "cpu", family: str = "qwen3-vl") -> None:
        (self.position, self.rope, self.image) = prompt.images[0]
        self.arena, (self.offset,) = arena_of([self.image])
        self.runner = image_runner(family, self.arena, device=device)
        self.prompt, self.step = prompt, 0

    @property
    def pool(self) -> torch.Tensor:
        """The rows of all image pages."""
        images = self.runner.images
        assert images is not None
        return images.pool.read(torch.arange(64 * images.pool.page_count))

    def do(self, write: Callable[[PlanBuilder], None]) -> list[int]:
        """Runs a plan, and returns its tokens."""
        self.step += 1
        builder = PlanBuilder(self.step)
        write(builder)
        result = self.runner.step(builder.build())
        assert not result.row_errors.any()
        return result.tokens.tolist()

    def admit(self, builder: PlanBuilder, slot: int = 0, pages: Sequence[int] = ()) -> None:
        builder.slot(slot, self.prompt.ids)
        builder.image_span(slot, self.position, self.image.grid, self.rope, pages)
        count = -(-CONTEXT // self.runner.config.page_size)
        builder.page_writes += [(slot, index, slot * count + index) for index in range(count)]

    def tower(self, builder: PlanBuilder, first: int, end: int, pages: Sequence[int] = (), image: int = 0) -> None:
        builder.image(image, (first, end), self.image.grid, self.offset if first == 0 else -1, pages)


ONE = Prompt.of(4, Image.random(9, 8), 3)


def whole(family: str = "qwen3-vl") -> tuple[torch.Tensor, int]:
    """The image's rows on pages 5 and 2, and the first token, computed in one plan."""
    plans = Plans(ONE, family=family)

    def everything(builder: PlanBuilder) -> None:
        plans.admit(builder, pages=[5, 2])
        plans.tower(builder, *WHOLE, pages=[5, 2])
        builder.row(0, 0, len(ONE.ids))

    (token,) = plans.do(everything)
    return plans.pool.clone(), token


@pytest.mark.parametrize("device", ["cpu", "deferred"])
@pytest.mark.parametrize("family", ["qwen3-vl", "qwen2.5-vl"])
@pytest.mark.parametrize("cuts", [[1], [1, 2, 3], [3]])
def test_a_tower_in_slices_gives_the_same(family: str, device: str, cuts: list[int]) -> None:
    """Rows of other slots, and rows before the image, are computed between the slices."""
    rows, token = whole(family)
    plans = Plans(ONE, device, family)

    def admit(builder: PlanBuilder) -> None:
        plans.admit(builder)
        builder.slot(1, [5, 6, 7])
        builder.page_writes.append((1, 0, 1000))
        builder.page_writes.append((1, 1, 1001))
        builder.row(1, 0, 3)

    other = plans.do(admit)
    for number, (first, end) in enumerate(pairwise([0, *cuts, LAYERS])):

        def slice_(builder: PlanBuilder, first: int = first, end: int = end, at: int = 3 + number) -> None:
            plans.tower(builder, first, end, [5, 2] if end == LAYERS else [])
            builder.row(1, at, 1)
            if first == 0:
                builder.row(0, 0, 4, sample=False)

        other += plans.do(slice_)

    def rest(builder: PlanBuilder) -> None:
        builder.image_span(0, 4, plans.image.grid, 4, [5, 2])
        builder.row(0, 4, len(ONE.ids) - 4)

    assert plans.do(rest) == [token]
    assert other == reference(family, Prompt([5, 6, 7], (), 3), len(other))[0]
    assert torch.equal(plans.pool, rows)


def test_two_images_are_on_their_way_at_once_and_one_is_given_up() -> None:
    rows, _ = whole()
    plans = Plans(ONE)

    def both(builder: PlanBuilder) -> None:
        plans.tower(builder, 0, 2, image=3)
        plans.tower(builder, 0, 2, image=8)

    def one(builder: PlanBuilder) -> None:
        builder.image(3, (0, 0), (0, 0))
        plans.tower(builder, 2, 3, image=8)

    plans.do(both)
    plans.do(one)
    plans.do(lambda builder: plans.tower(builder, 3, 4, [5, 2], image=8))
    assert torch.equal(plans.pool, rows)
    # An image whose slices were abandoned may begin again.
    plans.do(lambda builder: plans.tower(builder, *WHOLE, pages=[1, 0], image=3))
    assert torch.equal(plans.pool[64:128], rows[5 * 64 : 6 * 64])


def test_slots_share_pages_and_a_prefix() -> None:
    """A second request has the same image. Its pages are valid, and positions up to the image's middle are cached."""
    _, token = whole()
    plans = Plans(ONE)

    def first(builder: PlanBuilder) -> None:
        plans.admit(builder, pages=[5, 2])
        plans.tower(builder, *WHOLE, pages=[5, 2])
        builder.row(0, 0, len(ONE.ids))

    assert plans.do(first) == [token]

    def second(builder: PlanBuilder) -> None:
        builder.slot(1, ONE.ids)
        builder.image_span(1, plans.position, plans.image.grid, plans.rope, [5, 2])
        cached = 40 // plans.runner.config.page_size
        builder.page_writes += [(1, index, index if index < cached else 500 + index) for index in range(30)]
        builder.row(1, 40, len(ONE.ids) - 40)

    assert plans.do(second) == [token]

    def behind_all(builder: PlanBuilder) -> None:
        """All image positions are cached, so the plan names no image page."""
        builder.slot(2, ONE.ids)
        builder.image_span(2, plans.position, plans.image.grid, plans.rope)
        cached = len(ONE.ids) // plans.runner.config.page_size
        builder.page_writes += [(2, index, index if index < cached else 700 + index) for index in range(30)]
        start = cached * plans.runner.config.page_size
        builder.row(2, start, len(ONE.ids) - start)

    assert plans.position + plans.image.grid.positions <= 4 * (len(ONE.ids) // 4)
    assert plans.do(behind_all) == [token]


def test_pad_tokens_in_a_text_are_tokens() -> None:
    """The plan states the positions of images. The pad token's id alone does not mark an image."""
    prompt = Prompt([3, PAD, 9, PAD], (), 4)
    arena, (request,) = requests([prompt], count=5)
    ImageBrain(image_runner("qwen3-vl", arena)).serve([request])
    model_tokens = reference_text(prompt.ids, 5)
    assert request.tokens == model_tokens


def reference_text(ids: list[int], count: int) -> list[int]:
    """The tokens of transformers' language model alone."""
    model, tokens = model_of("qwen3-vl"), list(ids)
    with torch.inference_mode():
        for _ in range(count):
            states = model.model.language_model(input_ids=torch.tensor([tokens])).last_hidden_state
            tokens.append(int(model.lm_head(states[0, -1]).argmax()))
    return tokens[len(ids) :]


Wrong = Callable[[Plans, PlanBuilder], None]


def two(first: Wrong, second: Wrong) -> Wrong:
    """A plan with both mistakes."""

    def both(plans: Plans, builder: PlanBuilder) -> None:
        first(plans, builder)
        second(plans, builder)

    return both


WRONG: dict[str, tuple[Wrong, str]] = {
    "an unknown page": (lambda p, b: p.tower(b, *WHOLE, pages=[5, 64]), "image page 5..64 is not within 0..64"),
    "a page twice": (lambda p, b: p.tower(b, *WHOLE, pages=[5, 5]), "are not distinct"),
    "too few pages": (lambda p, b: p.tower(b, *WHOLE, pages=[5]), "1 pages for layers 0..4 of 4 and 72 positions"),
    "pages too early": (lambda p, b: p.tower(b, 0, 2, pages=[5, 2]), "2 pages for layers 0..2 of 4"),
    "too many layers": (lambda p, b: p.tower(b, 0, 5, pages=[5, 2]), "layers 0..5 of 4"),
    "no layer": (lambda p, b: p.tower(b, 2, 2), "layers 2..2 of 4"),
    "no beginning": (lambda p, b: p.tower(b, 1, 2), "layer 1 of image 0 is not the next one"),
    "a gap": (
        two(lambda p, b: p.tower(b, 0, 1), lambda p, b: p.tower(b, 2, 3)),
        "layer 2 of image 0 is not the next one",
    ),
    "twice": (two(lambda p, b: p.tower(b, 0, 1), lambda p, b: p.tower(b, 0, 1)), "image 0 begins again"),
    "another grid": (
        two(lambda p, b: p.tower(b, 0, 1), lambda p, b: b.image(0, (1, 2), (8, 9))),
        "layer 1 of image 0 is not the next one of such an image",
    ),
    "no grid": (lambda p, b: b.image(0, (0, 1), (0, 9), 64), "an image of 0x9 positions"),
    "outside of the arena": (
        lambda p, b: b.image(0, (0, 1), (9, 8), 129),
        "patches at bytes 129..13953 of an arena of",
    ),
    "no place in the arena": (lambda p, b: b.image(0, (0, 1), (9, 8)), "patches at bytes -1"),
    "given up before": (lambda p, b: b.image(7, (0, 0), (0, 0)), "image 7 is given up, and no layer"),
    "a row without pages": (
        two(lambda p, b: p.admit(b), lambda p, b: b.row(0, 0, 5)),
        "image at position 4, which has no pages",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_images_that_can_not_be_computed(wrong: str) -> None:
    plans = Plans(ONE)
    write, message = WRONG[wrong]
    with pytest.raises(PlanError, match=message):
        plans.do(lambda builder: write(plans, builder))


@pytest.mark.parametrize(
    "write", [lambda b: b.image(0, WHOLE, (1, 1), 0, [0]), lambda b: b.image_span(0, 0, (1, 1), 0)]
)
def test_images_for_a_model_of_text(write: Callable[[PlanBuilder], None]) -> None:
    builder = PlanBuilder()
    write(builder)
    with pytest.raises(PlanError, match="images in a plan for a model of text"):
        runner_of(reference_model("qwen3")).step(builder.build())


def test_ready_says_what_the_brain_needs() -> None:
    runner = image_runner("qwen3-vl")
    assert runner.images is not None
    assert runner.images.most_positions == CONTEXT
    rows = runner.images.pool.read(torch.arange(64))
    runner.warm_up()
    assert torch.equal(runner.images.pool.read(torch.arange(64)), rows), "a warm-up leaves nothing in the pool"
    facts = runner.facts()
    assert facts["image_page_count"] == 64
    assert facts["image_page_tokens"] == 64
    assert facts["tower_layers"] == LAYERS
    assert "tower_layers" not in runner_of(reference_model("qwen3")).facts()


def sized(**changes: Any) -> ModelRunner:
    return image_runner("qwen3-vl", max_total_tokens=None, slots=10_000, mem_fraction_static=1.0, **changes)


def test_image_pages_are_counted_before_pages_of_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "available_bytes", lambda self: 16 << 20)
    few, many = sized(image_pool_tokens=64), sized(image_pool_tokens=4033)
    assert (few.facts()["image_page_count"], many.facts()["image_page_count"]) == (1, 64)
    # Each position has 3 rows of 64 float32.
    taken = 63 * 64 * 3 * 64 * 4
    pages = taken / few.kv.page_bytes
    assert pages - 1 < few.kv.page_count - many.kv.page_count < pages + 1


def test_a_pool_holds_two_of_the_largest_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """This is the default: two images of the largest size, which is the context here."""
    monkeypatch.setattr("forebay.state.images._LEAST_POSITIONS", 100)
    assert image_runner("qwen3-vl", image_pool_tokens=None).facts()["image_page_count"] == 2 * CONTEXT / 64
    monkeypatch.setattr("forebay.state.images._LEAST_POSITIONS", 8192)
    assert image_runner("qwen3-vl", image_pool_tokens=None).facts()["image_page_count"] == 128
    with pytest.raises(ConfigError, match="image_pool_tokens 0"):
        image_runner("qwen3-vl", image_pool_tokens=0)


def test_a_description_that_says_nothing_of_images_is_refused() -> None:
    config = hf_config(model_of("qwen3-vl").config, "Qwen3VLForConditionalGeneration")
    described = handshake_model(config, images=PREPROCESSING.to_dict())
    with pytest.raises(ConfigError, match="does not say how images become patches"):
        image_runner("qwen3-vl", model={**described, "images": None})


def test_quantised_products_are_refused() -> None:
    with pytest.raises(ConfigError, match="is computed by the Rust hand on a CPU"):
        image_runner("qwen3-vl", quantization="w8a8_int8")
