"""Images over HTTP: the tokens of transformers, and refusals that name the part at fault."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import struct
import zlib
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from openai import OpenAI

from forebay.layers.vision import Pixels
from forebay.weights.vision import Preprocessing
from tests.e2e.client import Json, async_client, stream_events
from tests.e2e.conftest import Models, Serve
from tests.e2e.models import IMAGE, PREPROCESSOR, Model
from tests.e2e.server import Server

FAMILIES = ["qwen3-vl", "qwen2.5-vl", "qwen3.5-vl"]
COUNT = 16
PREPROCESSING = Preprocessing(
    patch=4,
    merge=2,
    temporal=2,
    min_pixels=64,
    max_pixels=1 << 18,
    mean=tuple(PREPROCESSOR["image_mean"]),
    std=tuple(PREPROCESSOR["image_std"]),
    rescale=1 / 255,
)

Pixels8 = npt.NDArray[np.uint8]


@cache
def picture(seed: int, rows: int, columns: int) -> Pixels8:
    """A noise image of `rows` by `columns` positions; uint8 [height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (8 * rows, 8 * columns, 3), np.uint8)


def png(pixels: Pixels8) -> bytes:
    """Encodes pixels as a PNG file with 8 bits a channel."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def url(file: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


def part(file: bytes | str) -> Json:
    return {"type": "image_url", "image_url": {"url": file if isinstance(file, str) else url(file)}}


def text(content: str) -> Json:
    return {"type": "text", "text": content}


def chat(*parts: Json, before: list[Json] | None = None, **more: Any) -> Json:
    message = {"role": "user", "content": list(parts)}
    shown = {"messages": [*(before or []), message], "max_tokens": COUNT, "temperature": 0, "return_token_ids": True}
    return {**shown, "ignore_eos": True, **more}


def seen(pixels: Pixels8) -> tuple[torch.Tensor, list[int]]:
    """The patches of an image, as transformers' processor computes them, and their grid."""
    height, width, _ = pixels.shape
    rows, columns = height // 8, width // 8
    cut = pixels.transpose(2, 0, 1).reshape(3, rows, 2, 4, columns, 2, 4)
    patches = cut.transpose(1, 4, 2, 5, 0, 3, 6).reshape(-1, 48)
    values = Pixels(PREPROCESSING, torch.device("cpu"))(torch.from_numpy(np.ascontiguousarray(patches)))
    return values, [1, 2 * rows, 2 * columns]


def reference(model: Model, ids: list[int], images: list[Pixels8]) -> list[int]:
    """Greedy tokens that transformers generates after `ids`."""
    network = model.reference
    tokens = torch.tensor([ids])
    inputs: dict[str, Any] = {"input_ids": tokens, "mm_token_type_ids": (tokens == IMAGE).int()}
    if images:
        values, grids = zip(*map(seen, images), strict=True)
        inputs |= {"pixel_values": torch.cat(values), "image_grid_thw": torch.tensor(grids)}
    with torch.inference_mode():
        out: Any = network.generate(**inputs, max_new_tokens=COUNT, do_sample=False, eos_token_id=None)
    found: list[int] = out[0, len(ids) :].tolist()
    return found


def answer(server: Server, body: Json) -> tuple[list[int], list[int]]:
    """The token ids of the prompt and of the answer."""
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    found = response.json()
    return found["prompt_token_ids"], found["choices"][0]["token_ids"]


PNG_URL = url(png(picture(1, 2, 2)))


@pytest.fixture(scope="module", params=FAMILIES)
def seeing(request: pytest.FixtureRequest, models: Models) -> Model:
    return models(request.param)


@pytest.fixture(scope="module")
def server(serve_for_module: Serve, seeing: Model) -> Server:
    # With a small budget each image is encoded over several steps.
    return serve_for_module(seeing, "--dtype", "float32", "--image-budget", "100", "--chunked-prefill-size", "16")


PROMPTS: list[list[Json | Pixels8]] = [
    [text("what is it")],
    [picture(1, 3, 5), text("what is it")],
    [text("of these"), picture(2, 6, 2), text("and"), picture(3, 1, 1), text("which?")],
    [picture(1, 3, 5), picture(1, 3, 5), text("are they the same"), picture(4, 9, 9)],
]


