"""`python -m forebay.weights.fetch MODEL`: makes a model ready and describes it in one line of JSON.

MODEL is `smollm2` (the default model), a directory, a .gguf file, or a model of the Hugging Face hub: `org/name`,
`org/name@revision`, `org/name:QUANT` or `org/name/file.gguf`. Progress goes to standard error. Exit status 2 and a
last line that starts with "error: " tell what can't be done and why.
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

from forebay.weights import embedded
from forebay.weights.cache import cache_directory
from forebay.weights.describe import describe_gguf, describe_path
from forebay.weights.errors import ModelError

__all__ = ["fetch", "main"]


def fetch(
    model: str,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    offline: bool = False,
    weights: bool = True,
    embedding: bool = False,
) -> dict[str, Any]:
    """Finds or downloads `model`, without its safetensors unless `weights`. Returns what the module prints.

    With `embedding` a model that could generate is described as one that pools.
    Raises ModelError.
    """
    cache = cache_directory(cache_dir)
    hub_cache = cache / "hub" if cache_dir is not None else None
    described = _described(
        model, cache, hub_cache, revision=revision, offline=offline, weights=weights, embedding=embedding
    )
    # For the hand, which keeps there what it makes of the weights.
    return {**described, "cache": str(cache)}


def _described(
    model: str,
    cache: Path,
    hub_cache: Path | None,
    *,
    revision: str | None,
    offline: bool,
    weights: bool,
    embedding: bool,
) -> dict[str, Any]:
    path = Path(model).expanduser()
    if model == embedded.NAME:
        file = embedded.find_or_download(cache, offline=offline)
        return describe_gguf([file], embedded.TITLE, cache, embedding=embedding)
    if path.exists() or model.startswith((".", "/", "~")):
        return describe_path(path, cache, weights=weights, embedding=embedding)

    from forebay.weights import hub

    named = hub.HubModel.parse(model, revision)
    if named is None:
        raise ModelError(
            f"{model!r} is neither a file or directory here, nor a model of the hub (org/name), nor {embedded.NAME!r}"
        )
    return hub.describe_hub_model(
        named, cache, hub_cache=hub_cache, offline=offline, weights=weights, embedding=embedding
    )


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m forebay.weights.fetch", description="Find or download a model.")
    parser.add_argument("model", metavar="MODEL", help="smollm2, a directory, a .gguf file, or a model of the hub")
    parser.add_argument("--revision", metavar="R", help="branch, tag or commit of a model of the hub")
    parser.add_argument(
        "--cache-dir", metavar="D", help="keep everything below D (default: the caches of Forebay and of the hub)"
    )
    parser.add_argument("--offline", action="store_true", help="use only what is on this machine")
    parser.add_argument(
        "--no-weights", action="store_true", help="for dummy weights: a GGUF file is needed all the same"
    )
    parser.add_argument("--is-embedding", action="store_true", help="the model is to pool, not to generate")
    options = parser.parse_args(arguments)
    try:
        with _only_errors():
            description = fetch(
                options.model,
                revision=options.revision,
                cache_dir=options.cache_dir,
                offline=options.offline,
                weights=not options.no_weights,
                embedding=options.is_embedding,
            )
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted; what is downloaded is kept, and the next run goes on from there", file=sys.stderr)
        return 2
    print(json.dumps(description))
    return 0


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
