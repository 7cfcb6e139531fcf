"""Loading safetensors, whole and in shards."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.described import described, handshake_model
from forebay.weights.config import config_of
from forebay.weights.errors import ModelError
from forebay.weights.load import iter_weights, weight_shapes
from tests.weights.support import tiny_config, tiny_directory


@pytest.mark.parametrize("shards", [1, 3])
def test_every_weight_comes_once(tmp_path: Path, shards: int) -> None:
    model = described(tiny_directory(tmp_path / "m", shards=shards), tmp_path)
    config = config_of(model["shape"])
    assert len(model["files"]) == shards
    found = dict(iter_weights(model, config))
    whole = described(tiny_directory(tmp_path / "whole"), tmp_path)
    expected = dict(iter_weights(whole, config))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert len(weight_shapes(model)) == len(expected) == 6


@pytest.mark.parametrize("tied", [True, False])
def test_what_the_model_has_anyway_is_left_out(tmp_path: Path, tied: bool) -> None:
    kept = {"model.norm.weight", "model.embed_tokens.weight"}
    names = ["lm_head.weight", *kept, "model.layers.0.self_attn.rotary_emb.inv_freq"]
    path = tmp_path / "model.safetensors"
    save_file({name: torch.ones(2, dtype=torch.bfloat16) for name in names}, path)
    model = handshake_model(tiny_config() | {"tie_word_embeddings": tied}, [path])
    config = config_of(model["shape"])
    found = dict(iter_weights(model, config))
    assert found.keys() == kept | (set() if tied else {"lm_head.weight"})
    assert len(weight_shapes(model)) == len(found)
    assert found["model.norm.weight"].dtype == torch.bfloat16


def test_the_index_says_which_tensors_count(tmp_path: Path) -> None:
    for name, tensors in {"a": {"x": 1.0, "y": 2.0, "stale": 3.0}, "b": {"x": 4.0}}.items():
        values = {tensor: torch.full((2,), value) for tensor, value in tensors.items()}
        save_file(values, tmp_path / f"{name}.safetensors")
    files = [tmp_path / f"{name}.safetensors" for name in "ab"]

    def found(shards: dict[str, str]) -> dict[str, float]:
        index = {"weight_map": {name: f"{shard}.safetensors" for name, shard in shards.items()}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        model = handshake_model(tiny_config(), files)
        config = config_of(model["shape"])
        assert set(weight_shapes(model)) == {name for name, _ in iter_weights(model, config)}
        return {name: float(tensor[0]) for name, tensor in iter_weights(model, config)}

    assert found({"x": "b", "y": "a"}) == {"x": 4.0, "y": 2.0}
    assert found({"x": "a", "z": "b"}) == {"x": 1.0}
    assert found({"x": "gone"}).keys() == {"x", "y", "stale"}, "an index that names other files is not used"


def test_a_tied_pair_may_have_the_name_of_the_head(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"lm_head.weight": torch.full((2, 2), 7.0, dtype=torch.float64)}, path)
    model = handshake_model(tiny_config(), [path])
    config = config_of(model["shape"])
    found = dict(iter_weights(model, config))
    assert {name: float(tensor.sum()) for name, tensor in found.items()} == {"model.embed_tokens.weight": 28.0}
    assert weight_shapes(model) == {"model.embed_tokens.weight": (2, 2)}
    untied = handshake_model(tiny_config() | {"tie_word_embeddings": False}, [path])
    assert dict(iter_weights(untied, config_of(untied["shape"]))).keys() == {"lm_head.weight"}


def test_a_file_that_was_cut_since_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"model.norm.weight": torch.ones(64)}, path)
    model = handshake_model(tiny_config(), [path])
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ModelError, match="ends within a weight"):
        dict(iter_weights(model, config_of(model["shape"])))
    path.unlink()
    with pytest.raises(ModelError, match="can't be read: No such file"):
        dict(iter_weights(model, config_of(model["shape"])))
