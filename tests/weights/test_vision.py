"""Configurations of models with a tower, nested or flat, and how repositories describe images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.described import described as describe
from benchmarks.described import model_config
from forebay.weights.errors import ModelError
from forebay.weights.parts import GroupedQuery, Rope
from forebay.weights.vision import Preprocessing, Sections, Vision
from tests.weights.support import tiny_directory

QWEN25: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "image_token_id": 151655,
    "intermediate_size": 11008,
    "max_position_embeddings": 128000,
    "max_window_layers": 70,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "hidden_act": "silu",
        "hidden_size": 1280,
        "in_chans": 3,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
    },
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
    "vocab_size": 151936,
}
"""The 3B model's config on the hub, in the flat form of older releases."""
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 151655,
    "text_config": {
        "attention_bias": False,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "max_position_embeddings": 262144,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
        "vocab_size": 151936,
    },
    "tie_word_embeddings": True,
    "vision_config": {
        "deepstack_visual_indexes": [5, 11, 17],
        "depth": 24,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1024,
        "in_channels": 3,
        "intermediate_size": 4096,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2560,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
}
"""The 4B model's config on the hub, in the nested form."""
PREPROCESSOR: dict[str, Any] = {
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "image_std": [0.5, 0.25, 0.5],
    "merge_size": 2,
    "patch_size": 16,
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "temporal_patch_size": 2,
}
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}
"""The 4B model's config on the hub."""
OF_GEMMA: dict[str, Any] = {
    "do_convert_rgb": None,
    "do_pan_and_scan": None,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "Gemma3ImageProcessor",
    "image_seq_length": 256,
    "image_std": [0.5, 0.5, 0.5],
    "resample": 2,
    "rescale_factor": 0.00392156862745098,
    "size": {"height": 896, "width": 896},
}
READ = Preprocessing(16, 2, 2, 65536, 16777216, (0.5, 0.5, 0.5), (0.5, 0.25, 0.5), 1 / 255)


def vision_of(config: dict[str, Any]) -> Vision:
    found = model_config(config).vision
    assert found is not None
    return found


def test_qwen3_vl() -> None:
    found = model_config(QWEN3)
    plain: dict[str, Any] = {"theta": 10000.0, "norm_eps": 1e-6, "both_ways": False}
    sizes = (24, 1024, 4096, 16, 16, 2, 2, 2560)
    assert found.vision == Vision("table", *sizes, **plain, deepstack=(5, 11, 17), table_side=48)
    assert found.vision.patch_bytes == 768
    assert found.vision.position_elements == 4 * 2560
    assert found.sections == Sections((24, 20, 20), interleaved=True)
    assert found.attention == GroupedQuery(32, 8, 128, 128, qkv_bias=False, output_bias=False, qk_norm=True)
    assert found.architecture == "Qwen3VLForConditionalGeneration"
    assert found.ropes == (Rope(128, 5e6, None),)
    assert (found.eos_token_ids, found.tie_word_embeddings) == ((151645,), True)


def test_qwen25_vl() -> None:
    found = model_config(QWEN25)
    plain: dict[str, Any] = {"theta": 10000.0, "norm_eps": 1e-6, "both_ways": False}
    sizes = (32, 1280, 3420, 16, 14, 2, 2, 2048)
    assert found.vision == Vision("windows", *sizes, **plain, window=4, whole=(7, 15, 23, 31))
    assert found.sections == Sections((16, 24, 24), interleaved=False)
    assert found.attention == GroupedQuery(16, 2, 128, 128, qkv_bias=True, output_bias=False, qk_norm=False)
    assert found.ropes == (Rope(128, 1e6, None),)
    assert {kind.window for kind in found.kinds} == {None}
    assert (found.eos_token_ids, found.tie_word_embeddings) == ((151645,), True)


