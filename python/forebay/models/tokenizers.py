"""The `tokenizer.json` of a model, made once of other forms of tokenizers."""

from __future__ import annotations

import hashlib
from pathlib import Path

from forebay.weights.errors import ModelError

__all__ = ["OTHER_FORMS", "tokenizer_file"]

OTHER_FORMS = ("tokenizer.model", "tekken.json", "tiktoken.model", "vocab.json")
"""The files from which transformers can make a fast tokenizer."""
_VERSION = 1
"""It goes up with every change to what is made."""


def tokenizer_file(directory: Path, cache: Path) -> Path | None:
    """The file that was made below `cache`; None: the directory has a `tokenizer.json`, or nothing to make one of.

    Raises ModelError.
    """
    found = [directory / name for name in OTHER_FORMS if (directory / name).is_file()]
    found += sorted(directory.glob("*.tiktoken"))
    if (directory / "tokenizer.json").is_file() or not found:
        return None
    digest = hashlib.blake2b(f"tokenizer {_VERSION}".encode(), digest_size=16)
    for path in (*found, directory / "tokenizer_config.json", directory / "config.json"):
        digest.update(path.read_bytes() if path.is_file() else b"")
    made = cache / "tokenizers" / digest.hexdigest() / "tokenizer.json"
    if not made.is_file():
        _make(directory, made, found[0].name)
    return made


def _make(directory: Path, made: Path, name: str) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ModelError(f"transformers makes no fast tokenizer of {directory / name}")
        text: str = backend.to_str()
    except (ImportError, OSError, ValueError, KeyError) as error:
        why = " ".join(str(error).split())[:300]
        raise ModelError(f"no tokenizer.json can be made of {directory / name}: {why}") from error
    from forebay.weights.cache import atomic_file

    try:
        with atomic_file(made) as file:
            file.write(text.encode())
    except OSError as error:
        raise ModelError(f"{made.parent} can't be written: {error.strerror or error}") from error
