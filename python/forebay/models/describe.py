"""The description of a model that native code or transformers' code computes, for the brain.

`python -m forebay.models.describe PATH --model-impl auto` prints what `forebay.weights.describe` prints. For a model
that native code does not have it prints the findings of a probe too. Exit status and errors are the same.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from forebay.models.tokenizers import tokenizer_file
from forebay.weights.describe import answer, describe_directory, flags
from forebay.weights.describe import describe as describe_native
from forebay.weights.errors import ModelError, UnsupportedModelError
from forebay.weights.files import read_json

__all__ = ["IMPLEMENTATIONS", "describe", "main"]

IMPLEMENTATIONS = ("auto", "native", "transformers")


def describe(
    path: Path, name: str | None, cache: Path, /, *, weights: bool, embedding: bool, implementation: str
) -> dict[str, Any]:
    """The model in `path`; `implementation` is one of `IMPLEMENTATIONS`. Raises ModelError."""
    native = partial(_describe_native, path, name, cache, weights=weights, embedding=embedding)
    if implementation == "native":
        return native()
    why: UnsupportedModelError | None = None
    if implementation == "auto":
        try:
            return native()
        except UnsupportedModelError as error:
            why = error
    try:
        return describe_called(path, name or path.name, cache, weights=weights, embedding=embedding)
    except ModelError as error:
        if why is None:
            raise
        raise UnsupportedModelError(f"{why}. Transformers' code can't serve it either: {error}") from error


def _describe_native(path: Path, name: str | None, cache: Path, *, weights: bool, embedding: bool) -> dict[str, Any]:
    made = tokenizer_file(path, cache) if (path / "config.json").is_file() else None
    if made is None:
        return describe_native(path, name, cache, weights=weights, embedding=embedding)
    return describe_directory(path, name or path.name, weights=weights, embedding=embedding, tokenizer=made)


def describe_called(path: Path, name: str, cache: Path, *, weights: bool, embedding: bool) -> dict[str, Any]:
    """The model in a directory, as transformers' code computes it. Raises ModelError."""
    if not path.is_dir():
        raise UnsupportedModelError(f"{path} is no folder with a config.json, which transformers' code needs")
    config = read_json(path / "config.json")
    own = config.get("auto_map")
    if own and not _is_known(config):
        raise UnsupportedModelError(
            f"its code is in its own repository (auto_map: {', '.join(sorted(own))}), and such code is never run"
        )
    # PyTorch and transformers take seconds to import.
    from forebay.models.probe import probe
    from forebay.weights.called import CalledConfig
    from forebay.weights.config import token_ids

    calls = probe(path)
    text = config.get("text_config") or {}
    eos = token_ids(config.get("eos_token_id")) + token_ids(text.get("eos_token_id"))
    description = describe_directory(
        path,
        name,
        weights=weights,
        embedding=embedding,
        read=lambda config: CalledConfig.of(config, calls, eos),
        tokenizer=tokenizer_file(path, cache),
    )
    if description["pooling"] is not None and description["pooling"]["size"] == 0:
        description["pooling"]["size"] = calls.hidden_size
    return {**description, "called": calls.to_dict()}


def _is_known(config: dict[str, Any]) -> bool:
    """True if transformers itself has the model's code."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return config.get("model_type") in CONFIG_MAPPING


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns its exit status."""
    parser = flags("forebay.models.describe")
    parser.add_argument("--model-impl", choices=IMPLEMENTATIONS, default="auto", help="whose code computes the model")
    options = parser.parse_args(arguments)
    return answer(options, partial(describe, implementation=options.model_impl))


if __name__ == "__main__":
    sys.exit(main())
