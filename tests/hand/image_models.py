"""Shared parts of the tests of images: tiny models with a vision tower, prompts with images, and a test brain."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from benchmarks.described import handshake_model
from forebay.layers.vision import Grid, Pixels
from forebay.runner.runner import ModelRunner
from forebay.state.config import RunnerConfig
from forebay.state.images import pages_of
from forebay.weights.vision import Preprocessing
from tests.hand.recurrent_models import DELTA, EXPERTS, noisy
from tests.hand.support import TINY, MiniBrain, PlanBuilder, Request, hf_config, hub_weights, random_model, wire_config

PAD, START, END = 128, 129, 130
CONTEXT = 640
MERGE = 2
TEXT: dict[str, Any] = {**TINY, "max_position_embeddings": CONTEXT}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
TOWER: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4}
TOKENS: dict[str, Any] = {"image_token_id": PAD, "vision_start_token_id": START, "vision_end_token_id": END}
QWEN3_TOWER = {**TOWER, "depth": 4, "out_hidden_size": 64, "num_position_embeddings": 36}
QWEN25_TOWER = {**TOWER, "depth": 4, "out_hidden_size": 64, "window_size": 24, "fullatt_block_indexes": [1, 3]}
NO_IDS = {"bos_token_id": None, "eos_token_id": None}
QWEN3: dict[str, Any] = {**TEXT, "head_dim": 16, "rope_parameters": {**ROPE, "mrope_interleaved": True}}
STATES: dict[str, Any] = {
    **DELTA,
    "max_position_embeddings": CONTEXT,
    "rope_parameters": {**ROPE, "mrope_interleaved": True, "partial_rotary_factor": 0.5},
}
"""16 of the 32 elements of each head are rotated."""
SIDE = 4
"""Images of a Gemma model have `SIDE` rows and `SIDE` columns of positions."""
GEMMA: dict[str, Any] = {
    **TEXT,
    "head_dim": 16,
    "num_hidden_layers": 7,
    "query_pre_attn_scalar": 20,
    "bos_token_id": None,
    "eos_token_id": None,
}
SIGLIP: dict[str, Any] = {
    "hidden_size": 36,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 4 * MERGE * SIDE,
    "layer_norm_eps": 1e-5,
    "vision_use_head": False,
}
OF_GEMMA: dict[str, Any] = {
    "vision_config": SIGLIP,
    "mm_tokens_per_image": SIDE**2,
    "image_token_index": PAD,
    "boi_token_index": START,
    "eoi_token_index": END,
}

FAMILIES: dict[str, tuple[type[Any], PreTrainedConfig]] = {
    "qwen3-vl": (
        Qwen3VLForConditionalGeneration,
        Qwen3VLConfig(
            text_config=QWEN3,
            vision_config={**QWEN3_TOWER, "deepstack_visual_indexes": [0, 2]},
            tie_word_embeddings=True,
            **TOKENS,
        ),
    ),
    "qwen3-vl-no-deepstack": (
        Qwen3VLForConditionalGeneration,
        Qwen3VLConfig(text_config=QWEN3, vision_config={**QWEN3_TOWER, "deepstack_visual_indexes": []}, **TOKENS),
    ),
    "qwen3-vl-moe": (
        Qwen3VLMoeForConditionalGeneration,
        Qwen3VLMoeConfig(
            text_config={
                **QWEN3,
                "num_experts": 5,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 24,
                "mlp_only_layers": [1],
            },
            vision_config={**QWEN3_TOWER, "deepstack_visual_indexes": [0, 2]},
            **TOKENS,
        ),
    ),
    "qwen2.5-vl": (
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLConfig(text_config={**TEXT, **NO_IDS, "rope_parameters": ROPE}, vision_config=QWEN25_TOWER, **TOKENS),
    ),
    "qwen3.5": (
        Qwen3_5ForConditionalGeneration,
        Qwen3_5Config(text_config=STATES, vision_config=QWEN3_TOWER, tie_word_embeddings=True, **TOKENS),
    ),
    "qwen3.5-moe": (
        Qwen3_5MoeForConditionalGeneration,
        Qwen3_5MoeConfig(text_config={**STATES, **EXPERTS}, vision_config=QWEN3_TOWER, **TOKENS),
    ),
}
GEMMAS: dict[str, tuple[type[Any], PreTrainedConfig]] = {
    # The window is shorter than an image in the first model, and longer in the second.
    "gemma3-short": (
        Gemma3ForConditionalGeneration,
        Gemma3Config(text_config={**GEMMA, "sliding_window": 11}, **OF_GEMMA),
    ),
    "gemma3": (Gemma3ForConditionalGeneration, Gemma3Config(text_config={**GEMMA, "sliding_window": 40}, **OF_GEMMA)),
}
"""Models whose images have one size and bidirectional attention."""
PREPROCESSING = Preprocessing(
    patch=4,
    merge=MERGE,
    temporal=2,
    min_pixels=64,
    max_pixels=8192 * 64,
    mean=(0.48145466, 0.4578275, 0.40821073),
    std=(0.26862954, 0.26130258, 0.27577711),
    rescale=1 / 255,
)
OF_ONE_SIZE = replace(
    PREPROCESSING, temporal=1, min_pixels=SIGLIP["image_size"] ** 2, max_pixels=SIGLIP["image_size"] ** 2
)
PATCH_BYTES = 3 * PREPROCESSING.patch**2


@dataclass(frozen=True)
class Image:
    """Patches uint8 [positions * 4, 48] of an image of `grid` positions."""

    grid: Grid
    patches: npt.NDArray[np.uint8]

    @classmethod
    def random(cls, height: int, width: int, seed: int = 0) -> Image:
        random = np.random.default_rng((seed, height, width))
        shape = (height * width * MERGE**2, PATCH_BYTES)
        return cls(Grid(height, width), random.integers(0, 256, shape, np.uint8))

    @property
    def pixels(self) -> torch.Tensor:
        """The output of transformers' processor."""
        return Pixels(PREPROCESSING, torch.device("cpu"))(torch.from_numpy(self.patches))

    @property
    def picture_patches(self) -> torch.Tensor:
        """The input of the vision tower of a Gemma model."""
        return Pixels(OF_ONE_SIZE, torch.device("cpu"))(torch.from_numpy(self.patches))

    @property
    def picture(self) -> torch.Tensor:
        """The output of transformers' processor of a Gemma, [3, rows, columns]."""
        sides = (self.grid.height, self.grid.width, MERGE, MERGE, 3, 4, 4)
        return (
            self.picture_patches.view(sides).permute(4, 0, 2, 5, 1, 3, 6).reshape(3, 4 * MERGE * SIDE, 4 * MERGE * SIDE)
        )

    @property
    def patch_grid(self) -> list[int]:
        return [1, self.grid.height * MERGE, self.grid.width * MERGE]


