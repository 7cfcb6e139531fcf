"""Descriptions of models on this machine, made by the command that the brain runs."""

import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from benchmarks.described import described, refused
from forebay.weights.cache import atomic_file, cache_directory
from forebay.weights.errors import ModelError
from forebay.weights.load import weight_shapes
from tests.weights.support import (
    tiny_directory,
    tiny_gguf,
    tiny_metadata,
    tiny_tensors,
    tiny_tokenizer,
    write_gguf,
)


def test_a_directory(tmp_path: Path) -> None:
    directory = tiny_directory(tmp_path / "my-model", shards=2)
    found = described(directory, tmp_path / "cache")
    assert found.pop("shape")["decoder"]["family"] == "LlamaForCausalLM"
    assert len(found.pop("manifest")["weights"]) == 6
    config = json.loads((directory / "config.json").read_text())
    tokenizer_config = json.loads((directory / "tokenizer_config.json").read_text())
    assert found == {
        "name": "my-model",
        "format": "safetensors",
        "directory": str(directory),
        "files": [str(directory / f"model-{number:05}-of-00002.safetensors") for number in (1, 2)],
        "config": config,
        "tokenizer": str(directory / "tokenizer.json"),
        "tokenizer_config": tokenizer_config,
        "chat_template": "{{ messages }}",
        "generation_config": {"eos_token_id": [257, 256]},
        "eos_token_ids": [256, 257],
        "bos_token": "<s>",
        "eos_token": "</s>",
        "context_length": 128,
        "vocab_size": 258,
        "pooling": None,
        "images": None,
        "called": None,
        "cache": str(tmp_path / "cache"),
    }
    assert not (tmp_path / "cache").exists()


