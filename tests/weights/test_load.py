"""Safetensors, whole and in shards."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from forebay.weights.config import ModelConfig
from forebay.weights.describe import describe_directory
from forebay.weights.errors import ModelError
from forebay.weights.load import iter_weights, weight_shapes
from tests.weights.support import tiny_config, tiny_directory


@pytest.mark.parametrize("shards", [1, 3])
def test_every_weight_comes_once(tmp_path: Path, shards: int) -> None:
    model = describe_directory(tiny_directory(tmp_path / "m", shards=shards), "m")
    config = ModelConfig.from_dict(model["config"])
    assert len(model["files"]) == shards
    found = dict(iter_weights(model, config))
    whole = describe_directory(tiny_directory(tmp_path / "whole"), "whole")
    expected = dict(iter_weights(whole, config))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert len(weight_shapes(model, config)) == len(expected) == 6


@pytest.mark.parametrize("tied", [True, False])
def test_what_the_model_has_anyway_is_left_out(tmp_path: Path, tied: bool) -> None:
    names = ["lm_head.weight", "model.norm.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"]
    path = tmp_path / "model.safetensors"
    save_file({name: torch.ones(2, dtype=torch.bfloat16) for name in names}, path)
    config = ModelConfig.from_dict(tiny_config() | {"tie_word_embeddings": tied})
    model = {"format": "safetensors", "files": [str(path)]}
    found = dict(iter_weights(model, config))
    assert found.keys() == {"model.norm.weight"} | (set() if tied else {"lm_head.weight"})
    assert len(weight_shapes(model, config)) == len(found)
    assert found["model.norm.weight"].dtype == torch.bfloat16


def test_an_unknown_format_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'pickle'"):
        next(iter_weights({"format": "pickle", "files": []}, ModelConfig.from_dict(tiny_config())))
