"""Images of a Gemma 3, which have bidirectional attention: tokens and log-probabilities against transformers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.described import handshake_model
from forebay.layers.vision import Grid, ImageDecoder
from forebay.state.checks import PlanError
from forebay.state.config import RunnerConfig
from tests.hand.image_models import (
    CONTEXT,
    GEMMAS,
    OF_ONE_SIZE,
    SIDE,
    Image,
    ImageBrain,
    ImageRequest,
    Prompt,
    arena_of,
    image_runner,
    model_of,
    reference,
    saved,
)
from tests.hand.support import DEVICES, PlanBuilder, Sampling

COUNT = 12
ONE, TWO, THREE = (Image.random(SIDE, SIDE, seed) for seed in range(3))
PROMPTS = (
    Prompt.of(30, seed=3),
    Prompt.of(3, ONE, 4),
    Prompt.of(2, ONE, 5, TWO, 1, THREE, 20, ONE, 3),
    Prompt.of(1, TWO),
)
LAYERS = 4
FAMILY = pytest.mark.parametrize("family", GEMMAS)


@cache
def expected(family: str, prompt: int) -> tuple[list[int], torch.Tensor]:
    return reference(family, PROMPTS[prompt], COUNT)


def requests(prompts: Sequence[Prompt]) -> tuple[np.ndarray, list[ImageRequest]]:
    """Requests with their images in an arena."""
    arena, offsets = arena_of([image for prompt in prompts for *_, image in prompt.images])
    asked = []
    for number, prompt in enumerate(prompts):
        own, offsets = offsets[: len(prompt.images)], offsets[len(prompt.images) :]
        asked.append(ImageRequest(prompt.ids, COUNT, Sampling(logprobs=5), arrival=number, seen=prompt, offsets=own))
    return arena, asked


def check(request: ImageRequest, tokens: list[int], distributions: torch.Tensor) -> None:
    assert request.tokens == tokens
    for (ids, values), distribution in zip(request.logprobs, distributions, strict=True):
        np.testing.assert_allclose(values, distribution[torch.from_numpy(ids).long()], atol=1e-4)


@FAMILY
def test_rows_are_those_of_transformers(family: str) -> None:
    """Runs the tower in one piece and in slices."""
    model = image_runner(family).model
    assert isinstance(model, ImageDecoder)
    with torch.inference_mode():
        expected = model_of(family).model.get_image_features(ONE.picture[None]).pooler_output[0]
        assert expected.abs().mean() > 0.05
        for cuts in ([], [1], [2, 3]):
            state = model.tower.begin([ONE.picture_patches], Grid(SIDE, SIDE))
            for first, end in pairwise([0, *cuts, LAYERS]):
                model.tower.layers(state, first, end)
            torch.testing.assert_close(model.tower.finish(state), expected, atol=1e-4, rtol=0)


@DEVICES
@FAMILY
def test_tokens_are_those_of_transformers(family: str, device: str, lookahead: int) -> None:
    for chunk in (1, 7, 16, 1000):
        arena, asked = requests(PROMPTS)
        ImageBrain(image_runner(family, arena, device=device), chunk, lookahead).serve(asked, chunk)
        for number, request in enumerate(asked):
            check(request, *expected(family, number))


def test_positions_of_an_image_see_those_behind_them() -> None:
    """Without bidirectional attention the log-probabilities differ, so the tests above would notice its absence."""
    arena, (request,) = requests(PROMPTS[1:2])
    runner = image_runner("gemma3", arena)
    vision = runner.decoder.config.vision
    assert vision is not None
    object.__setattr__(vision, "both_ways", False)
    ImageBrain(runner).serve([request])
    _, distributions = expected("gemma3", 1)
    ids, values = request.logprobs[0]
    assert np.abs(values - distributions[0][torch.from_numpy(ids).long()].numpy()).max() > 0.01


@FAMILY
def test_every_border_outside_images_gives_the_same(family: str) -> None:
    """Cuts a prompt into two chunks outside images.

    Other slots continue after a shared prefix that ends within an image.
    """
    prompt = PROMPTS[2]
    total, page_size = len(prompt.ids), 4
    arena, offsets = arena_of([image for *_, image in prompt.images])
    spans = [(first, first + SIDE**2) for first, *_ in prompt.images]
    outside = [at for at in range(1, total) if not any(first < at < end for first, end in spans)]
    # These slots share the pages of slot 0 up to that position. Slot 0 computes the whole prompt.
    shared = [at for at in range(page_size, total, page_size) if any(first < at < end for first, end in spans)]
    count = 1 + len(outside) + len(shared)
    of_slot = -(-(total + 2) // page_size)
    runner = image_runner(family, arena, slots=count, max_total_tokens=page_size * of_slot * count)
    first, second = PlanBuilder(1), PlanBuilder(2)
    pages = [[number] for number in range(len(prompt.images))]
    for number, (*_, image) in enumerate(prompt.images):
        first.image(number, (0, LAYERS), image.grid, offsets[number], pages[number])
    for slot, border in enumerate([total, *outside, *shared]):
        first.slot(slot, prompt.ids, Sampling(logprobs=5))
        kept = border // page_size if border in shared else 0
        own = range(of_slot)
        first.page_writes += [(slot, index, index if index < kept else slot * of_slot + index) for index in own]
        for (position, rope, image), of_image in zip(prompt.images, pages, strict=True):
            first.image_span(slot, position, image.grid, rope, of_image)
        if border not in shared:
            first.row(slot, 0, border, sample=border == total)
        if border < total:
            second.row(slot, border, total - border)
    (token, *_), (distribution, *_) = expected(family, 2)
    assert runner.step(first.build()).tokens.tolist() == [token]
    result = runner.step(second.build())
    assert result.tokens.tolist() == [token] * (count - 1)
    values = distribution[torch.from_numpy(result.logprob_ids).long()]
    np.testing.assert_allclose(result.logprob_values, values, atol=1e-4)


def test_a_replay_goes_on_where_it_stopped() -> None:
    tokens, _ = expected("gemma3", 2)
    for kept in (1, 8):
        arena, (request,) = requests(PROMPTS[2:3])
        request.replayed = tokens[:kept]
        ImageBrain(image_runner("gemma3", arena), kept).serve([request], chunk=10)
        assert request.tokens == tokens


def test_a_row_that_ends_within_an_image_is_refused() -> None:
    arena, (offset,) = arena_of([ONE])
    runner = image_runner("gemma3", arena)
    prompt = PROMPTS[1]
    ((position, rope, image),) = prompt.images

    def plan(end: int) -> PlanBuilder:
        builder = PlanBuilder(runner.config.slots)
        builder.image(0, (0, LAYERS), image.grid, offset, [0])
        builder.slot(0, prompt.ids)
        builder.page_writes += [(0, index, index) for index in range(8)]
        builder.image_span(0, position, image.grid, rope, [0])
        builder.row(0, 0, end, sample=False)
        return builder

    with pytest.raises(PlanError, match=r"a row 0\.\.5 ends within the image at positions 3\.\.19"):
        runner.step(plan(5).build())


def test_an_image_of_another_size_is_refused() -> None:
    arena, (offset,) = arena_of([Image.random(3, 5)])
    builder = PlanBuilder(1)
    builder.image(0, (0, LAYERS), Grid(3, 5), offset, [0])
    with pytest.raises(PlanError, match="of an image of 3x5 positions"):
        image_runner("gemma3", arena).step(builder.build())


def test_a_warm_up_has_an_image_of_the_one_size() -> None:
    runner = image_runner("gemma3")
    runner.warm_up()
    assert runner.images is not None
    assert runner.images.most_positions == SIDE**2
    assert runner.config.prompt_tokens == runner.config.chunked_prefill_size + SIDE**2 - 1


@pytest.mark.parametrize("prefix", ["model.", ""], ids=["as transformers saves it", "as the hub has it"])
def test_names_of_any_release_are_known(tmp_path: Path, prefix: str) -> None:
    model = model_of("gemma3")
    model.save_pretrained(tmp_path)
    tensors = {
        name.replace("model.language_model.", "language_model.model.").removeprefix("model.")
        if not prefix
        else name: it
        for name, it in load_file(tmp_path / "model.safetensors").items()
    }
    if not prefix:
        tensors = {
            name.replace("vision_tower.", "vision_tower.vision_model.", 1) if ".vision_model." not in name else name: it
            for name, it in tensors.items()
        }
    save_file(tensors, tmp_path / "model.safetensors")
    config = saved("gemma3")["config"]
    described = handshake_model(config, [tmp_path / "model.safetensors"], images=OF_ONE_SIZE.to_dict())
    arena, (request,) = requests(PROMPTS[1:2])
    runner = image_runner("gemma3", arena, model=described)
    assert isinstance(runner.config, RunnerConfig)
    assert runner.config.context_length == CONTEXT
    ImageBrain(runner).serve([request])
    check(request, *expected("gemma3", 1))