def test_layers_that_a_config_leaves_out_are_those_of_transformers() -> None:
    for config, key, default in (
        (QWEN3, "deepstack_visual_indexes", (8, 16, 24)),
        (QWEN25, "fullatt_block_indexes", (7, 15, 23, 31)),
    ):
        tower = {**config["vision_config"], "depth": 32, key: None}
        found = vision_of({**config, "vision_config": tower})
        assert default in (found.deepstack, found.whole)
        none = vision_of({**config, "vision_config": {**tower, key: []}})
        assert (none.deepstack, none.whole) == ((), ())


def test_frequencies_are_shared_as_the_family_does() -> None:
    assert Sections((2, 1, 1), interleaved=False).axes(4) == [0, 0, 1, 2]
    assert Sections((4, 2, 2), interleaved=True).axes(8) == [0, 1, 2, 0, 1, 2, 0, 0]
    axes = Sections((24, 20, 20), interleaved=True).axes(64)
    assert [axes.count(axis) for axis in range(3)] == [24, 20, 20]
    assert axes[57:] == [0, 1, 2, 0, 0, 0, 0]


def test_a_lengthened_context_keeps_its_sections() -> None:
    scaling = {"type": "yarn", "mrope_section": [16, 24, 24], "factor": 4.0, "original_max_position_embeddings": 32768}
    found = model_config({**QWEN25, "rope_scaling": scaling})
    assert found.sections == Sections((16, 24, 24), interleaved=False)
    assert found.ropes[0].scaling == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out_hidden_size": 2048}, "the tower gives 2048 elements"),
        ({"in_channels": 1}, "in_channels 1 of images"),
        ({"hidden_act": "relu"}, 'hidden_act "relu" of images'),
        ({"num_heads": 3}, "a tower of 3 heads"),
        ({"depth": 0}, "depth"),
        ({"patch_size": [16, 16]}, "patch_size"),
        ({"num_position_embeddings": 2303}, "is no square"),
        ({"deepstack_visual_indexes": [5, 24]}, "are no layers of 24"),
        ({"deepstack_visual_indexes": [11, 5]}, "ascending"),
    ],
)
def test_a_tower_that_would_be_computed_wrongly_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_config({**QWEN3, "vision_config": {**QWEN3["vision_config"], **changes}})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**QWEN3, "vision_config": [1]}, "a vision_config of no keys"),
        ({**QWEN25, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 20]}}, "does not share the 64"),
        ({**QWEN25, "rope_scaling": {"type": "mrope", "mrope_section": [32, 32]}}, "does not share the 64"),
        ({**QWEN25, "architectures": ["Qwen2ForCausalLM"]}, "the rope scaling 'mrope'"),
        ({**QWEN25, "vision_config": {**QWEN25["vision_config"], "window_size": 16}}, "has no position in it"),
    ],
)
def test_a_model_that_would_be_computed_wrongly_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_config(config)


def written(directory: Path, name: str, values: dict[str, Any]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(json.dumps(values))
    return directory


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("preprocessor_config.json", PREPROCESSOR),
        ("processor_config.json", {"image_processor": PREPROCESSOR, "processor_class": "Qwen3VLProcessor"}),
        ("preprocessor_config.json", {**PREPROCESSOR, "size": {"min_pixels": 65536, "max_pixels": 16777216}}),
        ("preprocessor_config.json", {**PREPROCESSOR, "size": None, "min_pixels": 65536, "max_pixels": 16777216}),
        ("preprocessor_config.json", {**PREPROCESSOR, "resample": 3, "rescale_factor": 1 / 255, "do_resize": True}),
    ],
)
def test_what_a_repository_says_about_images(tmp_path: Path, name: str, values: dict[str, Any]) -> None:
    written(tmp_path / "m", name, values)
    found = Preprocessing.from_dict(described(tmp_path / "m")["images"])
    assert found == READ
    assert Preprocessing.from_dict(json.loads(json.dumps({**found.to_dict(), "more": 1}))) == found
    assert found.most_positions == 16384


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_size": 14}, "patches of 14 pixels, 2 a side and 2 times, and the tower wants 16, 2, 2"),
        ({"resample": 2}, "resample 2 of images"),
        ({"do_normalize": False}, "do_normalize false of images"),
        ({"image_processor_type": "CLIPImageProcessor"}, 'CLIPImageProcessor" of images'),
        ({"size": None}, "what can't be read: min_pixels"),
        ({"image_std": [1, 2]}, "what can't be read"),
    ],
)
def test_images_that_would_be_made_wrongly_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    written(tmp_path / "m", "preprocessor_config.json", {**PREPROCESSOR, **changes})
    with pytest.raises(ModelError, match=message):
        described(tmp_path / "m")


