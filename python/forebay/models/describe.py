"""The part of a model's description for the brain that only the Transformers library can determine.

`python -m forebay.models.describe PATH --cache-dir D` prints one line of JSON. `tokenizer` is the file that was
converted from a tokenizer in another format. `called` has the findings of a probe of the model's code, if `--probe` is
given. If the model can't run, the exit status is 2, and the last line on stderr is "error: " with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forebay.models.tokenizers import tokenizer_file
from forebay.weights.cache import cache_directory
from forebay.weights.errors import ModelError, UnsupportedModelError
from forebay.weights.files import read_json

__all__ = ["called", "main"]


def called(path: Path) -> dict[str, Any]:
    """Returns the facts that the engine needs to run a model in Transformers' code. Raises ModelError."""
    if not path.is_dir():
        raise UnsupportedModelError(f"{path} is no folder with a config.json, which transformers' code needs")
    config = read_json(path / "config.json")
    own = config.get("auto_map")
    if own and not _is_known(config):
        raise UnsupportedModelError(
            f"its code is in its own repository (auto_map: {', '.join(sorted(own))}), and such code is never run"
        )
    # Imported late: PyTorch and Transformers take seconds to import.
    from forebay.models.probe import probe

    return probe(path).to_dict()


def _is_known(config: dict[str, Any]) -> bool:
    """True if Transformers itself contains the model's code."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return config.get("model_type") in CONFIG_MAPPING


def main(arguments: list[str] | None = None) -> int:
    """Runs the command. Returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m forebay.models.describe", description="Describe a model.")
    parser.add_argument("path", metavar="PATH", type=Path, help="the model's directory")
    parser.add_argument("--cache-dir", metavar="D", help="what is made of models is kept below D")
    parser.add_argument("--probe", action="store_true", help="transformers' code is to compute the model")
    options = parser.parse_args(arguments)
    try:
        with _only_errors():
            found = called(options.path) if options.probe else None
            made = tokenizer_file(options.path, cache_directory(options.cache_dir))
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"tokenizer": None if made is None else str(made), "called": found}))
    return 0


@contextmanager
def _only_errors() -> Iterator[None]:
    """Redirects the output of libraries and their processes to stderr: stdout is for the result only."""
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
