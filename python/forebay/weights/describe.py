"""The way from files on this machine to the description of a model, for the brain and the hand.

`python -m forebay.weights.describe PATH` prints it in one line of JSON. The brain has found or downloaded the files
before. An exit status of 2, and a last line that starts with "error: ", report a model that can't run, with the reason.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from forebay.weights.cache import atomic_file, cache_directory
from forebay.weights.config import ModelConfig, shape_of, token_ids
from forebay.weights.encoder_config import EncoderConfig
from forebay.weights.errors import ModelError, UnsupportedModelError
from forebay.weights.files import read_json
from forebay.weights.index import INDEX, read_index
from forebay.weights.pooling import Pooling, read_pooling
from forebay.weights.sizes import one_line, size
from forebay.weights.vision import read_preprocessing

__all__ = [
    "answer",
    "describe",
    "describe_directory",
    "describe_gguf",
    "describe_path",
    "flags",
    "gguf_parts",
    "main",
]

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_WHOLE = "model.safetensors"

_IMAGE_TOKENS = ("image_token_id", "vision_start_token_id", "vision_end_token_id")
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
# What is rebuilt from a GGUF lies in the cache under a key of the file's first bytes, which hold all metadata of any
# known model, and of this number: it goes up with every change to what is rebuilt.
_REBUILD_VERSION = 3
_KEY_BYTES = 32 << 20


def describe_path(path: Path, cache: Path, *, weights: bool = True, embedding: bool = False) -> dict[str, Any]:
    """The model in a directory or a GGUF file. Without `weights` a directory needs no weights. Raises ModelError.

    With `embedding` a model that could generate is one that pools.
    """
    path = path.absolute()
    if path.is_dir():
        with one_line(f"{path} has a file"):
            return _describe_any_directory(path, cache, weights=weights, embedding=embedding)
    if not path.is_file():
        raise ModelError(f"{path} doesn't exist")
    if path.suffix == ".gguf":
        return describe_gguf(gguf_parts(path), path.stem, cache, embedding=embedding)
    if path.suffix in _PICKLES:
        raise ModelError(f"{path} is a pickle file, which can run code when it is read; use safetensors or GGUF")
    raise ModelError(f"{path} is neither a directory nor a .gguf file")


def describe_directory(
    directory: Path,
    name: str,
    *,
    weights: bool = True,
    embedding: bool = False,
    read: Callable[[dict[str, Any]], ModelConfig | EncoderConfig] = shape_of,
    tokenizer: Path | None = None,
) -> dict[str, Any]:
    """The model in a directory of Hugging Face's layout, with safetensors. Raises ModelError.

    `read` makes the shape of its `config.json`. `tokenizer` is a file in place of the directory's `tokenizer.json`.
    """
    config = read_json(directory / "config.json")
    tokenizer = tokenizer or directory / "tokenizer.json"
    if not tokenizer.is_file():
        raise ModelError(f"{directory} has no tokenizer.json, the only form of tokenizer that is supported here")
    present = [entry.name for entry in directory.iterdir() if entry.is_file()]
    files = _safetensors_names(present, directory) if weights else []
    generation = read_json(directory / "generation_config.json", optional=True)
    tokenizer_config = read_json(directory / "tokenizer_config.json", optional=True)
    special = read_json(directory / "special_tokens_map.json", optional=True)
    parsed = read(config)
    # A decoder behind a tower may have its ids in a config of its own.
    own = parsed.eos_token_ids if isinstance(parsed, ModelConfig) else token_ids(config.get("eos_token_id"))
    eos = own + token_ids(generation.get("eos_token_id"))
    return _description(
        name=name,
        kind="safetensors",
        directory=directory,
        files=[directory / file for file in files],
        config=config,
        parsed=parsed,
        tokenizer=tokenizer,
        tokenizer_config=tokenizer_config,
        chat_template=_chat_template(directory, tokenizer_config),
        generation_config=generation,
        eos=eos,
        bos_token=_token_text(tokenizer_config, "bos_token") or _token_text(special, "bos_token"),
        eos_token=_token_text(tokenizer_config, "eos_token") or _token_text(special, "eos_token"),
        pooling=read_pooling(config, directory, forced=embedding),
        images=_images(directory, parsed, config),
    )


def describe_gguf(files: list[Path], name: str, cache: Path, *, embedding: bool = False) -> dict[str, Any]:
    """The model in a GGUF file and its further parts. Missing files are rebuilt in the cache. Raises ModelError."""
    folder = cache / "gguf" / _content_key(files)
    facts_path = folder / "facts.json"
    tokenizer = folder / "tokenizer.json"
    if not (facts_path.is_file() and tokenizer.is_file()):
        _rebuild(files, facts_path, tokenizer)
    facts = read_json(facts_path)
    return _description(
        name=name,
        kind="gguf",
        directory=files[0].parent,
        files=files,
        config=facts["config"],
        parsed=shape_of(facts["config"]),
        tokenizer=tokenizer,
        tokenizer_config={},
        chat_template=facts["chat_template"],
        generation_config=facts["generation_config"],
        eos=token_ids(facts["config"]["eos_token_id"]),
        bos_token=facts["bos_token"],
        eos_token=facts["eos_token"],
        pooling=read_pooling(facts["config"], None, forced=embedding),
    )


def gguf_parts(path: Path) -> list[Path]:
    """`path`, or all parts of a split file ("-00002-of-00003"). Raises ModelError if one is missing."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    parts = [path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelError(f"{path.parent} lacks {', '.join(missing)}")
    return parts