def described(directory: Path, **arguments: Any) -> dict[str, Any]:
    tiny_directory(directory)
    (directory / "generation_config.json").unlink()
    written(directory, "config.json", QWEN3)
    return describe(directory, directory / "cache", **arguments)


def test_a_description_says_how_images_become_patches_and_which_tokens_they_are(tmp_path: Path) -> None:
    written(tmp_path / "m", "preprocessor_config.json", PREPROCESSOR)
    found = described(tmp_path / "m")
    assert found["images"] == {
        **json.loads(json.dumps(READ.to_dict())),
        "image_token_id": 151655,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
    }
    assert found["eos_token_ids"] == [151645]
    assert (found["context_length"], found["vocab_size"]) == (262144, 151936)


def test_a_description_of_a_model_with_a_tower_needs_what_makes_patches(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no preprocessor_config\.json, which says how images become patches"):
        described(tmp_path / "m")
    written(tmp_path / "m", "preprocessor_config.json", PREPROCESSOR)
    with pytest.raises(ModelError, match="that is for models of text"):
        described(tmp_path / "m", embedding=True)


def gemma(directory: Path, **changes: Any) -> dict[str, Any]:
    """The description of a Gemma 3 with changes of its image processing."""
    tiny_directory(directory)
    (directory / "generation_config.json").unlink()
    written(directory, "config.json", GEMMA)
    written(directory, "preprocessor_config.json", {**OF_GEMMA, **changes})
    return describe(directory, directory / "cache")


def test_gemma_3() -> None:
    found = model_config(GEMMA)
    sizes = (27, 1152, 4304, 16, 14, 1, 4, 2560)
    assert found.vision == Vision("siglip", *sizes, theta=None, norm_eps=1e-6, both_ways=True, table_side=64)
    assert (found.vision.fixed_side, found.vision.position_elements) == (16, 2560)
    assert (found.sections, found.whole_images) == (None, True)


def test_a_gemma_s_images_have_one_size_and_a_mark(tmp_path: Path) -> None:
    found = gemma(tmp_path / "m")["images"]
    read = Preprocessing.from_dict(found)
    assert (read.patch, read.merge, read.temporal, read.most_positions) == (14, 4, 1, 256)
    assert (found["fixed"], found["image_token_id"]) == ([16, 16], 262144)
    assert found["mark"] == {
        "written": "<start_of_image>",
        "becomes": "\n\n<start_of_image><image_soft_token><end_of_image>\n\n",
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"do_pan_and_scan": True}, "do_pan_and_scan true of images"),
        ({"size": {"height": 896, "width": 448}}, "makes images of 896 x 448 pixels, and the tower wants 896 x 896"),
        ({"size": None}, "what can't be read: size"),
        ({"resample": 3}, "resample 3 of images"),
        ({"image_processor_type": "Qwen2VLImageProcessor"}, 'Qwen2VLImageProcessor" of images'),
    ],
)
def test_a_gemma_s_images_that_would_be_made_wrongly_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        gemma(tmp_path / "m", **changes)


@pytest.mark.parametrize("config", [QWEN3, QWEN25, GEMMA])
def test_the_text_alone_needs_no_processing_of_images(tmp_path: Path, config: dict[str, Any]) -> None:
    tiny_directory(tmp_path / "m")
    (tmp_path / "m/generation_config.json").unlink()
    written(tmp_path / "m", "config.json", config)
    found = describe(tmp_path / "m", tmp_path / "cache", text_alone=True)
    shape = found["shape"]["decoder"]
    assert (found["images"], shape["tower"]) == (None, None)
    assert {rope["sections"] for rope in shape["ropes"]} == {None}