@pytest.mark.parametrize("parts", PROMPTS, ids=["none", "one", "two", "three"])
def test_tokens_are_those_of_transformers(server: Server, seeing: Model, parts: list[Json | Pixels8]) -> None:
    images = [p for p in parts if isinstance(p, np.ndarray)]
    body = chat(*(part(png(p)) if isinstance(p, np.ndarray) else p for p in parts))
    ids, tokens = answer(server, body)
    assert ids.count(IMAGE) == sum(image.shape[0] * image.shape[1] // 64 for image in images)
    assert tokens == reference(seeing, ids, images)
    # The second time, from cached blocks.
    assert answer(server, body) == (ids, tokens)


def test_a_second_turn_needs_neither_pixels_nor_the_tower(server: Server, seeing: Model) -> None:
    def counted() -> list[float]:
        names = ("prepared", "encoded", "in_pages", "in_prefix")
        metrics = server.metrics()
        return [metrics.value(f"forebay:images_{name}_total") for name in names]

    image = picture(50, 5, 7)
    before = counted()
    ids, tokens = answer(server, chat(part(png(image)), text("describe it at length, in many words, please")))
    first = counted()
    assert [now - then for now, then in zip(first, before, strict=True)] == [1, 1, 0, 0]
    told: list[Json] = [
        {"role": "user", "content": [part(png(image)), text("describe it at length, in many words, please")]},
        {"role": "assistant", "content": "it is noise"},
    ]
    answer(server, chat(text("really?"), before=told))
    assert [now - then for now, then in zip(counted(), first, strict=True)] == [0, 0, 0, 1]
    # After other text no cached block matches, but the encoded image is still in its pages.
    ids, tokens = answer(server, chat(text("look:"), part(png(image))))
    assert [now - then for now, then in zip(counted(), first, strict=True)] == [0, 0, 1, 1]
    assert tokens == reference(seeing, ids, [image])
    # Another image of the same size shares no block with the first one.
    other = picture(51, 5, 7)
    ids, tokens = answer(server, chat(part(png(other)), text("describe it at length, in many words, please")))
    assert tokens == reference(seeing, ids, [other])
    assert [now - then for now, then in zip(counted(), first, strict=True)] == [1, 1, 1, 1]


def test_many_at_once_share_what_they_see(server: Server, seeing: Model) -> None:
    images = [picture(60 + number, 4, 4) for number in range(3)]
    bodies = [
        chat(part(png(images[number % 3])), text(f"number {number}"), part(png(images[2])), stream=True)
        for number in range(9)
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
        assert tokens == reference(seeing, ids, [images[number % 3], images[2]])


def test_images_are_handed_on(serve: Serve, seeing: Model) -> None:
    flags = ("--pd", "1:1", "--pd-local-tokens", "0", "--page-size", "4", "--debug-kv-checksum", "--threads", "1")
    server = serve(seeing, "--dtype", "float32", "--max-total-tokens", "3000", "--image-budget", "100", *flags)
    for parts in PROMPTS:
        images = [p for p in parts if isinstance(p, np.ndarray)]
        body = chat(*(part(png(p)) if isinstance(p, np.ndarray) else p for p in parts))
        ids, tokens = answer(server, body)
        assert tokens == reference(seeing, ids, images)
        assert answer(server, body) == (ids, tokens)
    # The prompt ends within an image, so the decode replica computes some of its positions again.
    last = [text("look"), part(png(picture(70, 5, 5)))]
    ids, tokens = answer(server, chat(*last))
    assert tokens == reference(seeing, ids, [picture(70, 5, 5)])
    assert server.metric("forebay:pd_handed_total") == 2 * len(PROMPTS) + 1
    server.wait_until_idle()
    server.wait_for_metric("forebay:lent_pages", lambda value: value == 0)


def test_several_answers_look_at_one_image(server: Server, seeing: Model) -> None:
    body = chat(part(png(picture(70, 4, 6))), text("a"), n=3, seed=5, temperature=0.8)
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    assert len({tuple(choice["token_ids"]) for choice in response.json()["choices"]}) > 1


def generated(server: Server, ids: Any, images: Any) -> Any:
    """The answers of `/generate`, SGLang's route."""
    sampling = {"max_new_tokens": COUNT, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": ids, "image_data": images, "sampling_params": sampling}
    response = server.post("/generate", body)
    assert response.status_code == 200, response.text
    return response.json()


def test_generate_takes_images_as_sglang_does(server: Server, seeing: Model) -> None:
    one, other = picture(1, 3, 5), picture(2, 6, 2)
    ids = [5, IMAGE, 6, IMAGE, 7]
    tokens = reference(seeing, [5, *[IMAGE] * 15, 6, *[IMAGE] * 12, 7], [one, other])
    files = [url(png(one)), base64.b64encode(png(other)).decode()]
    spelled: list[Any] = [files, [files], [{"url": file} for file in files]]
    for images in spelled:
        assert generated(server, ids, images)["output_ids"] == tokens
    # In a batch each prompt has an entry of its own; a single image goes to every prompt.
    answers = generated(server, [ids, [5, 6]], [files, None])
    assert [answers[0]["output_ids"], answers[1]["output_ids"]] == [tokens, reference(seeing, [5, 6], [])]
    # No prompt ends in an image: transformers' `generate` would take the first token for a part of it.
    same = generated(server, [[IMAGE, 8], [9, IMAGE, 4]], files[0])
    expected = [[*[IMAGE] * 15, 8], [9, *[IMAGE] * 15, 4]]
    assert [answer["output_ids"] for answer in same] == [reference(seeing, prompt, [one]) for prompt in expected]


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({"image_data": url(b"II*\0" + bytes(9))}, "image_data", "TIFF is not read"),
        ({"image_data": ["?"]}, "image_data[0]", "not base64"),
        ({"image_data": [["aGk="] * 17]}, "image_data[0][16]", "at most 16 images"),
        ({"input_ids": [[IMAGE], [4]], "image_data": [PNG_URL]}, "image_data", "1 entries for 2 prompts"),
        ({"input_ids": [4], "image_data": PNG_URL}, "input_ids", "0 places for 1 images"),
        ({"image_data": []}, "input_ids", "1 places for 0 images"),
        ({"image_data": 3}, "image_data", "an image's URL or base64"),
        ({"image_data": PNG_URL, "return_logprob": True, "logprob_start_len": 0}, "logprob_start_len", "with images"),
    ],
)
def test_wrong_images_of_generate(server: Server, body: Json, param: str, reason: str) -> None:
    response = server.post("/generate", {"input_ids": [IMAGE], **body})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], reason in error["message"]) == (param, True), error