def _safetensors_names(present: Iterable[str], directory: Path) -> list[str]:
    """The names of a model directory's files with weights, in order. Raises ModelError."""
    names = sorted(present)
    placed = read_index(directory)
    if placed is not None:
        shards = sorted(set(placed.values()))
        missing = sorted(set(shards) - set(names))
        if shards and not missing:
            return shards
        # An index without its shards is left over from before they became one file.
        if _WHOLE not in names or _WHOLE in shards:
            raise ModelError(f"{directory} lacks {', '.join(missing) or 'every shard'} of {INDEX}")
    # Some repositories hold the weights a second time under the names of the model's own tools, or an adapter.
    weights = [
        name for name in names if name.endswith(".safetensors") and not name.startswith(("consolidated", "adapter"))
    ]
    if _WHOLE in weights:
        return [_WHOLE]
    return weights or _no_weights(names, directory)


def _no_weights(names: list[str], directory: Path) -> list[str]:
    if any(name.endswith(_PICKLES) for name in names):
        raise ModelError(
            f"{directory} has only pickle files for weights, which can run code when they are read; "
            "convert them to safetensors, or choose a model that has them"
        )
    raise ModelError(f"{directory} has no weights: neither *.safetensors nor *.gguf")


def _describe_any_directory(directory: Path, cache: Path, *, weights: bool, embedding: bool) -> dict[str, Any]:
    present = sorted(entry.name for entry in directory.iterdir() if entry.is_file())
    ggufs = [name for name in present if name.endswith(".gguf")]
    if any(name.endswith(".safetensors") for name in present) or not ggufs:
        if "config.json" not in present:
            raise ModelError(f"{directory} is no model: it has neither config.json nor a .gguf file")
        return describe_directory(directory, directory.name, weights=weights, embedding=embedding)
    parts = gguf_parts(directory / ggufs[0])
    if {part.name for part in parts} != set(ggufs):
        raise ModelError(f"{directory} has several models, name one of them: {', '.join(ggufs)}")
    return describe_gguf(parts, directory.name, cache, embedding=embedding)


def _rebuild(files: list[Path], facts_path: Path, tokenizer: Path) -> None:
    # Reading GGUF needs numpy and the gguf package: half a second that a cached model shouldn't pay.
    from forebay.weights.gguf_config import hf_config
    from forebay.weights.gguf_file import GgufFiles
    from forebay.weights.gguf_tensors import check_types
    from forebay.weights.gguf_tokenizer import special_token, tokenizer_json

    opened = GgufFiles.open(files)
    with one_line(f"{files[0]} has metadata"):
        check_types(opened)
        config = hf_config(opened)
        ModelConfig.from_dict(config)
        facts = {
            "config": config,
            "chat_template": opened.metadata.get("tokenizer.chat_template"),
            "bos_token": special_token(opened.metadata, "bos"),
            "eos_token": special_token(opened.metadata, "eos"),
            "generation_config": _sampling(opened.metadata),
        }
        rebuilt = tokenizer_json(opened.metadata)
    try:
        _write_json(tokenizer, rebuilt)
        _write_json(facts_path, facts)
    except OSError as error:
        raise ModelError(f"{facts_path.parent} can't be written: {error.strerror or error}") from error


def _sampling(metadata: Mapping[str, Any]) -> dict[str, float]:
    """The sampling parameters that the file's authors recommend, under their names in generation_config.json."""
    found = {name: metadata.get(f"general.sampling.{key}") for name, key in _SAMPLING.items()}
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


