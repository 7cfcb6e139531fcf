"""Models as the brain describes them to a hand, by the example `describe` of `crates/weights`.

cargo build --profile fast -p forebay-weights --example describe
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFWriter

from forebay.weights.config import ModelConfig, config_of
from forebay.weights.encoder_config import EncoderConfig
from forebay.weights.errors import ModelError, UnsupportedModelError

__all__ = [
    "described",
    "gguf_metadata",
    "handshake_model",
    "model_config",
    "refused",
    "resolved",
    "shape_of",
    "tokenizer_json",
]

ROOT = Path(__file__).resolve().parents[1]


def program() -> Path:
    """The program that describes models; cargo puts it beside the binary."""
    folder = ROOT / os.environ.get("CARGO_TARGET_DIR", "target")
    binaries = [Path(os.environ.get("FOREBAY_TEST_BINARY", folder / "fast/forebay")), folder / "release/forebay"]
    found = [binary.with_name("examples") / "describe" for binary in binaries]
    return next((path for path in found if path.is_file()), found[0])


def described(path: Path, cache: Path, *, embedding: bool = False, text_alone: bool = False) -> dict[str, Any]:
    """The description of a model directory or GGUF file, with the offsets of its weights. Raises ModelError."""
    flags = {"--embedding": embedding, "--text-alone": text_alone}
    command = [str(program()), str(path), str(cache), *(flag for flag, given in flags.items() if given)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise ModelError(_error(done.stderr))
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def refused(path: Path, cache: Path, memory: int | None = None) -> str:
    """The one-line reason why a model cannot be described; "" if it can. `memory` is a limit in bytes."""

    def limit() -> None:
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))

    command = [str(program()), str(path), str(cache)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, preexec_fn=limit)
    return _error(done.stderr) if done.returncode else ""


def _error(text: str) -> str:
    assert text.startswith("error: ")
    assert text.count("\n") == 1
    return text.removeprefix("error: ").strip()


def shape_of(config: Mapping[str, Any], *, headless: bool = False) -> dict[str, Any]:
    """The shape of a model's `config.json`. Raises ModelError, or UnsupportedModelError if no hand serves it."""
    shape: dict[str, Any] = _asked({"config": config, "headless": headless})["shape"]
    return shape


def model_config(config: Mapping[str, Any], *, headless: bool = False) -> ModelConfig:
    """The configuration of a decoder as the Python hand reads it. Raises the errors of `shape_of`."""
    found = config_of(shape_of(config, headless=headless))
    assert not isinstance(found, EncoderConfig)
    return found


def handshake_model(
    config: Mapping[str, Any], files: Sequence[str | Path] = (), form: str = "safetensors", **more: Any
) -> dict[str, Any]:
    """The handshake's `model` for a `config.json` and weight files; `more` are further fields of it.

    Without `images`, a model with a tower is described as a text model.
    """
    named, pooling = [str(path) for path in files], more.get("pooling")
    text_alone = more.get("images") is None
    question = {
        "config": config,
        "headless": pooling is not None,
        "text_alone": text_alone,
        "files": named,
        "format": form,
    }
    if pooling is not None:
        question["scores"] = pooling["task"] != "embed"
    return {"format": form, "directory": "", "files": named, "config": dict(config), **_asked(question), **more}


def resolved(questions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The answers of `describe --configs`: a shape or an error for each config."""
    asked = "".join(json.dumps(question) + "\n" for question in questions)
    return [json.loads(line) for line in _ask(asked).splitlines()]


def _asked(question: Mapping[str, Any]) -> dict[str, Any]:
    text = json.dumps(question) + "\n"
    answer = _ask(text) if question.get("files") else _answer(text)
    found: dict[str, Any] = json.loads(answer)
    if "error" in found:
        raise (UnsupportedModelError if found["kind"] == "unserved" else ModelError)(found["error"])
    return found


@lru_cache(maxsize=512)
def _answer(question: str) -> str:
    return _ask(question)


def _ask(question: str) -> str:
    command = [str(program()), "--configs"]
    done = subprocess.run(command, input=question, check=True, capture_output=True, text=True, timeout=60)
    return done.stdout


def gguf_metadata(path: Path) -> dict[str, Any]:
    """The metadata of a GGUF file."""
    return {name: field.contents() for name, field in GGUFReader(path).fields.items()}


def tokenizer_json(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The `tokenizer.json` for the tokenizer in this GGUF metadata. Raises ModelError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.gguf"
        writer = GGUFWriter(path, "llama")
        for name in ("context_length", "embedding_length", "feed_forward_length", "block_count"):
            writer.add_uint32(f"llama.{name}", 2)
        writer.add_uint32("llama.attention.head_count", 1)
        writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-6)
        for name, value in metadata.items():
            _add(writer, name, value)
        tokens = max(1, len(metadata["tokenizer.ggml.tokens"]))
        writer.add_tensor("token_embd.weight", np.zeros((tokens, 2), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        made: dict[str, Any] = json.loads(Path(described(path, Path(folder))["tokenizer"]).read_text())
        return made


def _add(writer: GGUFWriter, name: str, value: Any) -> None:
    if not name.startswith("tokenizer."):
        return
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    elif value:
        writer.add_array(name, list(value))