@pytest.mark.parametrize(("family", "device"), [("qwen3-vl", "cpu"), ("qwen3-vl", "deferred"), ("qwen3.5-vl", "cpu")])
def test_a_dead_hand_changes_no_token(serve: Serve, models: Models, family: str, device: str) -> None:
    model = models(family)
    server = serve(model, "--dtype", "float32", "--device", device, "--image-budget", "50")
    body = chat(part(png(picture(80, 6, 6))), text("a"), part(png(picture(81, 5, 5))), max_tokens=200, stream=True)

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
    assert len(undisturbed) == 200
    assert asyncio.run(ask(kill=True)) == undisturbed


PNG = png(picture(1, 3, 5))
WRONG: dict[str, tuple[str | bytes, str]] = {
    "not base64": ("data:image/png;base64,?!", "is not base64"),
    "no image": ("data:text/html;base64,aGk=", "is no image"),
    "another format": (b"II*\0" + bytes(40), "TIFF is not read"),
    "cut off": (PNG[: len(PNG) // 2], "PNG file is damaged"),
    "broken": (PNG[:60] + b"xxxx" + PNG[64:], "PNG file is damaged"),
    "no pixels": (PNG[:16] + struct.pack(">II", 0, 5) + PNG[24:], "PNG file is damaged"),
    "a strip": (png(np.zeros((1, 300, 3), np.uint8)), "more than 200 times"),
    "of this machine": ("http://127.0.0.1:80/a.png", "is not a public address"),
    "of the cloud": ("http://169.254.169.254/latest/meta-data", "is not a public address"),
    "of another port": ("http://example.com:8080/a.png", "port 8080 is not asked"),
    "of the disk": ("file:///etc/passwd", "reads no files of its own"),
    "of another scheme": ("ftp://example.com/a.png", "are not fetched"),
}


@pytest.mark.parametrize(("file", "reason"), WRONG.values(), ids=WRONG.keys())
def test_what_is_no_image_is_named_by_its_part(server: Server, file: str | bytes, reason: str) -> None:
    response = server.post("/v1/chat/completions", chat(text("a"), part(PNG), part(file)))
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert reason in error["message"]
    assert error["param"].startswith("messages[0].content[2]")


def test_other_wrong_images(server: Server) -> None:
    def refused(body: Json, param: str, reason: str) -> None:
        response = server.post("/v1/chat/completions", body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), error
        assert reason in error["message"]

    refused(chat(*[part(PNG)] * 17), "messages[0].content[16]", "at most 16 images")
    refused(chat({"type": "image_url"}), "messages[0].content[0].image_url", "required")
    refused(chat(part(PNG), prompt_logprobs=1), "prompt_logprobs", "not supported for prompts with images")
    refused(chat({"type": "input_audio"}), "messages[0].content[0].type=input_audio", "not supported")
    # The file is larger than a body without images may be.
    refused(chat(part(PNG[:60] + bytes(5 << 20))), "messages[0].content[0]", "PNG file is damaged")
    large = png(picture(90, 64, 64))
    refused(chat(part(large), text("a" * 100)), "messages", "context")


def test_the_token_for_images_in_a_text_is_text(server: Server) -> None:
    ids, _ = answer(server, chat(text("<|image_pad|>"), part(PNG)))
    assert ids.count(IMAGE) == 15


class _Files(BaseHTTPRequestHandler):
    """Answers `/a.png` with an image, and redirects every other path to it."""

    def do_GET(self) -> None:
        found = self.path == "/a.png"
        self.send_response(200 if found else 302)
        self.send_header("Location", "/a.png")
        self.send_header("Content-Length", str(len(PNG) if found else 0))
        self.end_headers()
        if found:
            self.wfile.write(PNG)

    def log_message(self, *args: Any) -> None:
        pass


def test_images_are_fetched_where_that_is_allowed(serve: Serve, models: Models, tmp_path: Path) -> None:
    (tmp_path / "b.png").write_bytes(PNG)
    model = models("qwen3-vl")
    flags = (
        "--media-allow-private",
        "--allowed-media-domains",
        "127.0.0.1",
        "--allowed-local-media-path",
        str(tmp_path),
    )
    server = serve(model, "--dtype", "float32", *flags)
    expected = answer(server, chat(text("a"), part(PNG)))
    with ThreadingHTTPServer(("127.0.0.1", 0), _Files) as files:
        Thread(target=files.serve_forever, daemon=True).start()
        port = files.server_address[1]
        for name in ("a.png", "elsewhere"):
            assert answer(server, chat(text("a"), part(f"http://127.0.0.1:{port}/{name}"))) == expected
        files.shutdown()
    assert answer(server, chat(text("a"), part((tmp_path / "b.png").as_uri()))) == expected
    refused = server.post("/v1/chat/completions", chat(part("file:///etc/passwd")))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages[0].content[0]")
    assert server.metrics().value("forebay:images_encoded_total") == 1


def test_an_image_for_a_model_of_text_is_refused(serve: Serve, tiny: Model) -> None:
    response = serve(tiny, "--device", "sim").post("/v1/chat/completions", chat(part(PNG)))
    assert (response.status_code, response.json()["error"]["code"]) == (400, "unsupported_parameter")


def test_openai_s_example(server: Server) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    response = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "What is in this image?"},
                    {"type": "image_url", "image_url": {"url": url(PNG), "detail": "auto"}},
                ],
            }
        ],
        max_tokens=4,
    )
    assert response.choices[0].finish_reason == "length"
    assert response.usage is not None
    assert response.usage.prompt_tokens > 15


def test_a_simulated_tower_takes_time(serve: Serve, models: Models) -> None:
    server = serve(models("qwen3-vl"), "--device", "sim", "--image-budget", "64")
    body = chat(part(png(picture(3, 8, 8))), text("a"))
    first = answer(server, body)
    assert answer(server, body) == first
    assert server.metrics().value("forebay:images_encoded_total") == 1