def _content_key(files: list[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"rebuild {_REBUILD_VERSION}".encode())
    try:
        with files[0].open("rb") as file:
            digest.update(file.read(_KEY_BYTES))
        sizes = [file.stat().st_size for file in files]
    except OSError as error:
        raise ModelError(f"{error.filename} can't be read: {error.strerror}") from error
    digest.update(repr(sizes).encode())
    return digest.hexdigest()


def _description(
    *,
    name: str,
    kind: str,
    directory: Path,
    files: list[Path],
    config: dict[str, Any],
    parsed: ModelConfig | EncoderConfig,
    tokenizer: Path,
    tokenizer_config: dict[str, Any],
    chat_template: str | None,
    generation_config: dict[str, Any],
    eos: tuple[int, ...],
    bos_token: str | None,
    eos_token: str | None,
    pooling: Pooling | None,
    images: dict[str, Any] | None = None,
) -> dict[str, Any]:
    if images is not None and pooling is not None:
        raise UnsupportedModelError(f"{name} sees images, and pooling is for models of text")
    return {
        "name": name,
        "format": kind,
        "directory": str(directory),
        "files": [str(file) for file in files],
        "config": config,
        "tokenizer": str(tokenizer),
        "tokenizer_config": tokenizer_config,
        "chat_template": chat_template,
        "generation_config": generation_config,
        "eos_token_ids": sorted(set(eos)),
        "bos_token": bos_token,
        "eos_token": eos_token,
        "context_length": parsed.longest_context,
        "vocab_size": parsed.vocab_size,
        "pooling": None if pooling is None else pooling.to_dict(),
        "images": images,
    }


def _images(directory: Path, model: ModelConfig | EncoderConfig, config: dict[str, Any]) -> dict[str, Any] | None:
    """The way from an image to patches, and their tokens; None: the model takes no images. Raises ModelError."""
    if not isinstance(model, ModelConfig) or model.vision is None:
        return None
    tokens = {key: size(config, key, least=0) for key in _IMAGE_TOKENS}
    return {**read_preprocessing(directory, model.vision).to_dict(), **tokens}


def _chat_template(directory: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """A file of its own wins, as it does in transformers; of several named templates the default is taken."""
    jinja = directory / "chat_template.jinja"
    if jinja.is_file():
        return jinja.read_text(encoding="utf-8")
    separate = read_json(directory / "chat_template.json", optional=True)
    template = separate.get("chat_template") or tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {str(item.get("name")): item.get("template") for item in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_text(config: dict[str, Any], key: str) -> str | None:
    value = config.get(key)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with atomic_file(path) as file:
        file.write(json.dumps(value, ensure_ascii=False).encode())


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns its exit status."""
    return answer(flags("forebay.weights.describe").parse_args(arguments), describe)


def flags(module: str) -> argparse.ArgumentParser:
    """The flags of a command that describes a model."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description="Describe a model.")
    parser.add_argument("path", metavar="PATH", type=Path, help="a directory, or a .gguf file or one of its parts")
    parser.add_argument("--name", metavar="N", help="what the model is called (default: as the directory or the file)")
    parser.add_argument("--cache-dir", metavar="D", help="what is made of models is kept below D")
    parser.add_argument("--no-weights", action="store_true", help="a directory needs no safetensors")
    parser.add_argument("--is-embedding", action="store_true", help="the model is to pool, not to generate")
    return parser


class Describe(Protocol):
    """A way from files to a description."""

    def __call__(
        self, path: Path, name: str | None, cache: Path, /, *, weights: bool, embedding: bool
    ) -> dict[str, Any]:
        """Describes the model in `path`. Raises ModelError."""


def answer(options: argparse.Namespace, describe: Describe) -> int:
    """Prints the description of the model that `flags` name. Returns the exit status."""
    cache = cache_directory(options.cache_dir)
    try:
        with _only_errors():
            description = describe(
                options.path, options.name, cache, weights=not options.no_weights, embedding=options.is_embedding
            )
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # For the hand, which keeps there what it makes of the weights.
    print(json.dumps({**description, "cache": str(cache)}))
    return 0


def describe(path: Path, name: str | None, cache: Path, /, *, weights: bool, embedding: bool) -> dict[str, Any]:
    """The model in `path`, by the name of its repository if there is one. Raises ModelError."""
    if name is None:
        return describe_path(path, cache, weights=weights, embedding=embedding)
    # Which of a repository's files are the model was decided where they were found.
    if path.is_dir():
        return describe_directory(path, name, weights=weights, embedding=embedding)
    return describe_gguf(gguf_parts(path), name, cache, embedding=embedding)


@contextmanager
def _only_errors() -> Iterator[None]:
    """Sends what libraries and their processes print to standard error: the answer is alone on standard output."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


if __name__ == "__main__":
    sys.exit(main())