def test_a_gguf_file_and_a_directory_with_one(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    path = tiny_gguf(tmp_path / "m" / "tiny-Q8.gguf")
    cache = tmp_path / "cache"
    found = described(path, cache)
    assert (found["name"], found["format"], found["files"]) == ("tiny-Q8", "gguf", [str(path)])
    assert (found["bos_token"], found["eos_token"], found["eos_token_ids"]) == ("<s>", "</s>", [257])
    assert (found["vocab_size"], found["context_length"]) == (258, 128)
    assert found["chat_template"] is None
    assert Path(found["tokenizer"]).is_relative_to(cache)
    assert len(weight_shapes(found)) == 20
    assert found["cache"] == str(cache)
    assert described(path.parent, cache) == found | {"name": "m"}


def test_what_is_rebuilt_is_kept_by_content(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = tiny_gguf(tmp_path / "a.gguf", metadata={"tokenizer.chat_template": "A"})
    found = described(first, cache)
    tokenizer = Path(found["tokenizer"])
    written = tokenizer.stat().st_mtime_ns
    copy = shutil.copy(first, tmp_path / "copy.gguf")
    again = described(Path(copy), cache)
    assert again["tokenizer"] == found["tokenizer"]
    assert tokenizer.stat().st_mtime_ns == written
    other = described(tiny_gguf(tmp_path / "a.gguf", metadata={"tokenizer.chat_template": "B"}), cache)
    assert (found["chat_template"], other["chat_template"]) == ("A", "B")
    assert other["tokenizer"] != found["tokenizer"]
    # If one of the rebuilt files is missing, all of them are made again.
    tokenizer.unlink()
    assert Path(described(Path(copy), cache)["tokenizer"]).is_file()


def test_a_split_gguf_file(tmp_path: Path) -> None:
    tensors = tiny_tensors("llama", tied=True)
    names = list(tensors)
    parts = [tmp_path / f"m-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    for number, part in enumerate(parts):
        metadata: dict[str, Any] = {"split.tensors.count": len(names), "split.no": number}
        if number == 0:
            metadata |= tiny_metadata() | tiny_tokenizer()
        write_gguf(part, "llama", metadata, {name: tensors[name] for name in names[number::3]})
    for start in (parts[1], tmp_path):
        found = described(start, tmp_path / "cache")
        assert found["files"] == [str(part) for part in parts]
        assert len(weight_shapes(found)) == len(names)
    parts[2].unlink()
    with pytest.raises(ModelError, match=r"lacks m-00003-of-00003\.gguf"):
        described(parts[0], tmp_path / "cache")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config": {"chat_template": "one"}}, "one"),
        (
            {
                "tokenizer_config": {
                    "chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
                }
            },
            "d",
        ),
        ({"tokenizer_config": {}, "chat_template": {"chat_template": "json"}}, "json"),
        ({"tokenizer_config": None, "generation_config": None}, None),
    ],
)
def test_where_the_chat_template_is(tmp_path: Path, files: dict[str, Any], expected: str | None) -> None:
    directory = tiny_directory(tmp_path / "m", **files)
    assert described(directory, tmp_path)["chat_template"] == expected
    (directory / "chat_template.jinja").write_text("jinja")
    assert described(directory, tmp_path)["chat_template"] == "jinja"


def test_special_tokens_may_be_in_a_file_of_their_own(tmp_path: Path) -> None:
    special = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    found = described(tiny_directory(tmp_path / "m", tokenizer_config=None, special_tokens_map=special), tmp_path)
    assert (found["bos_token"], found["eos_token"]) == ("<s>", "</s>")


def test_weights_that_are_there_twice_are_read_once(tmp_path: Path) -> None:
    directory = tiny_directory(tmp_path / "m")
    for name in ("consolidated.safetensors", "adapter_model.safetensors", "model.fp16.safetensors"):
        shutil.copy(directory / "model.safetensors", directory / name)
    assert described(directory, tmp_path)["files"] == [str(directory / "model.safetensors")]


def broken(directory: Path, kind: str) -> Path:
    weights = directory / "model.safetensors"
    if kind == "nothing":
        return directory / "nothing"
    if kind == "empty":
        (directory / "empty").mkdir()
        return directory / "empty"
    if kind == "pickles":
        weights.rename(directory / "pytorch_model.bin")
    elif kind == "pickle":
        return weights.rename(directory / "pytorch_model.bin")
    elif kind == "text":
        return directory / "config.json"
    elif kind == "weights":
        weights.unlink()
    elif kind == "tokenizer":
        (directory / "tokenizer.json").unlink()
    elif kind == "json":
        (directory / "config.json").write_text("{")
    elif kind == "list":
        (directory / "config.json").write_text("[]")
    elif kind == "architecture":
        (directory / "config.json").write_text('{"architectures": ["BertForMaskedLM"]}')
    elif kind == "shard":
        index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    elif kind == "ggufs":
        weights.unlink()
        for name in "ab":
            tiny_gguf(directory / f"{name}.gguf")
    elif kind == "gguf":
        path = directory / "x.gguf"
        path.write_bytes(b"GGUF" + bytes(100))
        return path
    return directory


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nothing", "doesn't exist"),
        ("empty", "neither config.json nor a .gguf file"),
        ("pickles", "only pickle files"),
        ("pickle", "is a pickle file"),
        ("text", "neither a directory nor a .gguf file"),
        ("weights", "no weights"),
        ("tokenizer", "no tokenizer.json"),
        ("json", "config.json is not JSON"),
        ("list", "config.json is not a JSON object"),
        ("architecture", "no hand serves the architecture BertForMaskedLM: try --model-impl transformers"),
        ("shard", "lacks model-2.safetensors"),
        ("ggufs", "several models, name one of them: a.gguf, b.gguf"),
        ("gguf", "has version 0 of the format"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, kind: str, message: str) -> None:
    path = broken(tiny_directory(tmp_path / "m"), kind)
    assert message in refused(path, tmp_path / "cache")


def test_the_cache_is_where_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.delenv("FOREBAY_CACHE", raising=False)
    assert cache_directory() == Path("/xdg/forebay")
    monkeypatch.setenv("FOREBAY_CACHE", "/own")
    assert cache_directory() == Path("/own")
    assert cache_directory(tmp_path) == tmp_path


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    with atomic_file(path) as file:
        file.write(b"first")
        assert not path.exists()
    # None cannot be written, so the block raises after half of the content.
    with pytest.raises(TypeError), atomic_file(path) as file:
        file.writelines([b"second", None])  # type: ignore[list-item]
    assert path.read_bytes() == b"first"
    assert os.listdir(path.parent) == ["file"]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
