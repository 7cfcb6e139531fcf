"""Checkpoints of models with a vision tower, with the tensor names of current and of older transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.described import handshake_model
from forebay.layers.params import WeightError
from forebay.runner.runner import ModelRunner
from forebay.state.config import RunnerConfig
from tests.hand.image_models import (
    CONTEXT,
    FAMILIES,
    PREPROCESSING,
    Image,
    ImageBrain,
    ImageRequest,
    Prompt,
    arena_of,
    model_of,
    reference,
)
from tests.hand.support import wire_config

PROMPT = Prompt.of(3, Image.random(3, 5), 4)
COUNT = 5
Names = Callable[[str], str]
NAMES: dict[str, Names] = {
    "as they are in memory": lambda name: name,
    "of older releases": lambda name: name.replace("model.visual.", "visual.").replace("language_model.", ""),
}


def tokens(directory: Path) -> list[int]:
    """The tokens that the model in a directory generates."""
    arena, offsets = arena_of([image for *_, image in PROMPT.images])
    stored = json.loads((directory / "config.json").read_text())
    model = handshake_model(stored, [directory / "model.safetensors"], images=PREPROCESSING.to_dict())
    config = {**wire_config({}, load_format="auto", context_length=CONTEXT), "model": model}
    runner = ModelRunner(RunnerConfig.from_dict(config), arena)
    runner.load(lambda done, total: None)
    runner.warm_up()
    request = ImageRequest(PROMPT.ids, COUNT, seen=PROMPT, offsets=offsets)
    ImageBrain(runner).serve([request])
    return request.tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_saves_is_loaded(tmp_path: Path, family: str) -> None:
    model_of(family).save_pretrained(tmp_path)
    assert tokens(tmp_path) == reference(family, PROMPT, COUNT)[0]


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("family", ["qwen3-vl", "qwen2.5-vl", "qwen3.5"])
def test_names_of_any_release_are_known(tmp_path: Path, family: str, names: str) -> None:
    model = model_of(family)
    model.save_pretrained(tmp_path)
    weights = {NAMES[names](name): tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")
    assert tokens(tmp_path) == reference(family, PROMPT, COUNT)[0]


def test_a_tower_that_lacks_a_weight_is_refused(tmp_path: Path) -> None:
    model_of("qwen3-vl").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    gone = next(name for name in weights if name.endswith("visual.blocks.1.attn.qkv.bias"))
    weights.pop(gone)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"lacks 1 of \d+ weights, the first is visual\.blocks\.1\.attn\.qkv\.bias"):
        tokens(tmp_path)


def test_dummy_weights_give_numbers() -> None:
    model = model_of("qwen2.5-vl")
    stored = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    described = handshake_model(stored, images=PREPROCESSING.to_dict())
    runner = ModelRunner(RunnerConfig.from_dict({**wire_config({}, dtype="bfloat16"), "model": described}))
    runner.load(lambda done, total: None)
    runner.warm_up()
    assert runner.model.params.dtype == torch.bfloat16
