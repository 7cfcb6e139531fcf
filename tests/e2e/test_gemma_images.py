"""Images for Gemma 3 over HTTP, and models with a vision tower that serve text alone."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.gemma3.image_processing_gemma3 import Gemma3ImageProcessor

from tests.e2e.client import Json, async_client, stream_events
from tests.e2e.conftest import Models, Serve
from tests.e2e.models import GEMMA_MARKS, GEMMA_PREPROCESSOR, IMAGE, Model
from tests.e2e.server import Server
from tests.e2e.test_images import COUNT, Pixels8, answer, chat, part, png, text

POSITIONS = 16
BEGIN, END, POSITION = GEMMA_MARKS
SHOWN = f"\n\n{BEGIN}{POSITION * POSITIONS}{END}\n\n"
FLAGS = ("--dtype", "float32", "--image-budget", "200", "--chunked-prefill-size", "8")
"""An image has more tokens than a chunk."""


def picture(seed: int, height: int, width: int) -> Pixels8:
    """A noise image of any size."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def reference(model: Model, ids: list[int], images: list[Pixels8], count: int = COUNT) -> list[int]:
    """Greedy tokens after `ids`, with images that transformers' processor prepares."""
    tokens = torch.tensor([ids])
    inputs: dict[str, Any] = {"input_ids": tokens, "token_type_ids": (tokens == IMAGE).int()}
    if images:
        named = ("size", "image_mean", "image_std", "resample")
        processor: Any = Gemma3ImageProcessor(**{name: GEMMA_PREPROCESSOR[name] for name in named})
        files = [Image.fromarray(pixels) for pixels in images]
        inputs["pixel_values"] = processor(images=files, return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        out = model.reference.generate(**inputs, max_new_tokens=count, do_sample=False, eos_token_id=None)
    found: list[int] = out[0, len(ids) :].tolist()
    return found


@pytest.fixture(scope="module")
def gemma(models: Models) -> Model:
    return models("gemma3-vl")


@pytest.fixture(scope="module")
def server(serve_for_module: Serve, gemma: Model) -> Server:
    return serve_for_module(gemma, *FLAGS)


ONE, TWO, THREE = picture(1, 32, 32), picture(2, 50, 20), picture(3, 7, 90)
PROMPTS: list[list[str | Pixels8]] = [
    ["what is it"],
    [ONE, "what is it"],
    ["of these", TWO, "and", THREE, "which?"],
    [ONE, ONE, "are they the same", THREE],
]


def written(parts: list[str | Pixels8]) -> str:
    """The prompt that transformers' processor writes."""
    content = "".join(SHOWN if isinstance(part, np.ndarray) else part for part in parts)
    return f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("parts", PROMPTS, ids=["none", "one", "two", "three"])
def test_tokens_are_those_of_transformers(server: Server, gemma: Model, parts: list[str | Pixels8]) -> None:
    images = [p for p in parts if isinstance(p, np.ndarray)]
    body = chat(*(part(png(p)) if isinstance(p, np.ndarray) else text(p) for p in parts))
    ids, tokens = answer(server, body)
    assert ids == gemma.encode(written(parts))
    assert ids.count(IMAGE) == POSITIONS * len(images)
    assert tokens == reference(gemma, ids, images)
    # The second time, from cached blocks, one of which ends within an image.
    assert answer(server, body) == (ids, tokens)


def test_a_second_turn_needs_neither_pixels_nor_the_tower(server: Server, gemma: Model) -> None:
    def counted() -> list[float]:
        names = ("prepared", "encoded", "in_pages", "in_prefix")
        return [server.metrics().value(f"forebay:images_{name}_total") for name in names]

    image, words = picture(50, 40, 56), "describe it at length, in many words, please"
    before = counted()
    answer(server, chat(part(png(image)), text(words)))
    first = counted()
    assert [now - then for now, then in zip(first, before, strict=True)] == [1, 1, 0, 0]
    told: list[Json] = [
        {"role": "user", "content": [part(png(image)), text(words)]},
        {"role": "assistant", "content": "it is noise"},
    ]
    ids, tokens = answer(server, chat(text("really?"), before=told))
    assert [now - then for now, then in zip(counted(), first, strict=True)] == [0, 0, 0, 1]
    assert tokens == reference(gemma, ids, [image])
    # Another image shares no block with it.
    other = picture(51, 40, 56)
    ids, tokens = answer(server, chat(part(png(other)), text(words)))
    assert tokens == reference(gemma, ids, [other])


def test_many_at_once_are_preempted_and_change_no_token(serve: Serve, gemma: Model) -> None:
    """The pool has pages for two of the six requests."""
    server = serve(gemma, *FLAGS, "--max-total-tokens", "256", "--max-running-requests", "6")
    images = [picture(60 + number, 32, 32) for number in range(3)]
    bodies = [
        chat(part(png(images[number % 3])), text(f"number {number}"), part(png(images[2])), stream=True, max_tokens=30)
        for number in range(6)
    ]

    async def ask(body: Json) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        tokens: list[int] = []
        async with async_client(server) as client:
            async for event in stream_events(client, "/v1/chat/completions", body):
                ids = event.get("prompt_token_ids") or ids
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or []
        return ids, tokens

    async def ask_all() -> list[tuple[list[int], list[int]]]:
        return list(await asyncio.gather(*map(ask, bodies)))

    for number, (ids, tokens) in enumerate(asyncio.run(ask_all())):
        assert tokens == reference(gemma, ids, [images[number % 3], images[2]], 30)
    assert server.metrics().value("vllm:num_preemptions_total") > 0


def test_a_dead_hand_changes_no_token(serve: Serve, gemma: Model) -> None:
    server = serve(gemma, *FLAGS)
    body = chat(part(png(ONE)), text("a"), part(png(TWO)), max_tokens=100, stream=True)

    async def ask(kill: bool) -> list[int]:
        tokens: list[int] = []
        async with async_client(server) as client:
            async for event in stream_events(client, "/v1/chat/completions", body):
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or []
                if kill and len(tokens) > 20:
                    kill = False
                    hand = server.hand()
                    assert hand is not None
                    os.kill(hand, signal.SIGKILL)
        return tokens

    undisturbed = asyncio.run(ask(kill=False))
    assert len(undisturbed) == 100
    assert asyncio.run(ask(kill=True)) == undisturbed


def test_the_marks_of_images_in_a_text_are_text(server: Server) -> None:
    ids, _ = answer(server, chat(text(f"{BEGIN}{POSITION}{END}"), part(png(ONE))))
    assert ids.count(IMAGE) == POSITIONS


def test_generate_takes_the_token_of_a_position(server: Server, gemma: Model) -> None:
    begin, end = (int(gemma.tokenizer.token_to_id(mark) or 0) for mark in (BEGIN, END))
    assert begin > 0
    assert end > 0
    sampling = {"max_new_tokens": COUNT, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": [5, begin, IMAGE, end, 7], "image_data": part(png(TWO))["image_url"]["url"]}
    response = server.post("/generate", {**body, "sampling_params": sampling})
    assert response.status_code == 200, response.text
    ids = [5, begin, *[IMAGE] * POSITIONS, end, 7]
    assert response.json()["output_ids"] == reference(gemma, ids, [TWO])


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("gemma3-vl", ("--limit-images", "0")),
        ("qwen3.5-vl", ("--limit-images", "0")),
        ("qwen3-vl", ("--limit-images", "0")),
        ("gemma3-vl", ("--hand", "rust")),
        # Without PyTorch only the Rust hand can compute it.
        ("qwen3.5-vl", ("--python", "/nowhere/python3")),
    ],
)
def test_the_text_alone_is_the_rust_hand_s(serve: Serve, models: Models, family: str, flags: tuple[str, ...]) -> None:
    model = models(family)
    server = serve(model, *flags)
    assert server.http.get("/server_info").json()["config"]["hand"] == "rust"
    ids, tokens = answer(server, chat(text("what is it")))
    if family == "gemma3-vl":
        assert tokens == reference(model, ids, [])
    else:
        out = model.reference.generate(torch.tensor([ids]), max_new_tokens=COUNT, do_sample=False, eos_token_id=None)
        assert tokens == out[0, len(ids) :].tolist()
    response = server.post("/v1/chat/completions", chat(part(png(ONE))))
    assert (response.status_code, response.json()["error"]["code"]) == (400, "unsupported_parameter")
    assert ("images are off" in server.log()) == (flags[0] == "--python")