Part = Image | int
"""A part of a prompt: an image, or this many random tokens."""


@dataclass(frozen=True)
class Prompt:
    """Tokens with images among them."""

    ids: list[int]
    images: tuple[tuple[int, int, Image], ...]
    """The first position of each image in the prompt, its first rotary position, and the image."""
    end: int
    """The rotary position after the prompt."""

    @classmethod
    def of(cls, *parts: Part, seed: int = 0) -> Prompt:
        random = np.random.default_rng((seed, len(parts)))
        ids: list[int] = []
        images, rope = [], 0
        for part in parts:
            if isinstance(part, int):
                ids += random.integers(0, PAD, part).tolist()
                rope += part
            else:
                images.append((len(ids), rope, part))
                ids += [PAD] * part.grid.positions
                rope += max(part.grid)
        return cls(ids, tuple(images), rope)

    def inputs(self) -> dict[str, torch.Tensor]:
        """The inputs of transformers' model."""
        ids = torch.tensor([self.ids])
        inputs = {"input_ids": ids, "mm_token_type_ids": (ids == PAD).int()}
        if self.images:
            inputs["pixel_values"] = torch.cat([image.pixels for *_, image in self.images])
            inputs["image_grid_thw"] = torch.tensor([image.patch_grid for *_, image in self.images])
        return inputs

    def gemma_inputs(self, more: Sequence[int] = ()) -> dict[str, torch.Tensor]:
        """The inputs of transformers' Gemma 3, with further tokens."""
        ids = torch.tensor([[*self.ids, *more]])
        inputs = {"input_ids": ids, "token_type_ids": (ids == PAD).int()}
        inputs["token_type_ids"][:, len(self.ids) :] = 0
        if self.images:
            inputs["pixel_values"] = torch.stack([image.picture for *_, image in self.images])
        return inputs


@cache
def model_of(family: str) -> Any:
    """A tiny random transformers model."""
    make = noisy if family.startswith("qwen3.5") else random_model
    return make(*{**FAMILIES, **GEMMAS}[family])


def preprocessing(family: str) -> Preprocessing:
    """The preprocessing of a family's images to patches."""
    return OF_ONE_SIZE if family in GEMMAS else PREPROCESSING


_FOLDERS: list[TemporaryDirectory[str]] = []


@cache
def saved(family: str) -> dict[str, Any]:
    """A model in a folder, as the brain describes it to a hand."""
    _FOLDERS.append(TemporaryDirectory())
    folder = Path(_FOLDERS[-1].name)
    model_of(family).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    return handshake_model(config, [folder / "model.safetensors"], images=preprocessing(family).to_dict())


def own_name(name: str) -> str:
    """Returns Forebay's name of a tensor of a model with a tower. Releases of transformers use different names."""
    name = name.removeprefix("model.") if name.startswith("model.visual.") else name
    return name.replace("model.language_model.", "model.", 1)


def image_runner(family: str, arena: npt.NDArray[np.uint8] | None = None, **changes: Any) -> ModelRunner:
    """A runner with the weights of a transformers model."""
    model = model_of(family)
    sizes = {"context_length": CONTEXT, "max_total_tokens": 4096, "image_pool_tokens": 4096}
    if family.startswith(("qwen3.5", "gemma3")):
        # These families' weights need more than a renaming, so they are loaded from a file.
        wire = {**wire_config({}), **sizes, "load_format": "auto", "model": saved(family), **changes}
        runner = ModelRunner(RunnerConfig.from_dict(wire), arena)
        runner.load(lambda done, total: None)
        return runner
    config = hf_config(model.config, type(model).__name__)
    described = handshake_model(config, images=PREPROCESSING.to_dict())
    wire = {**wire_config(config), **sizes, "model": described, **changes}
    runner = ModelRunner(RunnerConfig.from_dict(wire), arena)
    runner.model.load_weights((own_name(name), tensor) for name, tensor in hub_weights(model).items())
    return runner


def arena_of(images: Sequence[Image]) -> tuple[npt.NDArray[np.uint8], list[int]]:
    """An arena with all patches and other bytes between them, and the offset of each image."""
    arena, offsets = bytearray(b"\xff" * 64), []
    for image in images:
        offsets.append(len(arena))
        arena += image.patches.tobytes() + b"\xff" * 64
    shared = np.frombuffer(arena, np.uint8)
    # The hand's mapping is read-only too.
    shared.flags.writeable = False
    return shared, offsets


def reference(family: str, prompt: Prompt, count: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and the log-probabilities [count, vocabulary] of each."""
    model = model_of(family)
    if family in GEMMAS:
        return _gemma_reference(model, prompt, count)
    # Otherwise the model would use the value of the previous prompt.
    model.model.rope_deltas = None
    with torch.inference_mode():
        inputs = prompt.inputs()
        out = model(**inputs, use_cache=True)
        distributions, tokens = [], []
        for number in range(count):
            logits = out.logits[0, -1].float()
            distributions.append(logits.log_softmax(-1))
            tokens.append(int(logits.argmax()))
            at = torch.full((3, 1, 1), prompt.end + number)
            following = torch.tensor([tokens[-1:]])
            out = model(input_ids=following, past_key_values=out.past_key_values, position_ids=at, use_cache=True)
    return tokens, torch.stack(distributions)


def _gemma_reference(model: Any, prompt: Prompt, count: int) -> tuple[list[int], torch.Tensor]:
    """Computes each token from the whole sequence, without a cache."""
    distributions: list[torch.Tensor] = []
    tokens: list[int] = []
    with torch.inference_mode():
        for _ in range(count):
            logits = model(**prompt.gemma_inputs(tokens), use_cache=False).logits[0, -1].float()
            distributions.append(logits.log_softmax(-1))
            tokens.append(int(logits.argmax()))
    return tokens, torch.stack(distributions)


@dataclass
class ImageRequest(Request):
    """A request whose prompt has images."""

    seen: Prompt = field(default_factory=lambda: Prompt([], (), 0))
    offsets: Sequence[int] = ()
    """The offsets of its images' patches in the arena."""


class ImageBrain(MiniBrain):
    """Runs all tower layers of a request's images in the plan of its first row."""

    def __init__(self, runner: ModelRunner, seed: int = 0, lookahead: int = 0) -> None:
        super().__init__(runner, seed, lookahead)
        images = runner.images
        assert images is not None
        self._whole = runner.decoder.config.whole_images
        self.layers = images.facts()["tower_layers"]
        self.image_pages = self._random.permutation(images.pool.page_count).tolist()
        self._images = 0

    def _admit(self, request: Request, builder: PlanBuilder) -> None:
        super()._admit(request, builder)
        assert isinstance(request, ImageRequest)
        for (position, rope, image), offset in zip(request.seen.images, request.offsets, strict=True):
            pages = [self.image_pages.pop() for _ in range(pages_of(image.grid.positions))]
            builder.image(self._images, (0, int(self.layers)), image.grid, offset, pages)
            builder.image_span(request.slot, position, image.grid, rope, pages)
            self._images += 1

    def _advance(self, request: Request, builder: PlanBuilder, chunk: int) -> bool:
        """Ends each row before or after an image that must be whole, never within it."""
        assert isinstance(request, ImageRequest)
        end = min(request.computed + chunk, len(request.prompt) + request.sampled)
        for first, _, image in request.seen.images if self._whole else ():
            if first < end < first + image.grid.positions:
                end = first if first > request.computed else first + image.grid.positions
        return super()._advance(request, builder, max(end - request.computed, 1))
